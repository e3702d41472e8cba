"""Keys of the batch, the precision, clipping, and the named optimizer and schedule."""

from typing import Any

from zerojax.config.errors import shown
from zerojax.config.keys.row import (
    AMOUNT,
    ANYTHING,
    COUNT,
    DTYPE,
    FLAG,
    FLAG_OFF,
    OBJECT,
    OFF,
    POSITIVE,
    POWER,
    SCALE,
    SCALE_OR_ZERO,
    TEXT,
    Key,
    ValueKind,
    choice,
    honoured,
    left_to_xla,
    no_effect,
    off_only,
    off_section,
    optional,
    setting,
)

_MASTERS = "master weights and optimizer state stay in fp32, sharded over the devices"

_SIZES = (
    ("train_batch_size", "rows per update, over all devices"),
    ("train_micro_batch_size_per_gpu", "rows of one device in one micro-batch"),
    ("gradient_accumulation_steps", "micro-batches per update"),
)

_SCALING: tuple[tuple[str, ValueKind, Any, str], ...] = (
    ("auto_cast", *FLAG_OFF, "true: float leaves of the batch are cast to the compute dtype"),
    ("loss_scale", SCALE_OR_ZERO, 0.0, "0 is a dynamic scale, all else a static one"),
    ("initial_scale_power", POWER, 16, "the dynamic scale starts at 2**this"),
    ("loss_scale_window", COUNT, 1000, "good updates after which the scale doubles"),
    ("hysteresis", COUNT, 2, "overflows before the scale halves"),
    ("consecutive_hysteresis", *FLAG_OFF, "true: a good update refills the hysteresis"),
    ("min_loss_scale", SCALE, 1.0, "the scale halves no further"),
)

TRAINING: tuple[Key, ...] = (
    *(
        setting(name, POSITIVE, None, why, auto="taken from the batch that comes")
        for name, why in _SIZES
    ),
    setting(
        "gradient_clipping",
        AMOUNT,
        1.0,
        "the largest global norm of the averaged gradient; 0 is off",
        auto="DeepSpeed's default, a global norm of 1.0",
        loud="DeepSpeed clips the global norm to 1.0 unless told otherwise; 0 turns it off",
    ),
    setting(
        "check_finite",
        FLAG,
        False,
        "zerojax's own key: true skips updates that are not finite at any precision, as fp16 "
        "does and bf16 with check_grad_overflow; DeepSpeed makes such updates in fp32",
        auto=OFF,
    ),
    setting(
        "data_types.grad_accum_dtype",
        optional(DTYPE),
        None,
        "dtype of the sum over micro-batches; null is the gradient's own",
        auto="the gradient's own dtype",
    ),
    *off_only(
        "data_types",
        "fp16 and bf16 choose the compute dtype, the model its buffers'",
        param_dtype=(optional(TEXT), None),
        buffer_dtype=(optional(TEXT), None),
    ),
    setting(
        "bf16.enabled",
        FLAG,
        False,
        "true: the step's body sees parameters in bfloat16",
        auto='off, unless the program asks for it: auto={"bf16.enabled": True}',
    ),
    setting(
        "bf16.check_grad_overflow",
        FLAG,
        True,
        "true: updates that are not finite are skipped",
        auto="DeepSpeed's default, true",
        loud="DeepSpeed skips updates in bf16 that are not finite unless told otherwise; "
        "false turns it off",
    ),
    *off_only(
        "bf16", _MASTERS, bf16_master_weights_and_grads=FLAG_OFF, bf16_optimizer_states=FLAG_OFF
    ),
    *left_to_xla(
        "bf16",
        "the compiler adds gradients up as they are produced",
        immediate_grad_update=FLAG_OFF,
    ),
    setting(
        "fp16.enabled",
        FLAG,
        False,
        "true: the step's body sees parameters in float16, and the loss is scaled",
        auto='off, unless the program asks for it: auto={"fp16.enabled": True}',
    ),
    *(
        setting(f"fp16.{name}", kind, default, why, auto=f"DeepSpeed's default, {shown(default)}")
        for name, kind, default, why in _SCALING
    ),
    setting(
        "fp16.raise_error_at_min_scale",
        FLAG,
        True,
        "zerojax's own key: true stops at an overflow at the smallest scale, false skips on",
        auto="as DeepSpeed does: true",
    ),
    *off_only("fp16", _MASTERS, fp16_master_weights_and_grads=FLAG_OFF),
    *no_effect("fp16", "it chooses between implementations", fused_mode=(FLAG, True)),
    *off_section(
        "torch_autocast",
        "use bf16 or fp16; what is to stay in fp32 the model says",
        dtype=(choice("bfloat16", "float16"), "bfloat16"),
        lower_precision_safe_modules=(ANYTHING, None),
    ),
    honoured("optimizer.type", TEXT, None, "for zero.optimizer()"),
    honoured("optimizer.params", OBJECT, {}),
    honoured("scheduler.type", TEXT, None, "for zero.optimizer()"),
    honoured("scheduler.params", OBJECT, {}),
    *off_only("optimizer", "it names an Apex optimizer", legacy_fusion=FLAG_OFF),
)
