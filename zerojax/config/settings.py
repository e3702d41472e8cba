"""Every setting that zerojax honours: its type, its key in the JSON, defaults and meaning.

A key stands here once: the loader, the keywords of `zerojax.zero`, `explain` and the JSON schema
read its field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from zerojax.config import kinds as k
from zerojax.config import sections
from zerojax.config.keywords import XlaOptions
from zerojax.config.named import FrozenParams, OptimizerConfig, SchedulerConfig
from zerojax.config.row import ZERO, Key, keys_of, setting
from zerojax.config.sections import Place, section

FIT = "`zerojax.fit` or `python -m zerojax fit`"
"""The command that searches for values that depend on a forecast, as text."""

_Z = f"{ZERO}."
_REMAT = "activation_checkpointing."
_OWN = "zerojax's own key"


def _flag(path: str, why: str) -> bool:
    """Returns the field of a flag that is off by default, as `setting` does."""
    flag: bool = setting(path, k.FLAG, False, why)
    return flag


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run; with keywords every feature is off by default."""

    stage: int = setting(
        _Z, k.STAGE, 0, "1 shards the optimizer state, 2 gradients too, 3 parameters too", auto=None
    )
    bf16: bool = _flag("bf16.enabled", "true: the step's body sees parameters in bfloat16")
    fp16: bool = _flag(
        "fp16.enabled", "true: the body sees parameters in float16, with a scaled loss"
    )
    auto_cast: bool = _flag(
        "fp16.", "true: float leaves of the batch are cast to the compute dtype"
    )
    loss_scale: float = setting(
        "fp16.", k.SCALE_OR_ZERO, 0.0, "0 is a dynamic scale, all else a static one"
    )
    initial_scale_power: int = setting("fp16.", k.POWER, 16, "the dynamic scale starts at 2**this")
    loss_scale_window: int = setting(
        "fp16.", k.COUNT, 1000, "good updates after which the scale doubles"
    )
    hysteresis: int = setting("fp16.", k.COUNT, 2, "overflows before the scale halves")
    consecutive_hysteresis: bool = _flag("fp16.", "true: a good update refills the hysteresis")
    min_loss_scale: float = setting("fp16.", k.SCALE, 1.0, "the scale halves no further")
    raise_error_at_min_scale: bool = setting(
        "fp16.", k.FLAG, True, f"{_OWN}: true stops at an overflow at the smallest scale"
    )
    check_grad_overflow: bool = setting(
        "bf16.",
        k.FLAG,
        True,
        "true: updates that are not finite are skipped",
        keyword=False,
        loud="DeepSpeed skips updates in bf16 that are not finite by default; false turns it off",
    )
    bf16_optimizer_states: bool = _flag(
        "bf16.", "true: Adam's moments are stored in bfloat16, rounded stochastically"
    )
    check_finite: bool = _flag(
        "", f"{_OWN}: true skips updates that are not finite at any precision"
    )
    accumulate_statistics: bool = _flag(
        "", f"{_OWN}: true allows statistics of each micro-batch (BatchNorm)"
    )
    compute_grad_norm: bool = setting(
        _Z, k.FLAG, True, "false: the gradient's norm is computed only where an update needs it"
    )
    gradient_clipping: float = setting(
        "",
        k.AMOUNT,
        1.0,
        "the largest global L2 norm of the averaged gradient; 0 is off",
        keyword=0.0,
        loud="DeepSpeed clips the global norm to 1.0 by default; 0 turns it off",
    )
    gradient_accumulation_steps: int | None = setting(
        "", k.POSITIVE, None, "micro-batches per update; if open, the batch decides"
    )
    train_batch_size: int | None = setting(
        "", k.POSITIVE, None, "rows per update, over all devices; if open, the batch decides"
    )
    train_micro_batch_size_per_gpu: int | None = setting(
        "", k.POSITIVE, None, "rows of a device in a micro-batch; if open, the batch decides"
    )
    grad_accum_dtype: str | None = setting(
        "data_types.",
        k.optional(k.DTYPE),
        None,
        "dtype of the sum over micro-batches; null: the gradient's",
    )
    stage3_param_persistence_threshold: int = setting(
        _Z, k.SIZE, 100_000, "parameters of fewer elements are replicated"
    )
    # The most elements of a small array. Such an array is not padded and is sent unquantized, a
    # small parameter is gathered with others, once a step, and small arrays beside the parameters
    # are replicated. No key of the JSON sets the field.
    small_array_size: int = 8192
    stage3_max_live_parameters: int = setting(
        _Z,
        k.SIZE,
        0,
        "elements of parameters that stay gathered over an update, the largest first; 0: none",
        auto=f"0: nothing stays gathered; {FIT} writes as many as fit, where they pay",
    )
    stage3_max_reuse_distance: int | None = setting(
        _Z, k.optional(k.SIZE), None, "the most elements used before a gathered one's next use"
    )
    stage3_gather_16bit_weights_on_model_save: bool = _flag(
        _Z, "true: `python -m zerojax export` writes 16-bit weights, at every stage"
    )
    overlap_comm: bool | None = setting(
        _Z, k.optional(k.FLAG), None, "false: no prefetching, XLA's own schedule; null is true"
    )
    mics_shard_size: int = setting(
        _Z, k.GROUP, -1, "devices that share one copy of the state, sharded over them; -1: all"
    )
    pipeline_stages: int | None = setting(
        "pipeline.stages",
        k.optional(k.POSITIVE),
        None,
        'loops over layers run as pipelines over an outermost axis "stage" of this size; null: the '
        "mesh decides",
    )
    zero_hpz_partition_size: int = setting(
        _Z, k.NON_NEGATIVE, 1, "GPUs of a host, within which parameters are gathered again; 1: off"
    )
    zero_quantized_weights: bool = _flag(
        _Z, "true: parameters are gathered in 8-bit blocks (qwZ): numbers change"
    )
    zero_quantized_nontrainable_weights: bool = _flag(
        _Z, "true: parameters without updates are gathered in 8-bit blocks"
    )
    zero_quantized_weights_dtype: str = setting(
        _Z, k.choice("int8", "float8_e4m3fn"), "int8", f"{_OWN}: the codes of gathered blocks"
    )
    zero_quantized_gradients: bool = _flag(
        _Z, "true: gradients are reduced in low-bit blocks (qgZ): numbers change"
    )
    zero_quantized_gradients_dtype: str = setting(
        _Z, k.choice("int8", "int4"), "int8", f"{_OWN}: the codes of reduced blocks"
    )
    fp8: sections.Fp8Config | None = section(
        sections.Fp8Config,
        "fp8",
        f"{_OWN}: true: products of gathered parameters run in fp8: numbers change",
    )
    zero_quantized_block_size: int | None = setting(
        _Z, k.optional(k.POSITIVE), None, f"{_OWN}: elements that share a scale; null: about 256"
    )
    offload_optimizer: sections.OffloadOptimizer | None = section(
        sections.OffloadOptimizer,
        f"{_Z}offload_optimizer",
        "the place of master weights and moments",
    )
    offload_param: sections.OffloadParam | None = section(
        sections.OffloadParam, f"{_Z}offload_param", "the place of parameters"
    )
    sub_group_size: int = setting(
        _Z,
        k.SIZE,
        1_000_000_000,
        "an upper bound, in elements, on what is updated at a time under offload: zerojax "
        "streams in blocks of at most 33,554,432; 0 sets no bound of its own",
    )
    cpu_checkpointing: bool = _flag(
        _REMAT, "true: what rematerialised blocks of a scan keep is in host memory"
    )
    partition_activations: bool = _flag(
        _REMAT, "true: an error where residuals are not sharded with the batch"
    )
    xla: Mapping[str, bool | int | str] = FrozenParams()
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    steps_per_print: int | None = setting(
        "", k.optional(k.NON_NEGATIVE), None, "a line every so many updates; 0 or null prints none"
    )
    wall_clock_breakdown: bool = _flag(
        "", "true: each line has the time of a step, blocked on the device"
    )
    tensorboard: sections.MonitorConfig | None = section(
        sections.MonitorConfig, "tensorboard", "true: writes metrics there"
    )
    csv_monitor: sections.MonitorConfig | None = section(
        sections.MonitorConfig, "csv_monitor", "true: writes metrics there"
    )
    wandb: sections.WandbConfig | None = section(
        sections.WandbConfig, "wandb", "true: writes metrics there"
    )
    dump_state: bool = _flag("", "true: zerojax.zero prints every setting")
    autotuning: sections.AutotuningConfig | None = section(
        sections.AutotuningConfig,
        "autotuning",
        "true: `zerojax fit` searches, zerojax.zero does not train",
    )


BY_FIELD: dict[str, Key] = keys_of(Settings)
"""The key of each field that one key sets."""

SECTIONS: dict[str, Place] = {
    item.name: item.metadata["section"] for item in fields(Settings) if "section" in item.metadata
}
"""The place of each field that a section sets."""

XLA: dict[str, Key] = {
    name: Key(
        f"xla.{name}",
        k.optional(hint.__metadata__[0]),
        None,
        f"{_OWN}: an option of XLA's GPU compiler; null is zerojax's choice",
    )
    for name, hint in XlaOptions.__annotations__.items()
}
"""The key of each option in the field `xla`."""

DESCRIPTIONS = "\n".join(f"      {name}: {key.why}" for name, key in (BY_FIELD | SECTIONS).items())
"""The fields that a key or a section sets, for a docstring."""
