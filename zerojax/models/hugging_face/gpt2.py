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
from zerojax.models.config import Fields
from zerojax.models.gpt import GPT, LAYER_NORM_EPS, GPTConfig
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Json
from zerojax.models.hugging_face.folder import Format
from zerojax.models.losses import causal_lm_loss, classification_loss

NAMES = weights.Names(
    {
        "{table}/embedding": "transformer.{table}.weight",
        "{head}/kernel": weights.Tensor("{head}.weight", "o i -> i o"),  # no prefix
        "ln_f/scale": "transformer.ln_f.weight",
        "ln_f/bias": "transformer.ln_f.bias",
        # Conv1D stores [in, out], as flax does.
        "h_{layer:int}/{module:path}/bias": "transformer.h.{layer}.{module}.bias",
        "h_{layer:int}/{module:path}/{kind}": "transformer.h.{layer}.{module}.weight",
        "h/{module:path}/bias": weights.Tensor(
            "transformer.h.{layer}.{module}.bias", "... -> layer ..."
        ),
        "h/{module:path}/{kind}": weights.Tensor(
            "transformer.h.{layer}.{module}.weight", "... -> layer ..."
        ),
    },
    prefix="transformer.",  # in the names of a GPT2LMHeadModel, not of a GPT2Model
    ignored=("h.{layer}.attn.bias", "h.{layer}.attn.masked_bias"),  # masks, in older files
    tied={"lm_head.weight": "transformer.wte.weight"},
)


def names(config: GPTConfig) -> weights.Names:
    """Returns `NAMES`; with a head for labels, those that have no use for a file's LM head."""
    if config.num_labels is None:
        return NAMES
    return dataclasses.replace(NAMES, ignored=(*NAMES.ignored, "lm_head.weight"), tied={})


DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def _read(values: Json, fields: Fields) -> Fields:
    """Returns the one dropout rate."""
    widths = {"n_inner": (None, 4 * fields["n_embd"])}
    config_file.check_supported(values, widths, GPTConfig.__module__)
    dropouts = {key: values[key] for key in DROPOUTS}
    if len(set(dropouts.values())) > 1:
        raise ValueError(f"{dropouts} is not supported: zerojax.models.gpt has one dropout rate")
    return {"dropout": dropouts["resid_pdrop"]}


def _write(config: GPTConfig, about: Json) -> Json:
    end_of_text = 50256  # transformers' default, an error if the vocabulary is smaller
    token = end_of_text if config.vocab_size > end_of_text else None
    head = "LMHeadModel" if config.num_labels is None else "ForSequenceClassification"
    return {
        **{key: about.get(key, token) for key in ("bos_token_id", "eos_token_id")},
        "architectures": [f"GPT2{head}"],
        **dict.fromkeys(DROPOUTS, config.dropout),
        "n_inner": None,
    }


FORMAT = Format(
    config=GPTConfig,
    architectures={"gpt2": "GPT2LMHeadModel"},
    kinds={"gpt2": dict.fromkeys(DROPOUTS, 0.1)},
    keys=(
        ("vocab_size", "vocab_size", 50257),
        ("block_size", "n_positions", 1024),
        ("n_layer", "n_layer", 12),
        ("n_head", "n_head", 12),
        ("n_embd", "n_embd", 768),
        ("pad_token_id", "pad_token_id", None),
    ),
    supported={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of tanh-GELU
        "layer_norm_epsilon": (LAYER_NORM_EPS,),
        "tie_word_embeddings": (True,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    read=_read,
    write=_write,
    names=names,
    model=GPT,
    loss=causal_lm_loss,
)
CLASSIFIER = dataclasses.replace(
    FORMAT,
    architectures={"gpt2": "GPT2ForSequenceClassification"},
    has_labels=True,
    loss=classification_loss,
    head=("score/kernel",),
)
config_from_hf, config_to_hf, read_config = FORMAT.from_hf, FORMAT.to_hf, FORMAT.read_config
load, save, export_names = FORMAT.load, FORMAT.save, FORMAT.export_names
