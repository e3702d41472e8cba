"""Model types of Hugging Face that `zerojax.models.llama` computes: their keys and tensors.

A `Family` has what is its own, as data; `zerojax.models.hugging_face.decoders` lists them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerojax import weights
from zerojax.models.blocks import INIT_STD
from zerojax.models.config import Fields
from zerojax.models.hugging_face import config_file, rope_keys
from zerojax.models.hugging_face.config_file import Json, Keys, Supported
from zerojax.models.hugging_face.folder import LanguageModel, Loss
from zerojax.models.hugging_face.module_names import module_names
from zerojax.models.llama import FULL, WINDOWED, Llama, LlamaConfig
from zerojax.models.losses import causal_lm_loss, row_classification_loss
from zerojax.weights import Tensor

MODULE = "zerojax.models.llama"
STACK = "layers"

# With the defaults of transformers' LlamaConfig.
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
    ("head_dim", "head_dim", None),
    ("pad_token_id", "pad_token_id", None),
)

# Fields that are no keys of a file, and properties with the numbers that None stands for.
_OURS = ("scan", "remat", "dtype", "hugging_face", "mlp_chunks", "loss_chunks", "num_labels")
_PROPERTIES = {"n_kv_head": "kv_heads", "head_dim": "head_size"}

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

    @property
    def all_keys(self) -> list[tuple[str, str, Any]]:
        """Fields, their keys, and this family's defaults."""
        keys = [*KEYS, *self.keys]
        return [(field, key, self.defaults.get(key, default)) for field, key, default in keys]

    @property
    def all_supported(self) -> Supported:
        """Values that the model supports, by key; the first of each is transformers' default."""
        return {
            "model_type": (self.model_type,),
            "hidden_act": ("silu",),
            "attention_dropout": (0.0,),
            **self.supported,
        }

    def config_from_hf(self, values: Json) -> LlamaConfig:
        """Converts a `config.json`; `config_to_hf` writes its other keys back.

        Raises:
          ValueError: `zerojax.models.llama` does not support a value.
        """
        config_file.check_supported(values, self.all_supported, MODULE)
        fields = config_file.from_keys(self.all_keys, values)
        theta = self.defaults.get("rope_theta", 10000.0)
        fields |= rope_keys.from_hf(values, theta, fields["block_size"])
        fields |= self._windows(values, fields)
        if fields["n_kv_head"] == fields["n_head"]:
            fields["n_kv_head"] = None  # LlamaConfig's form
        if fields["head_dim"] == fields["n_embd"] // fields["n_head"]:
            fields["head_dim"] = None
        kept = config_file.kept(values, without=["head_dim", "num_labels"])
        return LlamaConfig(**fields, **self.fixed, model_type=self.model_type, hugging_face=kept)

    def classifier_from_hf(self, values: Json) -> LlamaConfig:
        """Converts a `config.json` as `config_from_hf` does, with a head for its labels."""
        config = self.config_from_hf(values)
        return dataclasses.replace(config, num_labels=config_file.labels(values))

    def _windows(self, values: Json, fields: Fields) -> Fields:
        """Returns the fields for windows, in the form of `LlamaConfig`."""
        window = fields.get("sliding_window")
        if self.optional_window and not values.get("use_sliding_window"):
            window = None
        kinds: Sequence[str] = ()
        if self.layer_types:
            kinds = values.get("layer_types") or self.layer_types({**self.defaults, **values})
        if window is None or (not {*kinds} - {FULL} and kinds):
            return {"sliding_window": None, "layer_types": ()}
        return {"layer_types": tuple(kinds) if {*kinds} - {WINDOWED} else ()}

    def config_to_hf(self, config: LlamaConfig) -> Json:
        """Returns the `config.json` for transformers, with the other keys of the original file.

        `scan`, `remat`, `dtype` and the numbers of chunks are omitted.

        Raises:
          ValueError: The config has an option that the model type has not.
        """
        head = "CausalLM" if config.num_labels is None else "SequenceClassification"
        values = {
            **{k: x[0] for k, x in self.all_supported.items() if x[0] is not None},
            "initializer_range": INIT_STD,
            "bos_token_id": 1 if config.vocab_size > 2 else None,
            "eos_token_id": 2 if config.vocab_size > 2 else None,
            **config_file.with_labels(config_file.carried(config), config.num_labels),
            "architectures": [f"{self.model_type.capitalize()}For{head}"],
            **config_file.to_keys(self.all_keys, config),
            **self._window_keys(config),
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            **rope_keys.to_hf(config),
        }
        self._check(config, values)
        return values

    def _check(self, config: LlamaConfig, values: Json) -> None:
        """Rejects a config of which its own `config.json` does not have all options."""
        back = self.config_from_hf(values)
        for field in dataclasses.fields(config):
            if field.name in _OURS:
                continue
            name = _PROPERTIES.get(field.name, field.name)
            ours, theirs = getattr(config, name), getattr(back, name)
            if ours != theirs:
                raise ValueError(
                    f"transformers' {self.model_type!r} has {name} = {theirs!r}, not {ours!r}: set "
                    "another model_type in the config"
                )

    def _window_keys(self, config: LlamaConfig) -> Json:
        keys: Json = {}
        window = config.sliding_window
        if self.optional_window:
            keys["use_sliding_window"] = window is not None
        if self.layer_types:
            every = WINDOWED if window else FULL
            keys["layer_types"] = [*(config.layer_types or [every] * config.n_layer)]
        return keys

    def tensor_names(self, config: LlamaConfig) -> weights.Names:
        """Maps paths of a `Llama` to the tensors of transformers' model."""
        is_classifier = config.num_labels is not None
        return weights.Names(
            {
                "{head}/kernel": Tensor("{head}.weight", "o i -> i o"),  # no prefix
                **self.names(config),
                **module_names("model.", STACK),
            },
            prefix="model.",  # in the names of a LlamaForCausalLM, not of a LlamaModel
            ignored=(
                "layers.{layer}.self_attn.rotary_emb.inv_freq",  # in older files
                *(["lm_head.weight"] if is_classifier else []),
            ),
            tied={} if is_classifier else {"lm_head.weight": "model.embed_tokens.weight"},
        )

    def format(self, *, classifier: bool = False) -> LanguageModel[LlamaConfig]:
        """Returns the format of the language model, or of the model with a head for labels."""
        loss: Loss = row_classification_loss if classifier else causal_lm_loss
        checked = [
            (_PROPERTIES.get(field, field), key)
            for field, key, _ in self.all_keys
            if field != "pad_token_id"
        ]
        return LanguageModel(
            LlamaConfig,
            self.classifier_from_hf if classifier else self.config_from_hf,
            self.config_to_hf,
            self.tensor_names,
            needed=("rms_norm_eps", "tie_word_embeddings", "rope_theta"),
            model=Llama,
            loss=loss,
            head=("score/kernel",) if classifier else (),
            stack=STACK,
            checked=[*checked, ("rope_theta", "rope_theta"), ("rope_type", "rope_type")],
        )
