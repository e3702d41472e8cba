"""Rules between fields: contradictions, and fields without effect beside the others."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zerojax.config.errors import shown

DYNAMIC = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "raise_error_at_min_scale",
)
"""Fields of a dynamic loss scale."""

OFFLOADS = (
    ("offload_optimizer", 1, "stage 1, 2 or 3, where the optimizer state is sharded"),
    ("offload_param", 3, "stage 3, where parameters are sharded"),
)
"""Each offload section, its first stage, and the requirement in words."""

BOTH = "bfloat16 and fp16 modes cannot be simultaneously enabled"


def contradictions(values: Mapping[str, Any], name: Callable[[str], str] = str) -> Iterator[str]:
    """One problem for each contradiction.

    Args:
      values: Right values by field of `ZeroConfig`; wrong ones are absent.
      name: The name of a field in a message, such as "fp16.enabled" for `fp16`.

    Example:
      >>> list(contradictions({"fp16": True, "bf16": True}))
      ['fp16: bfloat16 and fp16 modes cannot be simultaneously enabled; set fp16 or bf16 to false']
    """
    if values.get("fp16") and values.get("bf16"):
        fp16, bf16 = name("fp16"), name("bf16")
        yield f"{fp16}: {BOTH}; set {fp16} or {bf16} to false"
    scale = values.get("loss_scale", 0)
    smallest, power = values.get("min_loss_scale"), values.get("initial_scale_power")
    if scale == 0 and smallest is not None and power is not None and smallest > 2.0**power:
        yield (
            f"{name('min_loss_scale')} = {shown(smallest)} lies above the initial scale, "
            f"2**{name('initial_scale_power')} = {2.0**power:g}; lower it, or raise the power"
        )

    stage = values.get("stage")
    for field, first, needs in OFFLOADS:
        section = values.get(field)
        if section is not None and stage is not None and stage < first:
            yield (
                f"{name(field)}: {shown(section.device)} needs {needs}, and the stage is {stage}; "
                f"set {name('stage')} to {first}, or the device to none"
            )
    optimizer = values.get("optimizer")
    if optimizer is not None and optimizer.params.get("implementation") == "mosaic_gpu":
        for field, *_ in OFFLOADS:
            if values.get(field) is not None:
                yield (
                    'optimizer.params.implementation: "mosaic_gpu" updates what is on the device, '
                    f"and {name(field)} has the state elsewhere; leave out one of them"
                )


def idle(values: Mapping[str, Any]) -> dict[str, str]:
    """The reason for each field that has no effect beside the others, by name.

    Args:
      values: Values by field of `ZeroConfig`.

    Example:
      >>> idle({"fp16": True, "loss_scale": 128.0})["hysteresis"]
      'the loss scale is static: loss_scale is not 0'
    """
    fp16, bf16 = bool(values.get("fp16")), bool(values.get("bf16"))
    reasons: dict[str, str] = {}
    if not fp16:
        reasons |= dict.fromkeys(("loss_scale", *DYNAMIC), "fp16 is off")
    elif values.get("loss_scale"):
        reasons |= dict.fromkeys(DYNAMIC, "the loss scale is static: loss_scale is not 0")
    if not fp16 and not bf16:
        reasons["auto_cast"] = "fp16 and bf16 are off, so there is no dtype to cast to"
    if fp16:
        reasons |= dict.fromkeys(
            ("check_grad_overflow", "check_finite"),
            "fp16 skips every update that is not finite anyhow",
        )
    elif not bf16:
        reasons["check_grad_overflow"] = "bf16 is off"
    elif values.get("check_finite"):
        reasons["check_grad_overflow"] = "check_finite skips every update that is not finite anyhow"
    if values.get("stage") != 3:
        reasons["stage3_param_persistence_threshold"] = "only stage 3 keeps small parameters whole"
    if not any(values.get(field) for field, *_ in OFFLOADS):
        reasons["sub_group_size"] = "nothing is offloaded"
    return reasons
