"""GPT-2 weights of Hugging Face as parameters of `zerojax.models.gpt`, and back.

A folder as Hugging Face has it (`config.json`, `model.safetensors` or several files with an
index), shard by shard: each device's piece of each parameter is read from the file by itself. The
host holds one piece at a time, and no device more than its shards.

>>> import jax, jax.numpy as jnp, optax, tempfile, zerojax
>>> from zerojax.models.gpt import GPT, GPTConfig
>>> from zerojax.models.hugging_face.gpt2 import load, read_config, save
>>> from flax.training.train_state import TrainState
>>> folder = tempfile.TemporaryDirectory()           # for you: a download of huggingface.co/gpt2
>>> small = GPTConfig(vocab_size=256, block_size=32, n_layer=2, n_head=2, n_embd=32)
>>> fresh = GPT(small).init(jax.random.key(1), jnp.zeros((1, 8), jnp.int32))["params"]
>>> save(fresh, small, folder.name)

>>> model = GPT(read_config(folder.name))
>>> def create_state(key):
...     params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
...     return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
>>> zero = zerojax.zero(stage=3)
>>> state = zero.init(create_state, jax.random.key(0))
>>> state = state.replace(params=load(folder.name, model.config, like=state.params))
>>> bool((state.params["wte"]["embedding"] == fresh["wte"]["embedding"]).all())
True
>>> folder.cleanup()

The parameters that `load` replaces live until the new ones are loaded: 4 bytes a parameter over all
devices, as much as the step's gradients need later. `model.config` may say `scan=True`; the layers'
tensors then make up `[L, ...]` leaves. `zerojax.models.gpt_nnx` takes the same tree:
`nnx.update(model, load(path, config, like=nnx.to_pure_dict(nnx.state(model, nnx.Param))))`.
"""

import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from zerojax.checkpoint.naming import Renamed
from zerojax.checkpoint.safetensors_files import Path, TensorSpec, writing
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.hugging_face.gpt2_config import CONFIG_FILE, SIZES, check_config
from zerojax.models.hugging_face.gpt2_config import config_from_hf as config_from_hf
from zerojax.models.hugging_face.gpt2_config import config_to_hf as config_to_hf
from zerojax.models.hugging_face.gpt2_config import read_config as read_config
from zerojax.models.hugging_face.gpt2_names import check_fit, is_stacked, names_of
from zerojax.models.hugging_face.pieces import Bounds, from_pieces, to_host
from zerojax.models.hugging_face.read import Tensor, open_tensors

MAX_FILE_BYTES = 5 * 10**9


def load(path: Path, config: GPTConfig, *, like: Any = None, dtype: Any = None) -> Any:
    """The `params` of `GPT(config)` from a safetensors file or a folder of Hugging Face's.

    Args:
      path: A file, or a folder with `model.safetensors` or `model.safetensors.index.json`. A
        folder's `config.json`, if present, must agree with `config`.
      like: The places of the parameters: a tree of arrays or `jax.ShapeDtypeStruct`, such as
        `.params` of `zero.init` or `zero.abstract_state`, or of shardings. None for JAX's default
        device.
      dtype: The dtype of the parameters. None for that of `like`, or float32; fp16 and bf16 files
        are widened.

    Returns:
      A tree of arrays like `like`.

    Raises:
      ValueError: A file is damaged, or a tensor missing, superfluous, of a wrong shape or of
        integers. All headers are checked before anything is loaded.
      FileNotFoundError: A file does not exist.
    """
    wanted, tree = _wanted(config, like, dtype)
    if (pathlib.Path(path) / CONFIG_FILE).exists():
        check_config(path, config)
    with open_tensors(path) as tensors:
        shapes = {name: leaf.shape for name, leaf in wanted.items()}
        sources = check_fit(path, config, shapes, tensors)
        leaves = []
        for name, leaf in wanted.items():
            read = functools.partial(_read, sources[name], is_stacked(name), leaf.dtype)
            leaves.append(from_pieces(leaf.shape, leaf.sharding, read))
    return jax.tree.unflatten(tree, leaves)


def save(
    params: Any, config: GPTConfig, folder: Path, *, max_shard_size: int = MAX_FILE_BYTES
) -> None:
    """Write parameters of `GPT(config)` as a folder that `load` and transformers read.

    `config.json` with `model.safetensors`, or with `model-00001-of-0000N.safetensors` and an index
    where all is more than `max_shard_size` bytes. The host holds one tensor at a time. The files
    take their names at the end: an error before leaves the folder as it was.

    Args:
      params: `model.init(...)["params"]` or `state.params`, on any devices of this process.

    Raises:
      ValueError: They are not the parameters of `GPT(config)`, or lie on other processes' devices.
    """
    _wanted(config, params, None)
    tensors, leaves = [], _by_path(params)
    for path, leaf in leaves.items():
        if not getattr(leaf, "is_fully_addressable", True):
            raise ValueError(
                f"params: {path} {list(leaf.shape)} lies on devices of other processes too: gather "
                "it (jax.experimental.multihost_utils.process_allgather), save in one process"
            )
        shape = leaf.shape[1:] if is_stacked(path) else leaf.shape
        tensors += [TensorSpec(name, shape, leaf.dtype) for name in names_of(path, config)]
    texts = {CONFIG_FILE: _config_text(config)}
    with writing(folder, tensors, max_bytes=max_shard_size, texts=texts) as put:
        for path, leaf in leaves.items():
            for layer, name in enumerate(names_of(path, config)):
                put(name, to_host(leaf, layer if is_stacked(path) else None))


def export_names(leaves: Mapping[str, tuple[int, ...]], extra: Any) -> Renamed:
    """For `zerojax export CHECKPOINT OUT --names zerojax.models.hugging_face.gpt2:export_names`.

    The folder is as `save` writes it, from a checkpoint that was saved with
    `extra={"model": {...}}`: the fields of the `GPTConfig`, of which no shape shows `n_head`.

    Args:
      leaves: Shapes by name, as `h_0.attn.c_attn.kernel`; with `scan=True`, `h.attn...`.

    Raises:
      ValueError: `extra` has no such fields, or the parameters are of another config.
    """
    about = extra.get("model") if isinstance(extra, Mapping) else None
    sizes = [ours for ours, _, _ in SIZES]
    if not isinstance(about, Mapping) or not about.keys() >= set(sizes):
        raise ValueError(
            f"its extra['model'] is {about!r}, but {', '.join(sizes)} of the GPTConfig are needed: "
            "save(step, state, extra={'model': {...}})"
        )
    paths = {name: name.replace(".", "/") for name in leaves}
    scan = any(map(is_stacked, paths.values()))
    fields = {name: about[name] for name in sizes}
    config = GPTConfig(**fields, dropout=about.get("dropout", 0.0), scan=scan)
    like = {path: jax.ShapeDtypeStruct(leaves[name], jnp.float32) for name, path in paths.items()}
    _wanted(config, like, None)
    tensors = {
        name: [(tensor, layer if is_stacked(path) else None)
               for layer, tensor in enumerate(names_of(path, config))]
        for name, path in paths.items()
    }  # fmt: skip
    return Renamed(tensors, {CONFIG_FILE: _config_text(config)})


def _config_text(config: GPTConfig) -> str:
    return json.dumps(config_to_hf(config), indent=2) + "\n"


def _read(sources: Sequence[Tensor], stacked: bool, dtype: Any, bounds: Bounds) -> np.ndarray:
    """A piece of a parameter, the layers of a stacked one read one by one."""
    if not stacked:
        return sources[0].read(tuple(slice(*each) for each in bounds)).astype(dtype, copy=False)
    inner = tuple(slice(*each) for each in bounds[1:])
    piece = np.empty([stop - start for start, stop in bounds], dtype)
    for at, tensor in enumerate(sources[slice(*bounds[0])]):
        piece[at] = tensor.read(inner)
    return piece


def _wanted(
    config: GPTConfig, like: Any, dtype: Any
) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.tree_util.PyTreeDef]:
    """Shape, dtype and sharding of every parameter by path, and the tree they make up."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    model = jax.eval_shape(GPT(config).init, jax.random.key(0), tokens)["params"]
    like = model if like is None else like
    expected, given = _by_path(model), _by_path(like)
    if odd := expected.keys() ^ given.keys():
        name = min(odd)
        whose = "GPT(config)" if name in expected else "the tree given"
        raise ValueError(
            f"only {whose} has the parameter {name} ({len(odd)} such parameters): give the config "
            "that the model was made with, its n_layer and scan among them"
        )
    wanted = {}
    for name, leaf in given.items():
        shape = expected[name].shape
        if not isinstance(leaf, Sharding) and tuple(leaf.shape) != shape:
            raise ValueError(
                f"the parameter {name} is {list(leaf.shape)} in the tree given, "
                f"{list(shape)} in GPT(config): give the config that the model was made with"
            )
        kind = jnp.dtype(dtype or getattr(leaf, "dtype", jnp.float32))
        if not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(f"the parameter {name} shall be {kind}: weights are floats")
        sharding = leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None)
        wanted[name] = jax.ShapeDtypeStruct(shape, kind, sharding=sharding)
    return wanted, jax.tree.structure(like)


def _by_path(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
