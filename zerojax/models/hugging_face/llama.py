"""Hugging Face's Llama weights as parameters of `zerojax.models.llama`, and back.

Folders are read and written as by `zerojax.models.hugging_face.gpt2`:

>>> import jax, jax.numpy as jnp, tempfile
>>> from zerojax.models.llama import SIZES, Llama, LlamaConfig
>>> config = LlamaConfig(**SIZES["llama-tiny"])
>>> tokens = jnp.zeros((1, 8), jnp.int32)
>>> fresh = Llama(config).init(jax.random.key(1), tokens)["params"]
>>> with tempfile.TemporaryDirectory() as folder:
...     save(fresh, config, folder)
...     model = Llama(read_config(folder))
...     params = load(folder, model.config)
>>> params["layers_0"]["mlp"]["gate_proj"]["kernel"].shape                 # [in, out] in flax
(32, 96)
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from zerojax import weights
from zerojax.checkpoint.naming import Renamed
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.llama_config import SIZES
from zerojax.models.hugging_face.llama_config import config_from_hf as config_from_hf
from zerojax.models.hugging_face.llama_config import config_to_hf as config_to_hf
from zerojax.models.hugging_face.llama_config import read_config as read_config
from zerojax.models.hugging_face.parameters import abstract, by_path, fields_of, nested, wanted
from zerojax.models.llama import Llama, LlamaConfig
from zerojax.weights.names import link
from zerojax.weights.saver import CONFIG_FILE, MAX_FILE_BYTES
from zerojax.weights.writer import Path

_CHECKED = [
    *(("kv_heads" if ours == "n_kv_head" else ours, key, known) for ours, key, known in SIZES),
    ("rope_theta", "rope_theta", None),
]
_IN_LAYER = "model.layers.{layer}.{module}.weight"

NAMES = weights.Names(
    {
        "embed_tokens/embedding": "model.embed_tokens.weight",
        "norm/scale": "model.norm.weight",
        # nn.Linear stores [out, in].
        "{head}/kernel": weights.Tensor("{head}.weight", "o i -> i o"),
        "layers_{layer:int}/{module:path}/kernel": weights.Tensor(_IN_LAYER, "o i -> i o"),
        "layers_{layer:int}/{module:path}/scale": _IN_LAYER,
        "layers/{module:path}/kernel": weights.Tensor(_IN_LAYER, "o i -> layer i o"),
        "layers/{module:path}/scale": weights.Tensor(_IN_LAYER, "i -> layer i"),
    },
    prefix="model.",  # in the names of a LlamaForCausalLM, not of a LlamaModel
    ignored=("layers.{layer}.self_attn.rotary_emb.inv_freq",),  # in older files
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)


def load(path: Path, config: LlamaConfig, *, like: Any = None, dtype: Any = None) -> Any:
    """Loads the `params` of `Llama(config)` from a safetensors file or a folder of Hugging Face's.

    Arguments, result and errors are as for `zerojax.models.hugging_face.gpt2.load`.
    """
    like = wanted(Llama(config), like, dtype)
    if (pathlib.Path(path) / CONFIG_FILE).exists():
        config_file.check(path, read_config(path), config, _CHECKED)
    return weights.load(path, like=like, names=NAMES)


def save(
    params: Any, config: LlamaConfig, folder: Path, *, max_shard_size: int = MAX_FILE_BYTES
) -> None:
    """Writes parameters of `Llama(config)` to a folder that `load` and transformers can read.

    Arguments and errors are as for `zerojax.models.hugging_face.gpt2.save`.
    """
    wanted(Llama(config), params)
    texts = config_file.texts(config, config_to_hf(config))
    weights.save(folder, params, NAMES, texts=texts, max_shard_size=max_shard_size)


def export_names(leaves: Mapping[str, tuple[int, ...]], extra: Any) -> Renamed:
    """Serves `zerojax export ... --names zerojax.models.hugging_face.llama:export_names`.

    The exported folder is as `save` writes it. The checkpoint must have been saved with
    `extra={"model": {...}}`, the fields of the `LlamaConfig`.

    Args:
      leaves: Shapes by name, such as `layers_0.mlp.up_proj.kernel`; with `scan=True`,
        `layers.mlp...`.

    Raises:
      ValueError: `extra` has no such fields, or the parameters do not match them.
    """
    names = [field for field, _, _ in SIZES] + ["rope_theta"]
    model_fields = fields_of(extra, names, "LlamaConfig")
    scan = any(name.startswith("layers.") for name in leaves)
    fields = {name: model_fields[name] for name in names}
    config = LlamaConfig(**fields, scan=scan, hugging_face=model_fields.get("hugging_face", ""))
    wanted(Llama(config), nested(leaves))
    return Renamed(NAMES, config_file.texts(config, config_to_hf(config)))


def from_hf(tensors: Mapping[str, np.ndarray], config: LlamaConfig) -> dict[str, Any]:
    """Returns the `params` of `Llama(config)` as NumPy arrays in the tensors' dtypes.

    Args:
      tensors: Arrays by Hugging Face's names, with or without the prefix `model.`.
        `rotary_emb.inv_freq` is ignored, and so is the `lm_head.weight` of a tied output.
      config: The config of the weights.

    Raises:
      ValueError: Tensors are missing, unexpected, of a wrong shape or not floats; the message lists
        the first few.
    """
    params: dict[str, Any] = weights.rearranged(tensors, abstract(Llama(config)), NAMES)
    return params


def shapes_of(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the tensors that Hugging Face stores for such a model.

    >>> from zerojax.models.llama import SIZES
    >>> shapes_of(LlamaConfig(**SIZES["llama-70b"]))["model.layers.79.self_attn.k_proj.weight"]
    (1024, 8192)
    """
    scanned = Llama(dataclasses.replace(config, scan=True))
    return link(NAMES, {path: x.shape for path, x in by_path(abstract(scanned)).items()}).tensors
