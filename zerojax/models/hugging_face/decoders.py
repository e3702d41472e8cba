"""Llama and the model types that differ from it in options of `LlamaConfig`.

>>> format = MISTRAL[0]
>>> config = format.from_hf({"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2})
>>> config.n_embd, config.sliding_window            # as in transformers if a key is missing
(64, 4096)
>>> format.from_hf(format.to_hf(config)) == config
True
"""

from collections.abc import Mapping

from zerojax.models.hugging_face.config_file import Json
from zerojax.models.hugging_face.family import Family
from zerojax.models.llama import FULL, WINDOWED, LlamaConfig
from zerojax.weights import Tensor


def _qwen_layers(values: Json) -> list[str]:
    """Returns the first `max_window_layers` layers as full, the others as windowed."""
    layers, full = values.get("num_hidden_layers", 32), values.get("max_window_layers", 28)
    return [WINDOWED if layer >= full else FULL for layer in range(layers)]


def _gemma_layers(values: Json) -> list[str]:
    """Returns every other layer as windowed, from the first."""
    return [FULL if layer % 2 else WINDOWED for layer in range(values["num_hidden_layers"])]


def _block(config: LlamaConfig) -> tuple[str, str]:
    """Returns the path of a block, and a dimension of layers before those of its kernels."""
    return ("layers", "layer ") if config.scan else ("layers_{layer:int}", "")


def _phi3_names(config: LlamaConfig) -> Mapping[str, Tensor]:
    """Maps q, k and v, and gate and up, to the tensors in which Phi-3 concatenates them."""
    size = config.head_size
    heads = {"q": config.n_head * size, "k": config.kv_heads * size, "v": config.kv_heads * size}
    fused = (
        ("self_attn", "o", "qkv_proj", heads),
        ("mlp", "down", "gate_up_proj", {"gate": config.n_inner, "up": config.n_inner}),
    )
    block, layer = _block(config)
    names = {}
    for module, last, tensor, parts in fused:
        start, name = f"{block}/{module}", f"model.layers.{{layer}}.{module}"
        names[f"{start}/{last}_proj/kernel"] = Tensor(
            f"{name}.{last}_proj.weight", f"o i -> {layer}i o"
        )
        names[f"{start}/{{part}}_proj/kernel"] = Tensor(
            f"{name}.{tensor}.weight", f"(part o) i -> {layer}i o", {"part": parts}
        )
    return names


def _mixtral_names(config: LlamaConfig) -> Mapping[str, Tensor]:
    """Maps the router, and the stacked kernels of the experts, to a tensor an expert."""
    block, layer = _block(config)
    moe = "model.layers.{layer}.block_sparse_moe"
    names = {f"{block}/mlp/gate/kernel": Tensor(f"{moe}.gate.weight", f"o i -> {layer}i o")}
    for kernel, tensor in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        names[f"{block}/mlp/{kernel}_proj"] = Tensor(
            f"{moe}.experts.{{expert}}.{tensor}.weight", f"o i -> {layer}expert i o"
        )
    return names


_WINDOW = ("sliding_window", "sliding_window", 4096)

_LLAMA = Family(
    "llama",
    keys=(
        ("qkv_bias", "attention_bias", False),
        ("output_bias", "attention_bias", False),
        ("mlp_bias", "mlp_bias", False),
    ),
)
_MISTRAL = Family(
    "mistral",
    keys=(_WINDOW,),
    defaults={
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    supported={"layer_types": (None,)},
)  # fmt: skip
_QWEN: Json = {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}  # fmt: skip
_QWEN2 = Family(
    "qwen2",
    fixed={"qkv_bias": True},
    keys=(_WINDOW,),
    defaults=_QWEN,
    layer_types=_qwen_layers,
    optional_window=True,
)
_QWEN3 = Family(
    "qwen3",
    fixed={"qk_norm": True},
    keys=(
        _WINDOW,
        ("qkv_bias", "attention_bias", False),
        ("output_bias", "attention_bias", False),
    ),
    defaults=_QWEN | {"head_dim": 128},
    layer_types=_qwen_layers,
    optional_window=True,
)
_GEMMA2 = Family(
    "gemma2",
    fixed={
        "hidden_act": "gelu_pytorch_tanh", "scaled_embedding": True, "unit_offset": True,
        "post_norms": True,
    },
    keys=(
        _WINDOW,
        ("qkv_bias", "attention_bias", False),
        ("output_bias", "attention_bias", False),
        ("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
        ("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", "final_logit_softcapping", 30.0),
    ),
    defaults={
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    supported={
        "hidden_act": ("gelu_pytorch_tanh",),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    },
    layer_types=_gemma_layers,
)  # fmt: skip
_PHI3 = Family(
    "phi3",
    keys=(("sliding_window", "sliding_window", None),),
    defaults={
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "pad_token_id": 32000,
    },
    supported={"resid_pdrop": (0.0,), "embd_pdrop": (0.0,)},
    names=_phi3_names,
)  # fmt: skip
_MIXTRAL = Family(
    "mixtral",
    keys=(
        ("sliding_window", "sliding_window", None),
        ("num_local_experts", "num_local_experts", 8),
        ("num_experts_per_tok", "num_experts_per_tok", 2),
    ),
    defaults={
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
    },
    supported={"output_router_logits": (False,), "router_jitter_noise": (0.0,)},
    names=_mixtral_names,
)  # fmt: skip

LLAMA, MISTRAL = _LLAMA.formats(), _MISTRAL.formats()
FORMATS = (
    *LLAMA,
    *MISTRAL,
    *(fmt for family in (_QWEN2, _QWEN3, _GEMMA2, _PHI3, _MIXTRAL) for fmt in family.formats()),
)
"""The formats of language models and classifiers."""
