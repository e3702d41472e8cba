"""Settings that exclude each other, and settings that have no effect next to others."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zerojax.config.errors import as_text
from zerojax.config.named_types import TWO_MOMENTS
from zerojax.config.sections import OFFLOAD

_DYNAMIC = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "raise_error_at_min_scale",
)
"""Fields that only a dynamic loss scale uses."""

QUANTIZED = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)
"""Fields that quantize what is gathered or reduced, which stage 0 does not do."""

_NEED_STAGE = {
    "offload_optimizer": (1, "the optimizer state is sharded", '"none"'),
    "offload_param": (3, "parameters are sharded", '"none"'),
    "zero_hpz_partition_size": (3, "parameters are sharded", "1"),
    **dict.fromkeys(QUANTIZED, (1, "parameters are gathered and gradients reduced", "false")),
}
"""The lowest stage that a field needs, the reason, and the value that is off."""

_NOT_WITH_FP8 = {
    **dict.fromkeys(QUANTIZED, False),
    **dict.fromkeys(OFFLOAD, "none"),
    "zero_hpz_partition_size": 1,
    "stage3_max_live_parameters": 0,
    "pipeline_stages": None,
}
"""Settings that exclude fp8, and the values that are off."""

_BOTH = "bfloat16 and fp16 modes cannot be simultaneously enabled"


def contradictions(values: Mapping[str, Any], name: Callable[[str], str] = str) -> Iterator[str]:
    """Yields one problem for each contradiction.

    Args:
      values: Valid values by field of `ZeroConfig`; wrong values are absent.
      name: The name of a field in a message, such as "fp16.enabled" for `fp16`.

    Example:
      >>> list(contradictions({"fp16": True, "bf16": True}))
      ['fp16: bfloat16 and fp16 modes cannot be simultaneously enabled; set fp16 or bf16 to false']
    """
    if values.get("fp16") and values.get("bf16"):
        fp16, bf16 = name("fp16"), name("bf16")
        yield f"{fp16}: {_BOTH}; set {fp16} or {bf16} to false"
    scale = values.get("loss_scale", 0)
    smallest, power = values.get("min_loss_scale"), values.get("initial_scale_power")
    if scale == 0 and smallest is not None and power is not None and smallest > 2.0**power:
        yield (
            f"{name('min_loss_scale')} = {as_text(smallest)} is above the initial scale, "
            f"2**{name('initial_scale_power')} = {2.0**power:g}; lower it, or raise the power"
        )
    optimizer, moments = values.get("optimizer"), name("bf16_optimizer_states")
    low = values.get("bf16") and values.get("bf16_optimizer_states")
    if low and optimizer and optimizer.type not in TWO_MOMENTS:
        yield (
            f"{moments} = true: the moments of {', '.join(TWO_MOMENTS)} may be stored in bf16, and "
            f"optimizer.type is {as_text(optimizer.type)}; set {moments} to false, or name one of "
            "these"
        )
    stage = values.get("stage", 3)  # if that is wrong, nothing needs another
    for field, (lowest, where, off) in _NEED_STAGE.items():
        given = getattr(values.get(field), "device", values.get(field))
        if given and as_text(given) != off and stage < lowest:
            stages = "1, 2 or 3" if lowest == 1 else "3"
            yield (
                f"{name(field)} = {as_text(given)} needs stage {stages}, where {where}, and the "
                f"stage is {stage}; set {name('stage')} to {lowest}, or {name(field)} to {off}"
            )
    partition = values.get("zero_hpz_partition_size", 1)
    if partition > 1:
        hpz = f"{name('zero_hpz_partition_size')} = {partition}"
        for section in (each for each in OFFLOAD if values.get(each) is not None):
            yield (
                f"{hpz} keeps a second shard of the parameters on the device, and {name(section)} "
                "has the state elsewhere; leave out one of them"
            )
    if values.get("fp8"):
        yield from _beside_fp8(values, name)
    block = values.get("zero_quantized_block_size")
    if values.get("zero_quantized_gradients_dtype") == "int4" and block and block % 2:
        yield (
            f"{name('zero_quantized_block_size')} = {block}: blocks of int4 take an even number of "
            f"elements; set {block + 1}, or {name('zero_quantized_gradients_dtype')} to int8"
        )


def _beside_fp8(values: Mapping[str, object], name: Callable[[str], str]) -> Iterator[str]:
    """Yields one problem for each setting that `fp8` needs, or that excludes it."""
    fp8, bf16 = name("fp8"), name("bf16")
    if values.get("bf16") is False:
        also = f" and {name('fp16')} to false" if values.get("fp16") else ""
        yield (
            f"{fp8}: products in fp8 need bf16, in which everything else computes; set {bf16} to "
            f"true{also}, or leave out fp8"
        )
    stage = values.get("stage", 3)
    if stage in (0, 1, 2):
        yield (
            f"{fp8}: products in fp8 read gathered codes, for which parameters must be sharded, "
            f"and the stage is {stage}; set {name('stage')} to 3, or leave out fp8"
        )
    for field, off in _NOT_WITH_FP8.items():
        if (given := values.get(field, off)) not in (off, None):
            given = as_text(getattr(given, "device", given))
            yield (
                f"{fp8}: products in fp8 are not supported with {name(field)} = {given}; set it to "
                f"{as_text(off)}, or leave out fp8"
            )


def idle(values: Mapping[str, object]) -> dict[str, str]:
    """Returns the reason for each field that has no effect with the other fields, by name.

    Args:
      values: Values by field of `ZeroConfig`.

    Example:
      >>> idle({"fp16": True, "loss_scale": 128.0})["hysteresis"]
      'the loss scale is static: loss_scale is not 0'
    """
    fp16, bf16 = bool(values.get("fp16")), bool(values.get("bf16"))
    reasons: dict[str, str] = {}
    if not fp16:
        reasons |= dict.fromkeys(("loss_scale", *_DYNAMIC), "fp16 is off")
    elif values.get("loss_scale"):
        reasons |= dict.fromkeys(_DYNAMIC, "the loss scale is static: loss_scale is not 0")
    if not bf16:
        reasons["bf16_optimizer_states"] = "bf16 is off"
    if not fp16 and not bf16:
        reasons["auto_cast"] = "fp16 and bf16 are off, so there is no dtype to cast to"
    if fp16:
        reasons |= dict.fromkeys(
            ("check_grad_overflow", "check_finite"),
            "fp16 already skips updates that are not finite",
        )
    elif not bf16:
        reasons["check_grad_overflow"] = "bf16 is off"
    elif values.get("check_finite"):
        reasons["check_grad_overflow"] = "check_finite already skips updates that are not finite"
    if values.get("gradient_clipping"):
        reasons["compute_grad_norm"] = "clipping needs the norm"
    elif fp16 or values.get("check_finite") or (bf16 and values.get("check_grad_overflow")):
        reasons["compute_grad_norm"] = "the skipping of updates needs the norm"
    if values.get("stage") != 3:
        reasons["stage3_param_persistence_threshold"] = "only stage 3 replicates small parameters"
    live = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
    if values.get("stage") != 3:
        reasons |= dict.fromkeys(live, "only stage 3 drops gathered parameters")
    elif values.get("offload_param"):
        reasons |= dict.fromkeys(live, "offloaded parameters come in anew for each use")
    elif not values.get(live[0]):
        reasons[live[1]] = f"{live[0]} is 0: nothing stays gathered"
    weights = values.get("zero_quantized_weights")
    if weights:
        reasons["zero_quantized_nontrainable_weights"] = "zero_quantized_weights has all of them"
    elif not values.get("zero_quantized_nontrainable_weights"):
        reasons["zero_quantized_weights_dtype"] = "no parameter is gathered quantized"
    if not values.get("zero_quantized_gradients"):
        reasons["zero_quantized_gradients_dtype"] = "zero_quantized_gradients is off"
        if "zero_quantized_weights_dtype" in reasons:
            reasons["zero_quantized_block_size"] = "nothing is sent quantized"
    if values.get("stage") == 0:
        reasons["mics_shard_size"] = "stage 0 shards nothing"
    if not any(values.get(section) for section in OFFLOAD):
        reasons["sub_group_size"] = "nothing is offloaded"
    return reasons
