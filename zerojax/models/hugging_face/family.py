"""Model types of Hugging Face that `zerojax.models.llama` computes: their keys and tensors.

A `Family` has what is its own, as data; `zerojax.models.hugging_face.decoders` lists them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from zerojax import weights
from zerojax.models.config import Fields
from zerojax.models.hugging_face import rope_keys
from zerojax.models.hugging_face.config_file import Json, Keys, Supported
from zerojax.models.hugging_face.folder import Format
from zerojax.models.hugging_face.module_names import module_names
from zerojax.models.llama import FULL, WINDOWED, Llama, LlamaConfig
from zerojax.models.losses import causal_lm_loss, classification_loss
from zerojax.weights import Tensor

# With the defaults of transformers' LlamaConfig.
KEYS: Keys = (
    ("model_type", "model_type", "llama"),
    ("vocab_size", "vocab_size", 32000),
    ("block_size", "max_position_embeddings", 2048),
    ("n_layer", "num_hidden_layers", 32),
    ("n_head", "num_attention_heads", 32),
    ("n_kv_head", "num_key_value_heads", None),
    ("n_embd", "hidden_size", 4096),
    ("n_inner", "intermediate_size", 11008),
    ("rms_norm_eps", "rms_norm_eps", 1e-6),
    ("tie_word_embeddings", "tie_word_embeddings", False),
    ("head_dim", "head_dim", None),
    ("pad_token_id", "pad_token_id", None),
)

Names = Callable[[LlamaConfig], Mapping[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
      model_type: The key `model_type` of a `config.json`.
      fixed: Fields of the config that all its models share.
      keys: Fields with their keys and transformers' defaults, in addition to `KEYS`.
      defaults: transformers' defaults that differ from those of `KEYS`, by key.
      supported: Values that the model supports, by key.
      layer_types: Returns transformers' default of `layer_types`; None if all layers are alike.
      names: Returns the tensors whose names are the family's own.
      optional_window: Whether the window applies only if `use_sliding_window` is true.
    """

    model_type: str
    fixed: Fields = dataclasses.field(default_factory=dict)
    keys: Keys = ()
    defaults: Json = dataclasses.field(default_factory=dict)
    supported: Supported = dataclasses.field(default_factory=dict)
    layer_types: Callable[[Json], Sequence[str]] | None = None
    names: Names = lambda config: {}
    optional_window: bool = False

    def read(self, values: Json, fields: Fields) -> Fields:
        """Returns the fields of windows and of the rotation, and those that are fixed."""
        window, kinds = fields.get("sliding_window"), None
        if self.optional_window and not values.get("use_sliding_window"):
            window = None
        if self.layer_types and window is not None:
            kinds = {*(layers := values.get("layer_types") or self.layer_types(values))}
            window = window if WINDOWED in kinds else None
        read = {
            "sliding_window": window,
            "layer_types": tuple(layers) if kinds == {WINDOWED, FULL} else (),
            **rope_keys.from_hf(values, fields["block_size"]),
            **self.fixed,
        }
        # None, LlamaConfig's form of numbers that follow from others.
        if fields["n_kv_head"] == fields["n_head"]:
            read["n_kv_head"] = None
        if fields["head_dim"] == fields["n_embd"] // fields["n_head"]:
            read["head_dim"] = None
        return read

    def write(self, config: LlamaConfig, about: Json) -> Json:
        """Returns the keys that are more than a field's value."""
        head = "CausalLM" if config.num_labels is None else "SequenceClassification"
        keys: Json = {
            "bos_token_id": about.get("bos_token_id", 1 if config.vocab_size > 2 else None),
            "eos_token_id": about.get("eos_token_id", 2 if config.vocab_size > 2 else None),
            "architectures": [f"{self.model_type.capitalize()}For{head}"],
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            **rope_keys.to_hf(config),
        }
        if self.optional_window:
            keys["use_sliding_window"] = config.sliding_window is not None
        if self.layer_types:
            every = WINDOWED if config.sliding_window else FULL
            keys["layer_types"] = [*(config.layer_types or [every] * config.n_layer)]
        return keys

    def tensor_names(self, config: LlamaConfig) -> weights.Names:
        """Maps paths of a `Llama` to the tensors of transformers' model."""
        is_classifier = config.num_labels is not None
        return weights.Names(
            {
                "{head}/kernel": Tensor("{head}.weight", "o i -> i o"),  # no prefix
                **self.names(config),
                **module_names("model.", "layers"),
            },
            prefix="model.",  # in the names of a LlamaForCausalLM, not of a LlamaModel
            ignored=(
                "layers.{layer}.self_attn.rotary_emb.inv_freq",  # in older files
                *(["lm_head.weight"] if is_classifier else []),
            ),
            tied={} if is_classifier else {"lm_head.weight": "model.embed_tokens.weight"},
        )

    def formats(self) -> tuple[Format[LlamaConfig], Format[LlamaConfig]]:
        """Returns the formats of the language model, and of the model with a head for labels."""
        name = self.model_type.capitalize()
        model = Format(
            config=LlamaConfig,
            architectures={self.model_type: f"{name}ForCausalLM"},
            kinds={self.model_type: {"model_type": self.model_type, **self.defaults}},
            keys=(*KEYS, *self.keys),
            supported={"hidden_act": ("silu",), "attention_dropout": (0.0,), **self.supported},
            read=self.read,
            write=self.write,
            names=self.tensor_names,
            model=Llama,
            loss=causal_lm_loss,
            needed=("rms_norm_eps", "tie_word_embeddings", "rope_theta"),
        )
        classifier = dataclasses.replace(
            model,
            architectures={self.model_type: f"{name}ForSequenceClassification"},
            has_labels=True,
            loss=classification_loss,
            head=("score/kernel",),
        )
        return model, classifier
