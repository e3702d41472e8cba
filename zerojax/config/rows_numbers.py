"""Keys of the batch, the precision, clipping, and the named optimizer and schedule."""

from collections.abc import Iterator

from zerojax.config.kinds import (
    ABOVE_ZERO,
    AMOUNT,
    DTYPE,
    FLAG,
    OBJECT,
    POSITIVE,
    TEXT,
    WHOLE,
    optional,
)
from zerojax.config.row import FLAG_OFF, Key, honoured, off, taken


def batch_and_numbers() -> Iterator[Key]:
    for name in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ):
        yield from honoured(
            name, POSITIVE, None, field=name, auto="taken from the batch that comes"
        )
    yield from honoured(
        "gradient_clipping",
        AMOUNT,
        1.0,
        field="gradient_clipping",
        auto="DeepSpeed's default, a global norm of 1.0",
        loud=True,
        why="DeepSpeed clips the global norm to 1.0 unless told otherwise; 0 turns it off",
    )
    yield from honoured(
        "data_types.grad_accum_dtype",
        optional(DTYPE),
        None,
        field="grad_accum_dtype",
        auto="the gradient's own dtype",
    )
    yield from honoured("bf16.enabled", FLAG, False, field="bf16", auto="off: not asked for")
    yield from off(
        "bf16",
        "not there yet; an update with NaN is applied as it is",
        check_grad_overflow=FLAG_OFF,
    )
    yield from off(
        "bf16",
        "master weights and optimizer state stay in fp32, sharded over the devices",
        bf16_master_weights_and_grads=FLAG_OFF,
        bf16_optimizer_states=FLAG_OFF,
    )
    yield from taken(
        "bf16",
        "left to XLA",
        "the compiler adds gradients up as they are produced",
        immediate_grad_update=FLAG_OFF,
    )
    yield Key(
        path="fp16.enabled",
        kind=FLAG,
        default=False,
        treatment="off only",
        accepts=(False,),
        auto="off: not asked for",
        why='loss scaling is not there yet; use {"bf16": {"enabled": true}}',
    )
    yield from taken(
        "fp16",
        "no effect",
        "fp16 is off",
        auto_cast=FLAG_OFF,
        loss_scale=(AMOUNT, 0.0),
        initial_scale_power=(WHOLE, 16),
        loss_scale_window=(POSITIVE, 1000),
        hysteresis=(POSITIVE, 2),
        consecutive_hysteresis=FLAG_OFF,
        min_loss_scale=(ABOVE_ZERO, 1),
        fp16_master_weights_and_grads=FLAG_OFF,
        fused_mode=(FLAG, True),
    )


def optimizer_and_scheduler() -> Iterator[Key]:
    for section in ("optimizer", "scheduler"):
        yield from honoured(f"{section}.type", TEXT, None)
        yield from honoured(f"{section}.params", OBJECT, {})
    yield from off("optimizer", "it names an Apex optimizer", legacy_fusion=FLAG_OFF)
