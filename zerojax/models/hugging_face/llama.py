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

>>> config = config_from_hf({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2})
>>> config.n_embd, config.n_inner, config.kv_heads      # as in transformers if a key is missing
(64, 11008, 4)
>>> config_from_hf(config_to_hf(config)) == config
True
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from zerojax import weights
from zerojax.models.hugging_face.decoders import LLAMA
from zerojax.models.hugging_face.folder import abstract, by_path
from zerojax.models.llama import Llama, LlamaConfig
from zerojax.weights.names import link
from zerojax.xla.types import PyTree

config_from_hf, config_to_hf, names = LLAMA.from_hf, LLAMA.to_hf, LLAMA.names
load, save, read_config = LLAMA.load, LLAMA.save, LLAMA.read_config
export_names = LLAMA.export_names


def from_hf(tensors: Mapping[str, np.ndarray], config: LlamaConfig) -> PyTree:
    """Returns the `params` of `Llama(config)` as NumPy arrays in the tensors' dtypes.

    Args:
      tensors: Arrays by Hugging Face's names, with or without the prefix `model.`.
        `rotary_emb.inv_freq` is ignored, and so is the `lm_head.weight` of a tied output.
      config: The config of the weights.

    Raises:
      ValueError: Tensors are missing, unexpected, of a wrong shape or not floats; the message lists
        the first few.
    """
    return weights.rearranged(tensors, abstract(Llama(config)), names(config))


def shapes_of(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the tensors that Hugging Face stores for such a model.

    >>> from zerojax.models.llama import SIZES
    >>> shapes_of(LlamaConfig(**SIZES["llama-70b"]))["model.layers.79.self_attn.k_proj.weight"]
    (1024, 8192)
    """
    scanned = Llama(dataclasses.replace(config, scan=True))
    return link(
        names(config), {path: x.shape for path, x in by_path(abstract(scanned)).items()}
    ).tensors
