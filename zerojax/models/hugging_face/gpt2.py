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
`scan=True`, the layers' tensors are stacked into `[L, ...]` leaves. The NNX model of
`examples/nnx_gpt.py` has the same names: `zerojax.weights.load(folder, like=model, names=NAMES)`.

>>> config = config_from_hf({"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_head": 4})
>>> config.block_size, config.n_layer, config.dropout     # as in `gpt2` if a key is missing
(64, 12, 0.1)
>>> config_from_hf(config_to_hf(config)) == config
True
"""

import dataclasses

from zerojax import weights
from zerojax.models.blocks import INIT_STD
from zerojax.models.gpt import GPT, LAYER_NORM_EPS, GPTConfig
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Json, Keys, Supported
from zerojax.models.hugging_face.folder import LanguageModel
from zerojax.models.losses import causal_lm_loss, row_classification_loss

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


def names(config: GPTConfig) -> weights.Names:
    """Returns `NAMES`; with a head for labels, whose tensor has no prefix, those of all tensors."""
    if config.num_labels is None:
        return NAMES
    tensors: dict[str, weights.Tensor] = {
        "score/kernel": weights.Tensor("score.weight", "o i -> i o")
    }
    for path, tensor in NAMES.tensors.items():
        assert tensor is not None
        tensor = weights.Tensor(tensor) if isinstance(tensor, str) else tensor
        tensors[path] = dataclasses.replace(tensor, name=NAMES.prefix + tensor.name)
    ignored = (*NAMES.ignored, "lm_head.weight")
    return dataclasses.replace(NAMES, tensors=tensors, ignored=ignored, tied={})


KEYS: Keys = (
    ("vocab_size", "vocab_size", 50257),
    ("block_size", "n_positions", 1024),
    ("n_layer", "n_layer", 12),
    ("n_head", "n_head", 12),
    ("n_embd", "n_embd", 768),
)
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
DEFAULT_DROPOUT = 0.1

# Values that zerojax.models.gpt supports; the first of each is transformers' default.
SUPPORTED: Supported = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of tanh-GELU
    "layer_norm_epsilon": (LAYER_NORM_EPS,),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}


def config_from_hf(values: Json) -> GPTConfig:
    """Converts a GPT-2's `config.json` to a `GPTConfig`.

    Keys that do not affect the forward pass (token ids, generation, summaries) are kept for
    `config_to_hf`.

    Raises:
      ValueError: `zerojax.models.gpt` does not support a value, such as another activation.
    """
    config_file.check_supported(values, SUPPORTED, "zerojax.models.gpt")
    sizes = config_file.from_keys(KEYS, values)
    widths = {"n_inner": (None, 4 * sizes["n_embd"])}
    config_file.check_supported(values, widths, "zerojax.models.gpt")
    dropouts = {key: values.get(key, DEFAULT_DROPOUT) for key in DROPOUTS}
    if len(set(dropouts.values())) > 1:
        raise ValueError(f"{dropouts} is not supported: zerojax.models.gpt has one dropout rate")
    return GPTConfig(
        **sizes,
        dropout=dropouts["resid_pdrop"],
        pad_token_id=values.get("pad_token_id"),
        hugging_face=config_file.kept(values, without=["num_labels"]),
    )


def classifier_from_hf(values: Json) -> GPTConfig:
    """Converts a `config.json` as `config_from_hf` does, with a head for its labels."""
    return dataclasses.replace(config_from_hf(values), num_labels=config_file.labels(values))


def config_to_hf(config: GPTConfig) -> Json:
    """Returns the `config.json` for transformers, with the other keys of the original file.

    `scan`, `remat` and `dtype` are omitted.
    """
    end_of_text = 50256  # transformers' default, an error if the vocabulary is smaller
    in_vocabulary = config.vocab_size > end_of_text
    return {
        **{key: supported[0] for key, supported in SUPPORTED.items()},
        "initializer_range": INIT_STD,
        "bos_token_id": end_of_text if in_vocabulary else None,
        "eos_token_id": end_of_text if in_vocabulary else None,
        **config_file.with_labels(config_file.carried(config), config.num_labels),
        "architectures": ["GPT2LMHeadModel" if config.num_labels is None else _CLASSIFIER],
        "pad_token_id": config.pad_token_id,
        **config_file.to_keys(KEYS, config),
        **{key: config.dropout for key in DROPOUTS},
        "n_inner": None,
    }


_CLASSIFIER = "GPT2ForSequenceClassification"

FORMAT = LanguageModel(
    GPTConfig,
    config_from_hf,
    config_to_hf,
    names=names,
    model=GPT,
    loss=causal_lm_loss,
    stack="h",
    checked=[(field, key) for field, key, _ in KEYS],
)
CLASSIFIER = dataclasses.replace(
    FORMAT, from_hf=classifier_from_hf, loss=row_classification_loss, head=("score/kernel",)
)
load, save, read_config = FORMAT.load, FORMAT.save, FORMAT.read_config
export_names = FORMAT.export_names
