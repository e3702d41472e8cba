"""The optimizers and schedules that the JSON may name: parameters, and DeepSpeed's defaults.

`zerojax.optim.named` and `zerojax.optim.schedules` build them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from zerojax.config import kinds as k
from zerojax.config.errors import as_text, closest
from zerojax.config.kinds import ValueKind
from zerojax.config.row import REQUIRED, Key

_param = partial(Key, "")
"""A parameter, whose path is that of its type's section."""

_LOUD = "DeepSpeed's default"
_LR = _param(k.AMOUNT, 1e-3, loud=_LOUD)
_EPS = _param(k.AMOUNT, 1e-8)
_BETAS = _param(k.BETAS, (0.9, 0.999))
_NO_AMSGRAD = _param(k.FLAG, False, "AMSGrad is not supported", "off only")
_ANY_FLAG = _param(k.FLAG, False)
_DECAY = {
    "weight_decay": _param(k.AMOUNT, 0.0),
    # zerojax's own key: DeepSpeed decays every parameter.
    "weight_decay_mask": _param(k.choice("all", "no_bias_and_norm"), "all"),
}

_ADAMW: dict[str, Key] = {
    "lr": _LR,
    "betas": _BETAS,
    "eps": _EPS,
    **_DECAY,
    "bias_correction": _param(k.FLAG, True),
    "amsgrad": _NO_AMSGRAD,
    # These flags choose between implementations of one formula.
    "torch_adam": _ANY_FLAG,
    "fused": _ANY_FLAG,
    "set_grad_none": _param(k.FLAG, True),
    "fp32_optimizer_states": _param(
        k.FLAG, True, "bf16.bf16_optimizer_states stores moments in bf16", "off only"
    ),
}
_ADAM = {**_ADAMW, "adam_w_mode": _param(k.FLAG, True)}
# AdamW decouples the weight decay by definition, regardless of the mode.
_ADAMW["adam_w_mode"] = _param(k.FLAG, True, 'for L2 regularisation use type "Adam"', "off only")

OPTIMIZERS: dict[str, dict[str, Key]] = {
    "Adam": _ADAM,
    "AdamW": _ADAMW,
    "FusedAdam": _ADAM,
    "CPUAdam": _ADAM,
    "Lion": {"lr": _LR, "betas": _param(k.BETAS, (0.9, 0.99)), **_DECAY},
    "SGD": {
        "lr": _LR,
        "momentum": _param(k.BETA, 0.0),
        "nesterov": _param(k.FLAG, False),
        **_DECAY,
        "dampening": _param(k.AMOUNT, 0.0, "dampening is not supported", "off only"),
    },
    "Adagrad": {
        "lr": _param(k.AMOUNT, 1e-2, loud=_LOUD),
        "eps": _param(k.AMOUNT, 1e-10),
        **_DECAY,
        "amsgrad": _NO_AMSGRAD,
    },
    "Lamb": {
        "lr": _LR,
        "betas": _BETAS,
        "eps": _EPS,
        **_DECAY,
        "bias_correction": _param(k.FLAG, True),
        "max_coeff": _param(k.ABOVE_ZERO, 10.0),
        "min_coeff": _param(k.AMOUNT, 0.01),
        "eps_inside_sqrt": _param(k.FLAG, False),
        "amsgrad": _NO_AMSGRAD,
    },
    "Muon": {
        # If lr is omitted: this rate for the matrices, 3e-4 for the parameters that Adam updates.
        "lr": _param(k.AMOUNT, 2e-2, loud=_LOUD),
        "muon_lr": _param(k.optional(k.AMOUNT), None),
        "adam_lr": _param(k.optional(k.AMOUNT), None),
        "momentum": _param(k.BETA, 0.95),
        "betas": _param(k.BETAS, (0.9, 0.95)),
        "eps": _param(k.AMOUNT, 1e-10),
        **_DECAY,
        # Two ways to compute one formula.
        "ns_method": _param(k.choice("gram", "standard"), "gram"),
        "per_head_muon": _param(k.FLAG, False, "no head by itself yet", "off only"),
    },
}

TWO_MOMENTS = ("Adam", "AdamW", "FusedAdam", "CPUAdam", "Lamb")
"""Adam's family: optimizers whose moments may be stored in bfloat16."""

REPLACED_TYPES = {"OneBitAdam": "AdamW", "OneBitLamb": "Lamb", "ZeroOneAdam": "AdamW"}
"""DeepSpeed's optimizers that send momenta in 1 bit, which zerojax does not support, with the
optimizer to use instead."""

_LAST = _param(k.INTEGER, -1, "the step counter in the state says where a run resumes", "off only")
_WARMUP = {
    "warmup_num_steps": _param(k.POSITIVE, 1000, loud=_LOUD),
    "warmup_type": _param(k.choice("log", "linear"), "log", loud=_LOUD),
    "last_batch_iteration": _LAST,
}
_TOTAL = _param(
    k.POSITIVE, REQUIRED, "only the training loop knows how long it runs; write the number"
)
_MAX_LR = _param(k.optional(k.AMOUNT), None, auto="the optimizer's learning rate")
_CYCLE_LR = _param(k.AMOUNT, REQUIRED, "DeepSpeed has no default for it; write the number")

SCHEDULERS: dict[str, dict[str, Key]] = {
    "WarmupLR": {"warmup_min_lr": _param(k.AMOUNT, 0.0), "warmup_max_lr": _MAX_LR, **_WARMUP},
    "WarmupDecayLR": {
        "total_num_steps": _TOTAL,
        "warmup_min_lr": _param(k.AMOUNT, 0.0),
        "warmup_max_lr": replace(_MAX_LR, default=1e-3, loud=_LOUD),
        **_WARMUP,
    },
    "WarmupCosineLR": {
        "total_num_steps": _TOTAL,
        "warmup_min_ratio": _param(k.AMOUNT, 0.0),
        "warmup_num_steps": _WARMUP["warmup_num_steps"],
        "cos_min_ratio": _param(k.AMOUNT, 1e-4, loud=_LOUD),
        **_WARMUP,
    },
    "OneCycle": {
        "cycle_min_lr": _CYCLE_LR,
        "cycle_max_lr": _CYCLE_LR,
        "decay_lr_rate": _param(k.AMOUNT, 0.0),
        "cycle_first_step_size": _param(k.POSITIVE, 2000, loud=_LOUD),
        "cycle_second_step_size": _param(k.optional(k.POSITIVE), None),
        # DeepSpeed stores the stair counts but never uses them, so zerojax ignores them too.
        "cycle_first_stair_count": _param(k.optional(k.NON_NEGATIVE), 0),
        "cycle_second_stair_count": _param(k.optional(k.NON_NEGATIVE), None),
        "decay_step_size": _param(k.NON_NEGATIVE, 0),
        "cycle_momentum": _param(k.FLAG, True, loud=_LOUD),
        "cycle_min_mom": _param(k.BETA, 0.8),
        "cycle_max_mom": _param(k.BETA, 0.9),
        "decay_mom_rate": _param(k.NUMBER, 0.0),
        "last_batch_iteration": _LAST,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": _param(k.AMOUNT, 1e-3, loud=_LOUD),
        "lr_range_test_step_size": _param(k.POSITIVE, 2000, loud=_LOUD),
        "lr_range_test_step_rate": _param(k.NUMBER, 1.0, loud=_LOUD),
        "lr_range_test_staircase": _param(k.FLAG, False),
        "last_batch_iteration": _LAST,
    },
}

NAMED_TYPES = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}
"""The parameters of each type, by section and type."""


def known_types(section: str) -> str:
    """Returns the supported types of a section, for a message."""
    return ", ".join(NAMED_TYPES[section])


def _unknown_type(section: str, given: str) -> str:
    """Returns the problem of a type that is not in the table."""
    replaced = {old.lower(): new for old, new in REPLACED_TYPES.items()}
    if section == "optimizer" and (new := replaced.get(given.lower())):
        return (
            f"optimizer.type = {as_text(given)} is not supported: zerojax does not compress "
            f'momenta; write "{new}", and zero_quantized_gradients for less traffic'
        )
    guess = closest(given, NAMED_TYPES[section])
    likely = f"did you mean {as_text(guess)}?" if guess else f"known: {known_types(section)}"
    return f"{section}.type: unknown {section} {as_text(given)}; {likely}"


def types_in(
    raw: Mapping[str, object], keys: Mapping[str, Key]
) -> tuple[dict[str, str], dict[str, Key], list[str]]:
    """Returns the optimizer and the schedule that a config names: the types in the table's spelling
    by section; the known keys, those of their parameters included; a problem for each other type.

    Args:
      raw: The config, in plain dicts; a type is matched case-insensitively.
      keys: The known keys but parameters, by dotted path.
    """
    names: dict[str, str] = {}
    keys, problems = {**keys}, []
    for section, types in NAMED_TYPES.items():
        given = raw.get(section)
        kind = given.get("type") if isinstance(given, Mapping) else None
        if not isinstance(kind, str) or kind == "auto":
            continue
        name = {known.lower(): known for known in types}.get(kind.lower())
        if name is None:
            problems.append(_unknown_type(section, kind))
            continue
        names[section] = name
        del keys[f"{section}.params"]
        for param, key in types[name].items():
            path, why = f"{section}.params.{param}", key.why or f"of {name}"
            keys[path] = replace(key, path=path, why=why)
    return names, keys, problems


def type_keys(section: str) -> dict[str, Key]:
    """Returns the keys of a section, its parameters as a whole."""
    kind = ValueKind(f"one of {known_types(section)}", k.TEXT.annotation)
    keys = (
        Key(f"{section}.type", kind, REQUIRED, "for zero.optimizer()", auto=None),
        Key(f"{section}.params", k.OBJECT, {}, "of no known type", auto=None),
    )
    return {key.path: key for key in keys}
