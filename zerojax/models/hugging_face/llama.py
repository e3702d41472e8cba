"""Llama weights of Hugging Face as parameters of `zerojax.models.llama`.

>>> import jax.numpy as jnp
>>> from zerojax.models.llama import SIZES, Llama, LlamaConfig
>>> config = LlamaConfig(**SIZES["llama-tiny"])
>>> rng = np.random.default_rng(0)        # for you: safetensors.numpy.load_file(...) of each file
>>> tensors = {
...     name: rng.normal(0, 0.02, shape).astype(np.float32)
...     for name, shape in shapes_of(config).items()
... }
>>> params = from_hf(tensors, config)
>>> params["layers_0"]["mlp"]["gate_proj"]["kernel"].shape                 # [in, out] in flax
(32, 96)
>>> tokens = jnp.zeros((1, 8), jnp.int32)
>>> jax.eval_shape(Llama(config).apply, {"params": params}, tokens)        # the logits
ShapeDtypeStruct(shape=(1, 8, 256), dtype=float32)
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.models.llama import Llama, LlamaConfig

PREFIX = "model."  # of a LlamaForCausalLM's names; a LlamaModel's have none
HEAD, TABLE = "lm_head.weight", "embed_tokens.weight"
BUFFERS = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # of older transformers
SHOWN = 5


def from_hf(tensors: Mapping[str, np.ndarray], config: LlamaConfig) -> dict[str, Any]:
    """The `params` of `Llama(config)`, as numpy arrays in the tensors' dtypes.

    `nn.Linear`'s weights [out, in] become kernels [in, out]. Unrolled, these are views of the
    tensors; with `scan=True` the layers are copied to `[L, ...]`. Nothing is put on a device:
    `jax.device_put(params, shardings)` does so shard by shard.

    Args:
      tensors: Arrays by Hugging Face's names, with or without `model.` before them.
        `rotary_emb.inv_freq` is ignored, and the `lm_head.weight` of a tied output.
      config: The config of the weights. `n_head`, `rope_theta` and `rms_norm_eps` show in no
        tensor's shape: take them from the model's `config.json`.

    Raises:
      ValueError: Tensors are missing, superfluous, of a wrong shape or no floats; with the first
        few.
    """
    found: dict[str, np.ndarray] = {}
    problems = []
    for name, tensor in tensors.items():
        short = name.removeprefix(PREFIX)
        if short in found:
            problems.append(f"{short} is there twice, with and without {PREFIX!r}")
        if not BUFFERS.fullmatch(short):
            found[short] = tensor
    head = found.pop(HEAD, None) if config.tie_word_embeddings else None
    problems += _unfit(found, {n.removeprefix(PREFIX): s for n, s in shapes_of(config).items()})
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(
            "the tensors do not fit Llama(config):\n  "
            + "\n  ".join(problems[:SHOWN])
            + more
            + "\nGive the config that the weights were made with, the tensors of all its files."
        )
    if head is not None and not np.array_equal(head, found[TABLE]):
        raise ValueError(
            f"{HEAD} {list(head.shape)} differs from {TABLE} {list(found[TABLE].shape)}, but the "
            "config ties the output to the embedding: set tie_word_embeddings=False"
        )

    def leaf(path: Any, layer: int | None = None) -> np.ndarray:
        tensor = found[_name_of(path, layer).removeprefix(PREFIX)]
        return tensor.T if path[-1].key == "kernel" else tensor

    blocks, rest = _parameters(config)
    layers = [
        jax.tree_util.tree_map_with_path(lambda path, _, i=i: leaf(path, i), blocks)
        for i in range(config.n_layer)
    ]
    rest = jax.tree_util.tree_map_with_path(lambda path, _: leaf(path), rest)
    if config.scan:
        return rest | {"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers)}
    return rest | {f"layers_{i}": layer for i, layer in enumerate(layers)}


def shapes_of(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that Hugging Face keeps for such a model.

    >>> from zerojax.models.llama import SIZES
    >>> shapes_of(LlamaConfig(**SIZES["llama-70b"]))["model.layers.79.self_attn.k_proj.weight"]
    (1024, 8192)
    """
    blocks, rest = _parameters(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, tree in [(None, rest), *((i, blocks) for i in range(config.n_layer))]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            shape = leaf.shape[::-1] if path[-1].key == "kernel" else leaf.shape
            shapes[_name_of(path, layer)] = shape
    return shapes


def _parameters(config: LlamaConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes of the parameters of one block, and of those around the blocks."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    one = dataclasses.replace(config, n_layer=1, scan=False)
    params = jax.eval_shape(Llama(one).init, jax.random.key(0), tokens)["params"]
    return params.pop("layers_0"), params


def _name_of(path: Any, layer: int | None) -> str:
    """The tensor of a parameter, by its path in the tree or within the block of that layer."""
    place = ".".join([*(key.key for key in path[:-1]), "weight"])
    if layer is not None:
        return f"{PREFIX}layers.{layer}.{place}"
    return place if place == HEAD else PREFIX + place


def _unfit(found: Mapping[str, np.ndarray], needed: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with the tensors, one line each."""
    problems = []
    for name in sorted(needed.keys() | found.keys()):
        if name not in found:
            problems.append(f"{name} {list(needed[name])} is missing")
        elif name not in needed:
            problems.append(f"{name} {list(found[name].shape)} is no parameter of the model")
        elif found[name].shape != needed[name]:
            problems.append(
                f"{name} is {list(found[name].shape)}, the model needs {list(needed[name])}"
            )
        elif not jnp.issubdtype(found[name].dtype, jnp.floating):
            problems.append(f"{name} is {found[name].dtype}: weights are floats")
    return problems
