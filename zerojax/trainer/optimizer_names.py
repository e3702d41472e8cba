"""Optimizers by their names in Hugging Face's ``optim``, with their ``optim_args``.

With gradient g, parameter p, weight decay d and rate r, so that p -= r u:

- adamw_torch and its other implementations, lion_32bit, sgd, adagrad: as the JSON's AdamW, Lion,
  SGD, Adagrad, see :func:`zerojax.optim.named.named_optimizer`.
- rmsprop (``torch.optim.RMSprop``): v = a v + (1 - a) g'^2 with g' = g + d p and ``alpha`` a, minus
  the squared mean of g' if ``centered``; u = g' / (sqrt(v) + eps), with ``momentum`` m = mu m + u.
- adafactor (``transformers.optimization.Adafactor`` without relative steps and scaling by
  parameters, as its Trainer has it): second moments by rows and columns with the decay 1 - n^-0.8
  at update n; u over max(1, rms(u)), plus d p. optax factors the two largest dimensions of an
  array, transformers the last two, which is the same for matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import optax

from zerojax.config.errors import ConfigError, as_text, suggestion
from zerojax.config.kinds import ABOVE_ZERO, BETA, FLAG
from zerojax.config.named_types import OPTIMIZERS as TYPES
from zerojax.config.row import Key

Transformations: TypeAlias = list[optax.GradientTransformation]

Rule: TypeAlias = Callable[[Transformations, Mapping[str, Any]], Transformations]
"""Function from the weight decay and the options to the transformations that yield u."""


class Named(NamedTuple):
    """An optimizer of ``optim``.

    Attributes:
      form: Its type in the JSON, or its rule if the JSON has no such type.
      arguments: The parameters of the JSON that training arguments set: "betas" and "eps".
      options: The options of ``optim_args``, whose defaults are PyTorch's.
    """

    form: str | Rule
    arguments: tuple[str, ...] = ()
    options: Mapping[str, Key] = MappingProxyType({})


def _adafactor(decay: Transformations, options: Mapping[str, Any]) -> Transformations:
    moments = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
    return [moments, optax.clip_by_block_rms(1.0), *decay]


def _rmsprop(decay: Transformations, options: Mapping[str, Any]) -> Transformations:
    scale = optax.scale_by_stddev if options["centered"] else optax.scale_by_rms
    rule = scale(decay=options["alpha"], eps=options["eps"], eps_in_sqrt=False)
    return [*decay, rule, *([optax.trace(options["momentum"])] if options["momentum"] else [])]


_ADAMW = Named("AdamW", ("betas", "eps"))
_ADAMWS = (
    "adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_apex_fused adamw_hf "
    "adamw_anyprecision"
)
_MOMENTUM = TYPES["SGD"]["momentum"]

OPTIMIZERS: dict[str, Named] = {
    **dict.fromkeys(_ADAMWS.split(), _ADAMW),
    "adafactor": Named(_adafactor),
    "sgd": Named("SGD", options={"momentum": _MOMENTUM, "nesterov": TYPES["SGD"]["nesterov"]}),
    "adagrad": Named("Adagrad", options={"eps": TYPES["Adagrad"]["eps"]}),
    "rmsprop": Named(
        _rmsprop,
        options={
            "alpha": Key("", BETA, 0.99),
            "eps": Key("", ABOVE_ZERO, 1e-8),
            "momentum": _MOMENTUM,
            "centered": Key("", FLAG, False),
        },
    ),
    "lion_32bit": Named("Lion", ("betas",)),
}
"""The optimizers by their names."""

_ANY = "Trainer(optimizer=...) takes any optax transformation"
_IN_OPTAX = "Trainer(optimizer=optax.contrib.{}(...)) has it"
_SHARDED = '"{}" keeps float32 moments, of which each device has its shard with fsdp or deepspeed'
_PAGED = '"{}" with fsdp="full_shard offload" keeps its state in host memory'

ALTERNATIVES: dict[str, str] = {
    name: why
    for names, why in (
        ("adamw_torch_4bit adamw_torch_8bit adamw_bnb_8bit adamw_8bit",
         _SHARDED.format("adamw_torch")),
        ("lion_8bit", _SHARDED.format("lion_32bit")),
        ("rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit", _SHARDED.format("rmsprop")),
        ("paged_adamw_32bit paged_adamw_8bit", _PAGED.format("adamw_torch")),
        ("paged_lion_32bit paged_lion_8bit", _PAGED.format("lion_32bit")),
        ("ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit",
         _IN_OPTAX.format("ademamix")),
        ("schedule_free_adamw schedule_free_sgd", _IN_OPTAX.format("schedule_free")),
        ("galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise "
         "galore_adamw_8bit_layerwise galore_adafactor_layerwise lomo adalomo grokadamw "
         "schedule_free_radam apollo_adamw apollo_adamw_layerwise stable_adamw", _ANY),
    )
    for name in names.split()
}  # fmt: skip
"""The alternative to each other name of Hugging Face's."""


def optimizer_problems(name: str, options: str | None) -> Iterator[str]:
    """Yields a problem if an optimizer is not supported, or ``optim_args`` is invalid."""
    if name in ALTERNATIVES:
        yield f"optim = {as_text(name)} is not supported: {ALTERNATIVES[name]}"
        return
    try:
        optim_options(name, options)
    except ConfigError as error:
        yield str(error)


def optim_options(name: str, given: str | None) -> dict[str, Any]:
    """Returns the options of an optimizer, with their defaults.

    Args:
      name: A key of :data:`OPTIMIZERS`.
      given: ``optim_args``, "name=value,name=value".

    Raises:
      ConfigError: The text has another form, or the optimizer does not have an option or a value.

    Example:
      >>> optim_options("sgd", "momentum=0.9, nesterov=true")
      {'momentum': 0.9, 'nesterov': True}
    """
    known = OPTIMIZERS[name].options
    values = {option: known[option].default for option in known}
    for entry in filter(None, (given or "").replace(" ", "").split(",")):
        option, equals, text = entry.partition("=")
        if option == "weight_decay" or not equals:
            remedy = "weight_decay is an argument" if equals else "write name=value,name=value"
            raise ConfigError(f"optim_args: {as_text(entry)}: {remedy}")
        if option not in known:
            remedy = suggestion(option, known) if known else "remove it"
            raise ConfigError(f"optim_args: {name} has no {option}; {remedy}")
        kind = known[option].kind
        try:
            values[option] = kind.check(text if kind is FLAG else float(text))
        except (ConfigError, ValueError):
            raise ConfigError(
                f"optim_args: {option}: expected {kind.says}, got {as_text(text)}"
            ) from None
    return values
