"""Hugging Face's GPT-2 weights as parameters of `zerojax.models.gpt`, and back.

Folders have Hugging Face's layout (`config.json`, and `model.safetensors` or several files with an
index). `load` reads each device's shard of each parameter from the files separately: the host holds
one shard at a time, and no device more than its shards.

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

The parameters that `load` replaces stay in memory until the new ones are loaded: 4 bytes per
parameter over all devices, as much as the step's gradients need later. If `model.config` has
`scan=True`, the layers' tensors are stacked into `[L, ...]` leaves. `zerojax.models.gpt_nnx` has
the same names: `zerojax.weights.load(folder, like=model, names=NAMES)`.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from zerojax import weights
from zerojax.checkpoint.naming import Renamed
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.gpt2_config import SIZES
from zerojax.models.hugging_face.gpt2_config import config_from_hf as config_from_hf
from zerojax.models.hugging_face.gpt2_config import config_to_hf as config_to_hf
from zerojax.models.hugging_face.gpt2_config import read_config as read_config
from zerojax.models.hugging_face.parameters import fields_of, nested, wanted
from zerojax.weights.saver import CONFIG_FILE, MAX_FILE_BYTES
from zerojax.weights.writer import Path

NAMES = weights.Names(
    {
        "{table}/embedding": "{table}.weight",
        "ln_f/scale": "ln_f.weight",
        "ln_f/bias": "ln_f.bias",
        # Conv1D stores [in, out], as flax does.
        "h_{layer:int}/{module:path}/bias": "h.{layer}.{module}.bias",
        "h_{layer:int}/{module:path}/{kind}": "h.{layer}.{module}.weight",
        "h/{module:path}/bias": weights.Tensor("h.{layer}.{module}.bias", "... -> layer ..."),
        "h/{module:path}/{kind}": weights.Tensor("h.{layer}.{module}.weight", "... -> layer ..."),
    },
    prefix="transformer.",  # in the names of a GPT2LMHeadModel, not of a GPT2Model
    ignored=("h.{layer}.attn.bias", "h.{layer}.attn.masked_bias"),  # masks, in older files
    tied={"lm_head.weight": "wte.weight"},
)


def load(path: Path, config: GPTConfig, *, like: Any = None, dtype: Any = None) -> Any:
    """Loads the `params` of `GPT(config)` from a safetensors file or a folder of Hugging Face's.

    Args:
      path: A file, or a folder with `model.safetensors` or `model.safetensors.index.json`. A
        folder's `config.json`, if present, must agree with `config`.
      like: The shardings of the parameters: a tree of arrays or `jax.ShapeDtypeStruct`, such as
        `.params` of `zero.init` or `zero.abstract_state`, or of shardings. None for JAX's default
        device.
      dtype: The dtype of the parameters. None for the dtype of `like`, or float32; fp16 and bf16
        files are widened.

    Returns:
      A tree of arrays with the structure of `like`.

    Raises:
      ValueError: A file is corrupt, or a tensor is missing, unexpected, of a wrong shape or of
        integers. All headers are checked before anything is loaded.
      FileNotFoundError: A file does not exist.
    """
    like = wanted(GPT(config), like, dtype)
    if (pathlib.Path(path) / CONFIG_FILE).exists():
        config_file.check(path, read_config(path), config, SIZES)
    return weights.load(path, like=like, names=NAMES)


def save(
    params: Any, config: GPTConfig, folder: Path, *, max_shard_size: int = MAX_FILE_BYTES
) -> None:
    """Writes parameters of `GPT(config)` to a folder that `load` and transformers can read.

    The folder has `config.json`, the `generation_config.json` of the folder from which `config`
    was read, and `model.safetensors`, or `model-00001-of-0000N.safetensors` and an index if the
    total exceeds `max_shard_size` bytes. The files get their final names at the end, so that an
    error before leaves the folder unchanged.

    Args:
      params: `model.init(...)["params"]` or `state.params`, on any devices of this process.

    Raises:
      ValueError: The arrays are not the parameters of `GPT(config)`, or are stored on other
        processes' devices.
    """
    wanted(GPT(config), params)
    texts = config_file.texts(config, config_to_hf(config))
    weights.save(folder, params, NAMES, texts=texts, max_shard_size=max_shard_size)


def export_names(leaves: Mapping[str, tuple[int, ...]], extra: Any) -> Renamed:
    """Serves `zerojax export CHECKPOINT OUT --names zerojax.models.hugging_face.gpt2:export_names`.

    The exported folder is as `save` writes it. The checkpoint must have been saved with
    `extra={"model": {...}}`, the fields of the `GPTConfig`, because no shape shows `n_head`.

    Args:
      leaves: Shapes by name, such as `h_0.attn.c_attn.kernel`; with `scan=True`, `h.attn...`.

    Raises:
      ValueError: `extra` has no such fields, or the parameters do not match them.
    """
    names = [field for field, _, _ in SIZES]
    model_fields = fields_of(extra, names, "GPTConfig")
    fields = {name: model_fields[name] for name in names}
    scan = any(name.startswith("h.") for name in leaves)
    config = GPTConfig(
        **fields,
        dropout=model_fields.get("dropout", 0.0),
        scan=scan,
        hugging_face=model_fields.get("hugging_face", ""),
    )
    wanted(GPT(config), nested(leaves))
    return Renamed(NAMES, config_file.texts(config, config_to_hf(config)))
