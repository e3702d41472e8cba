"""Keys of the batch, the precision, clipping, and the named optimizer and schedule."""

from collections.abc import Iterator
from typing import Any

from zerojax.config.errors import shown
from zerojax.config.kinds import (
    AMOUNT,
    COUNT,
    DTYPE,
    FLAG,
    OBJECT,
    POSITIVE,
    POWER,
    SCALE,
    SCALE_OR_ZERO,
    TEXT,
    Kind,
    choice,
    optional,
)
from zerojax.config.row import ANYTHING, FLAG_OFF, Key, honoured, off, switched, taken

MASTERS = "master weights and optimizer state stay in fp32, sharded over the devices"


def batch() -> Iterator[Key]:
    for name, why in {
        "train_batch_size": "rows per update, over all devices",
        "train_micro_batch_size_per_gpu": "rows of one device in one micro-batch",
        "gradient_accumulation_steps": "micro-batches per update",
    }.items():
        auto = "taken from the batch that comes"
        yield from honoured(name, POSITIVE, None, field=name, auto=auto, why=why)
    yield from honoured(
        "gradient_clipping",
        AMOUNT,
        1.0,
        field="gradient_clipping",
        auto="DeepSpeed's default, a global norm of 1.0",
        loud="DeepSpeed clips the global norm to 1.0 unless told otherwise; 0 turns it off",
        why="the largest global norm of the averaged gradient; 0 is off",
    )
    yield from honoured(
        "check_finite",
        FLAG,
        False,
        field="check_finite",
        auto="off: not asked for",
        why="zerojax's own key: true skips updates that are not finite at any precision, as fp16 "
        "does and bf16 with check_grad_overflow; DeepSpeed makes such updates in fp32",
    )
    yield from honoured(
        "data_types.grad_accum_dtype",
        optional(DTYPE),
        None,
        field="grad_accum_dtype",
        auto="the gradient's own dtype",
        why="dtype of the sum over micro-batches; null is the gradient's own",
    )
    yield from off(
        "data_types",
        "fp16 and bf16 choose the compute dtype, the model its buffers'",
        param_dtype=(optional(TEXT), None),
        buffer_dtype=(optional(TEXT), None),
    )


def bf16() -> Iterator[Key]:
    yield from honoured(
        "bf16.enabled",
        FLAG,
        False,
        field="bf16",
        auto='off, unless the program asks for it: auto={"bf16.enabled": True}',
        why="true: the step's body sees parameters in bfloat16",
    )
    yield from honoured(
        "bf16.check_grad_overflow",
        FLAG,
        True,
        field="check_grad_overflow",
        auto="DeepSpeed's default, true",
        loud="DeepSpeed skips updates in bf16 that are not finite unless told otherwise; "
        "false turns it off",
        why="true: updates that are not finite are skipped",
    )
    yield from off(
        "bf16", MASTERS, bf16_master_weights_and_grads=FLAG_OFF, bf16_optimizer_states=FLAG_OFF
    )
    yield from taken(
        "bf16",
        "left to XLA",
        "the compiler adds gradients up as they are produced",
        immediate_grad_update=FLAG_OFF,
    )


def fp16() -> Iterator[Key]:
    yield from honoured(
        "fp16.enabled",
        FLAG,
        False,
        field="fp16",
        auto='off, unless the program asks for it: auto={"fp16.enabled": True}',
        why="true: the step's body sees parameters in float16, and the loss is scaled",
    )
    rows: dict[str, tuple[Kind, Any, str]] = {
        "auto_cast": (*FLAG_OFF, "true: float leaves of the batch are cast to the compute dtype"),
        "loss_scale": (SCALE_OR_ZERO, 0.0, "0 is a dynamic scale, all else a static one"),
        "initial_scale_power": (POWER, 16, "the dynamic scale starts at 2**this"),
        "loss_scale_window": (COUNT, 1000, "good updates after which the scale doubles"),
        "hysteresis": (COUNT, 2, "overflows before the scale halves"),
        "consecutive_hysteresis": (*FLAG_OFF, "true: a good update refills the hysteresis"),
        "min_loss_scale": (SCALE, 1.0, "the scale halves no further"),
    }
    for name, (kind, default, why) in rows.items():
        auto = f"DeepSpeed's default, {shown(default)}"
        yield from honoured(f"fp16.{name}", kind, default, field=name, auto=auto, why=why)
    yield from honoured(
        "fp16.raise_error_at_min_scale",
        FLAG,
        True,
        field="raise_error_at_min_scale",
        auto="as DeepSpeed does: true",
        why="zerojax's own key: true stops at an overflow at the smallest scale, false skips on",
    )
    yield from off("fp16", MASTERS, fp16_master_weights_and_grads=FLAG_OFF)
    yield from taken(
        "fp16", "no effect", "it chooses between implementations", fused_mode=(FLAG, True)
    )
    yield from switched(
        "torch_autocast",
        "use bf16 or fp16; what is to stay in fp32 the model says",
        dtype=(choice("bfloat16", "float16"), "bfloat16"),
        lower_precision_safe_modules=(ANYTHING, None),
    )


def optimizer_and_scheduler() -> Iterator[Key]:
    for section in ("optimizer", "scheduler"):
        yield from honoured(f"{section}.type", TEXT, None, why="for zero.optimizer()")
        yield from honoured(f"{section}.params", OBJECT, {})
    yield from off("optimizer", "it names an Apex optimizer", legacy_fusion=FLAG_OFF)
