"""The named optimizers and schedules of the JSON, with their parameters and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zerojax.config.errors import closest, shown
from zerojax.config.kinds import (
    ABOVE_ZERO,
    AMOUNT,
    BETA,
    BETAS,
    FLAG,
    INTEGER,
    NUMBER,
    POSITIVE,
    WHOLE,
    Kind,
    choice,
    optional,
)

REQUIRED = object()
"""The default of a parameter that has none."""


@dataclass(frozen=True)
class Param:
    """A parameter of an optimizer or a schedule.

    Attributes:
      kind: what the value may be.
      default: DeepSpeed's, or `REQUIRED`.
      only: the values that are supported, where not all of the kind are.
      why: why the others are not, with the remedy; for `REQUIRED`, why "auto" cannot be resolved.
      loud: its default is reported when a JSON omits it.
    """

    kind: Kind
    default: Any
    only: tuple[Any, ...] = ()
    why: str = ""
    loud: bool = False


@dataclass(frozen=True)
class Family:
    """One optimizer or schedule: its parameters, or the reason it is refused."""

    params: Mapping[str, Param] = field(default_factory=dict)
    refused: str = ""


_LR = Param(AMOUNT, 1e-3, loud=True)
_DECAY = Param(AMOUNT, 0.0)
_EPS = Param(AMOUNT, 1e-8)
_BETAS = Param(BETAS, (0.9, 0.999))
_NO_AMSGRAD = Param(FLAG, False, (False,), "AMSGrad is not supported; leave it out")
_ANY_FLAG = Param(FLAG, False)

_ADAMW: dict[str, Param] = {
    "lr": _LR,
    "betas": _BETAS,
    "eps": _EPS,
    "weight_decay": _DECAY,
    "bias_correction": Param(FLAG, True),
    "amsgrad": _NO_AMSGRAD,
    # These choose between implementations of one formula.
    "torch_adam": _ANY_FLAG,
    "fused": _ANY_FLAG,
    "set_grad_none": Param(FLAG, True),
    "fp32_optimizer_states": Param(FLAG, True, (True,), "moments stay in fp32; leave it out"),
}
_ADAM = {**_ADAMW, "adam_w_mode": Param(FLAG, True)}
# AdamW decouples the decay by name, whatever the mode says.
_ADAMW["adam_w_mode"] = Param(FLAG, True, (True,), 'for L2 regularisation use type "Adam"')

_ONE_BIT = "1-bit compression is not there yet; use AdamW or Lamb"

OPTIMIZERS: dict[str, Family] = {
    "Adam": Family(_ADAM),
    "AdamW": Family(_ADAMW),
    "FusedAdam": Family(_ADAM),
    "CPUAdam": Family(_ADAM),
    "Lion": Family({"lr": _LR, "betas": Param(BETAS, (0.9, 0.99)), "weight_decay": _DECAY}),
    "SGD": Family(
        {
            "lr": _LR,
            "momentum": Param(BETA, 0.0),
            "nesterov": Param(FLAG, False),
            "weight_decay": _DECAY,
            "dampening": Param(AMOUNT, 0.0, (0.0,), "dampening is not supported; leave it out"),
        }
    ),
    "Adagrad": Family(
        {
            "lr": Param(AMOUNT, 1e-2, loud=True),
            "eps": Param(AMOUNT, 1e-10),
            "weight_decay": _DECAY,
            "amsgrad": _NO_AMSGRAD,
        }
    ),
    "Lamb": Family(
        {
            "lr": _LR,
            "betas": _BETAS,
            "eps": _EPS,
            "weight_decay": _DECAY,
            "bias_correction": Param(FLAG, True),
            "max_coeff": Param(ABOVE_ZERO, 10.0),
            "min_coeff": Param(AMOUNT, 0.01),
            "eps_inside_sqrt": Param(FLAG, False),
            "amsgrad": _NO_AMSGRAD,
        }
    ),
    "Muon": Family(refused="Muon is not there yet; use AdamW"),
    "OneBitAdam": Family(refused=_ONE_BIT),
    "ZeroOneAdam": Family(refused=_ONE_BIT),
    "OneBitLamb": Family(refused=_ONE_BIT),
}

_WARMUP_STEPS = Param(POSITIVE, 1000, loud=True)
_WARMUP_TYPE = Param(choice("log", "linear"), "log", loud=True)
_LAST = Param(INTEGER, -1, (-1,), "the step counter in the state says where a run resumes")
_TOTAL = Param(
    POSITIVE, REQUIRED, why="only the training loop knows how long it runs; write the number"
)
_MOMENTUM = "cycling the momentum is not there yet; set cycle_momentum to false"
_STAIRS = "stairs are not supported; leave it at 0"
_CYCLE_LR = Param(AMOUNT, REQUIRED, why="DeepSpeed has no default for it; write the number")

SCHEDULERS: dict[str, Family] = {
    "WarmupLR": Family(
        {
            "warmup_min_lr": Param(AMOUNT, 0.0),
            # null: the optimizer's own rate.
            "warmup_max_lr": Param(optional(AMOUNT), None),
            "warmup_num_steps": _WARMUP_STEPS,
            "warmup_type": _WARMUP_TYPE,
            "last_batch_iteration": _LAST,
        }
    ),
    "WarmupDecayLR": Family(
        {
            "total_num_steps": _TOTAL,
            "warmup_min_lr": Param(AMOUNT, 0.0),
            "warmup_max_lr": Param(AMOUNT, 1e-3, loud=True),
            "warmup_num_steps": _WARMUP_STEPS,
            "warmup_type": _WARMUP_TYPE,
            "last_batch_iteration": _LAST,
        }
    ),
    "WarmupCosineLR": Family(
        {
            "total_num_steps": _TOTAL,
            "warmup_min_ratio": Param(AMOUNT, 0.0),
            "warmup_num_steps": _WARMUP_STEPS,
            "cos_min_ratio": Param(AMOUNT, 1e-4, loud=True),
            "warmup_type": _WARMUP_TYPE,
            "last_batch_iteration": _LAST,
        }
    ),
    "OneCycle": Family(
        {
            "cycle_min_lr": _CYCLE_LR,
            "cycle_max_lr": _CYCLE_LR,
            "decay_lr_rate": Param(AMOUNT, 0.0),
            "cycle_first_step_size": Param(POSITIVE, 2000, loud=True),
            "cycle_second_step_size": Param(optional(POSITIVE), None),
            "cycle_first_stair_count": Param(optional(WHOLE), 0, (0, None), _STAIRS),
            "cycle_second_stair_count": Param(optional(WHOLE), None, (0, None), _STAIRS),
            "decay_step_size": Param(WHOLE, 0),
            "cycle_momentum": Param(FLAG, True, (False,), _MOMENTUM),
            "cycle_min_mom": Param(NUMBER, 0.8),
            "cycle_max_mom": Param(NUMBER, 0.9),
            "decay_mom_rate": Param(NUMBER, 0.0),
            "last_batch_iteration": _LAST,
        }
    ),
    "LRRangeTest": Family(
        {
            "lr_range_test_min_lr": Param(AMOUNT, 1e-3, loud=True),
            "lr_range_test_step_size": Param(POSITIVE, 2000, loud=True),
            "lr_range_test_step_rate": Param(NUMBER, 1.0, loud=True),
            "lr_range_test_staircase": _ANY_FLAG,
            "last_batch_iteration": _LAST,
        }
    ),
}

FAMILIES = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}


def known_types(section: str) -> str:
    """The names that are supported, for a message."""
    return ", ".join(name for name, family in FAMILIES[section].items() if not family.refused)


def resolve_type(section: str, given: str) -> tuple[str | None, list[str]]:
    """The name as the table has it, in any case, and what is wrong with it."""
    families = FAMILIES[section]
    name = {known.lower(): known for known in families}.get(given.lower())
    if name is None:
        guess = closest(given, families)
        hint = f"did you mean {shown(guess)}?" if guess else f"known: {known_types(section)}"
        return None, [f"{section}.type: unknown {section} {shown(given)}; {hint}"]
    if families[name].refused:
        return None, [f"{section}.type = {shown(name)} is not supported: {families[name].refused}"]
    return name, []


class Checked(NamedTuple):
    """What `check_params` found.

    Attributes:
      values: the parameters given, as their kinds; a list has become a tuple.
      autos: the names given as "auto", which their defaults resolve.
      problems: one sentence for each that is wrong.
    """

    values: dict[str, Any]
    autos: list[str]
    problems: list[str]


def check_params(
    section: str, name: str, given: Mapping[str, Any], *, json: bool = False
) -> Checked:
    """Judges the parameters of an optimizer or a schedule.

    Args:
      section: "optimizer" or "scheduler".
      name: as `resolve_type` gives it.
      given: the parameters.
      json: resolve "auto", and judge the defaults of those left out, which hold in a JSON.
    """
    table = FAMILIES[section][name].params
    found = Checked({}, [], [])
    for key, value in given.items():
        path = f"{section}.params.{key}"
        if key not in table:
            found.problems.append(_unknown(section, key, name, table))
        elif json and value == "auto":
            if table[key].default is REQUIRED:
                found.problems.append(f'{path}: "auto" cannot be resolved: {table[key].why}')
            else:
                found.autos.append(key)
        elif not table[key].kind.accepts(value):
            found.problems.append(f"{path}: expected {table[key].kind.says}, got {shown(value)}")
        else:
            found.values[key] = table[key].kind.check(value)
    for key, param in table.items():
        path = f"{section}.params.{key}"
        if key not in given and param.default is REQUIRED:
            problem = f"{path}: {name} needs it, as {param.kind.says}"
        elif key in found.values and param.only and found.values[key] not in param.only:
            problem = f"{path} = {shown(found.values[key])} is not supported: {param.why}"
        elif json and key not in found.values and param.only and param.default not in param.only:
            told = f"{shown(param.default)}, DeepSpeed's default,"
            problem = f"{path} = {told} is not supported: {param.why}"
        else:
            continue
        found.problems.append(problem)
    return found


def _unknown(section: str, key: str, name: str, table: Mapping[str, Param]) -> str:
    path = f"{section}.params.{key}"
    if section == "optimizer" and key == "max_grad_norm":
        return f"{path}: not a parameter of the optimizer; use `gradient_clipping` at the top level"
    guess = closest(key, table)
    hint = f"did you mean `{guess}`?" if guess else "known: " + ", ".join(table)
    return f"{path}: unknown parameter of {name}; {hint}"
