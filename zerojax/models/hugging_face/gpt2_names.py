"""The tensors of a Hugging Face GPT-2 that make up each parameter, and the check that they fit.

>>> config = GPTConfig(vocab_size=256, block_size=64, n_layer=2, n_head=4, n_embd=64)
>>> names_of("h_1/attn/c_attn/kernel", config)
('h.1.attn.c_attn.weight',)
>>> names_of("h/ln_1/scale", config)                       # scan=True: a leaf of all layers
('h.0.ln_1.weight', 'h.1.ln_1.weight')
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from zerojax.models.gpt import GPTConfig
from zerojax.models.hugging_face.read import Tensor

PREFIX = "transformer."  # of a GPT2LMHeadModel's names; a GPT2Model's have none
HEAD, TABLE = "lm_head.weight", "wte.weight"
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # causal masks of older transformers
KINDS = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
DTYPES = ("F64", "F32", "F16", "BF16")
SHOWN = 5
ROWS = 1024  # of the embedding, read at a time


def is_stacked(path: str) -> bool:
    """Whether a parameter has a leading dimension of layers."""
    return path.startswith("h/")


def names_of(path: str, config: GPTConfig) -> tuple[str, ...]:
    """The tensors of a parameter: one, or of a stacked parameter one for each layer.

    Args:
      path: The parameter's, as `jax.tree_util.keystr(path, simple=True, separator="/")`.
      config: The sizes of the model.
    """
    *modules, leaf = path.split("/")
    tail = ".".join([*modules[1:], KINDS[leaf]])
    if is_stacked(path):
        return tuple(f"h.{layer}.{tail}" for layer in range(config.n_layer))
    return (f"{modules[0].replace('h_', 'h.')}.{tail}",)


def check_fit(
    source: Any,
    config: GPTConfig,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
) -> dict[str, list[Tensor]]:
    """The tensors of each parameter, after a check of every header.

    The mask buffers `h.N.attn.bias` and `h.N.attn.masked_bias` are ignored, and `lm_head.weight`
    where it equals `wte.weight`.

    Args:
      source: The file or folder, for messages.
      config: The sizes of the model.
      shapes: Shapes of the parameters, by path.
      tensors: The tensors found, by name.

    Raises:
      ValueError: Tensors are missing, superfluous, of a wrong shape or dtype; with the first few.
    """
    found: dict[str, Tensor] = {}
    problems = []
    for name, tensor in tensors.items():
        short = name.removeprefix(PREFIX)
        if short in found:
            problems.append(f"{tensor.file}: {short} is there twice, with and without {PREFIX!r}")
        if not BUFFERS.fullmatch(short):
            found[short] = tensor
    needed = {name: shape[1:] if is_stacked(path) else shape for path, shape in shapes.items()
              for name in names_of(path, config)}  # fmt: skip
    depth = 1 + max((int(n.split(".")[1]) for n in found if re.match(r"h\.\d+\.", n)), default=-1)
    if depth != config.n_layer:
        problems.append(
            f"{source}: {depth} layers (h.0, h.1, ...), the model has n_layer = {config.n_layer}"
        )
    head = found.pop(HEAD, None)
    for name in sorted(needed.keys() | found.keys()):
        if name not in found:
            problems.append(f"{source}: {name} {list(needed[name])} is missing")
        elif name not in needed:
            tensor = found[name]
            problems.append(
                f"{tensor.file}: {name} {list(tensor.shape)} is one tensor too many, no parameter "
                "of the model"
            )
        else:
            problems += _mismatch(name, found[name], needed[name])
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(
            f"{source} does not fit the model; nothing was loaded:\n  "
            + "\n  ".join(problems[:SHOWN])
            + more
            + "\nBuild the model from read_config(folder), or load the file that was saved for it."
        )
    if head is not None:
        _check_tied(head, found[TABLE])
    return {path: [found[name] for name in names_of(path, config)] for path in shapes}


def _mismatch(name: str, tensor: Tensor, needed: tuple[int, ...]) -> list[str]:
    if tensor.dtype not in DTYPES:
        return [
            f"{tensor.file}: {name} {list(tensor.shape)} is {tensor.dtype}, weights are "
            f"{', '.join(DTYPES)}: a quantized model must be saved in one of them first"
        ]
    if tensor.shape == needed:
        return []
    remedy = ""
    if name in (TABLE, "wpe.weight") and tensor.shape[1:] == needed[1:]:
        size = "vocab_size" if name == TABLE else "block_size"
        remedy = f": GPTConfig({size}={tensor.shape[0]})"
    elif tensor.shape == needed[::-1]:
        remedy = ": transpose it, Hugging Face's GPT-2 keeps [in, out]"
    return [
        f"{tensor.file}: {name} is {list(tensor.shape)}, the model needs {list(needed)}{remedy}"
    ]


def _check_tied(head: Tensor, table: Tensor) -> None:
    """Refuse output weights other than the embedding: the model would compute something else."""
    same = head.shape == table.shape and all(
        np.array_equal(head.read(rows), table.read(rows))
        for start in range(0, table.shape[0], ROWS)
        for rows in [(slice(start, min(start + ROWS, table.shape[0])), slice(0, table.shape[1]))]
    )
    if not same:
        raise ValueError(
            f"{head.file}: {HEAD} {list(head.shape)} differs from {TABLE}, but "
            "zerojax.models.gpt ties the output to the embedding; nothing was loaded. "
            "Untied models are not supported"
        )
