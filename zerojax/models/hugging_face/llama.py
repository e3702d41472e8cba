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
from zerojax.models.blocks import INIT_STD
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Json, Keys, Supported
from zerojax.models.hugging_face.folder import LanguageModel, abstract, by_path
from zerojax.models.hugging_face.module_names import module_names
from zerojax.models.llama import Llama, LlamaConfig
from zerojax.models.losses import causal_lm_loss
from zerojax.weights.names import link
from zerojax.xla.types import PyTree

NAMES = weights.Names(
    {
        "{head}/kernel": weights.Tensor("{head}.weight", "o i -> i o"),  # no prefix
        **module_names("model.", "layers"),
    },
    prefix="model.",  # in the names of a LlamaForCausalLM, not of a LlamaModel
    ignored=("layers.{layer}.self_attn.rotary_emb.inv_freq",),  # in older files
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)

KEYS: Keys = (
    ("vocab_size", "vocab_size", 32000),
    ("block_size", "max_position_embeddings", 2048),
    ("n_layer", "num_hidden_layers", 32),
    ("n_head", "num_attention_heads", 32),
    ("n_kv_head", "num_key_value_heads", None),
    ("n_embd", "hidden_size", 4096),
    ("n_inner", "intermediate_size", 11008),
    ("rms_norm_eps", "rms_norm_eps", 1e-6),
    ("tie_word_embeddings", "tie_word_embeddings", False),
)
ROPE_THETA = 10000.0

# Values that zerojax.models.llama supports; the first of each is transformers' default.
SUPPORTED: Supported = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "rope_scaling": (None,),
}


def config_from_hf(values: Json) -> LlamaConfig:
    """Converts a Llama's `config.json` to a `LlamaConfig`.

    Keys that do not affect the forward pass (token ids, generation) are kept for `config_to_hf`.

    Raises:
      ValueError: `zerojax.models.llama` does not support a value, such as scaled rotations.
    """
    module = "zerojax.models.llama"
    # From transformers 5 on; older files have a separate rope_theta, and rope_scaling for the rest.
    rope: Json = values.get("rope_parameters") or {}
    config_file.check_supported(values, SUPPORTED, module)
    config_file.check_supported(rope, {"rope_type": ("default",)}, module)
    sizes = config_file.from_keys(KEYS, values)
    theta = {"rope_theta": ROPE_THETA, **values, **rope}["rope_theta"]
    if sizes["n_kv_head"] == sizes["n_head"]:
        sizes["n_kv_head"] = None  # LlamaConfig's form
    config = LlamaConfig(
        **sizes,
        rope_theta=theta,
        hugging_face=config_file.kept(values, without=["head_dim"]),
    )
    if values.get("head_dim") not in (None, config.head_size):
        raise ValueError(
            f"head_dim = {values['head_dim']!r} is not supported: {module} has heads of "
            f"hidden_size / num_attention_heads = {config.head_size}"
        )
    return config


def config_to_hf(config: LlamaConfig) -> Json:
    """Returns the `config.json` for transformers, with the other keys of the original file.

    `scan`, `remat` and `dtype` are omitted.
    """
    return {
        **{key: supported[0] for key, supported in SUPPORTED.items() if key != "rope_scaling"},
        "initializer_range": INIT_STD,
        "bos_token_id": 1 if config.vocab_size > 2 else None,
        "eos_token_id": 2 if config.vocab_size > 2 else None,
        **config_file.carried(config),
        "architectures": ["LlamaForCausalLM"],
        **config_file.to_keys(KEYS, config),
        "num_key_value_heads": config.kv_heads,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


# `kv_heads` has the number that `n_kv_head=None` stands for.
_CHECKED = [("kv_heads" if field == "n_kv_head" else field, key) for field, key, _ in KEYS]

FORMAT = LanguageModel(
    LlamaConfig,
    config_from_hf,
    config_to_hf,
    names=lambda config: NAMES,
    needed=("rms_norm_eps", "tie_word_embeddings", "rope_theta"),
    model=Llama,
    loss=causal_lm_loss,
    keys=[*(key for _, key, _ in KEYS), *SUPPORTED, "rope_theta", "rope_parameters", "head_dim"],
    stack="layers",
    checked=[*_CHECKED, ("rope_theta", "rope_theta")],
)
load, save, read_config = FORMAT.load, FORMAT.save, FORMAT.read_config
export_names = FORMAT.export_names


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
    return weights.rearranged(tensors, abstract(Llama(config)), NAMES)


def shapes_of(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the tensors that Hugging Face stores for such a model.

    >>> from zerojax.models.llama import SIZES
    >>> shapes_of(LlamaConfig(**SIZES["llama-70b"]))["model.layers.79.self_attn.k_proj.weight"]
    (1024, 8192)
    """
    scanned = Llama(dataclasses.replace(config, scan=True))
    return link(NAMES, {path: x.shape for path, x in by_path(abstract(scanned)).items()}).tensors
