"""Keywords of ``zerojax.zero``, for type checkers and editors."""

from collections.abc import Mapping
from typing import Annotated, TypedDict

from zerojax.config import sections
from zerojax.config.kinds import COUNT, FLAG, SIZE, TEXT
from zerojax.config.named import OptimizerConfig, SchedulerConfig


class XlaOptions(TypedDict, total=False):
    """Options of XLA's GPU compiler for the step, by XLA's names, with the kind of their values:
    the section `xla`. None is zerojax's choice.

    Some versions of XLA lack some of them, or some of their values:
    :func:`zerojax.xla.compiler.options` refuses these by name.
    """

    xla_gpu_enable_latency_hiding_scheduler: Annotated[bool | None, FLAG]
    xla_gpu_all_gather_combine_threshold_bytes: Annotated[int | None, SIZE]
    xla_gpu_reduce_scatter_combine_threshold_bytes: Annotated[int | None, SIZE]
    xla_gpu_all_reduce_combine_threshold_bytes: Annotated[int | None, SIZE]
    xla_gpu_enable_while_loop_unrolling: Annotated[str | None, TEXT]
    xla_gpu_experimental_parallel_collective_overlap_limit: Annotated[int | None, COUNT]
    xla_gpu_experimental_parallel_scale_up_collective_overlap_limit: Annotated[int | None, COUNT]
    xla_gpu_experimental_enable_nccl_symmetric_buffers: Annotated[bool | None, FLAG]
    # Separated by commas; with an empty text XLA may rematerialize.
    xla_disable_hlo_passes: Annotated[str | None, TEXT]
    xla_gpu_all_gather_mode: Annotated[str | None, TEXT]


class Keywords(XlaOptions, total=False):
    """The fields of :class:`zerojax.ZeroConfig`, which documents them, without ``check_finite``
    and ``accumulate_statistics``, separate parameters of ``zerojax.zero``. A section is its config
    object or a mapping as in the JSON; an offload section may be the name of a device. An option of
    ``xla`` may be a keyword of its own."""

    stage: int
    bf16: bool
    fp16: bool
    auto_cast: bool
    loss_scale: float
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_loss_scale: float
    raise_error_at_min_scale: bool
    check_grad_overflow: bool
    bf16_optimizer_states: bool
    compute_grad_norm: bool
    gradient_clipping: float
    gradient_accumulation_steps: int | None
    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    grad_accum_dtype: str | None
    stage3_param_persistence_threshold: int
    small_array_size: int
    stage3_max_live_parameters: int
    stage3_max_reuse_distance: int | None
    stage3_gather_16bit_weights_on_model_save: bool
    overlap_comm: bool | None
    mics_shard_size: int
    pipeline_stages: int | None
    zero_hpz_partition_size: int
    zero_quantized_weights: bool
    zero_quantized_nontrainable_weights: bool
    zero_quantized_weights_dtype: str
    zero_quantized_gradients: bool
    zero_quantized_gradients_dtype: str
    zero_quantized_block_size: int | None
    fp8: sections.Fp8Config | Mapping[str, object] | bool | str | None
    offload_optimizer: sections.OffloadOptimizer | Mapping[str, object] | str | None
    offload_param: sections.OffloadParam | Mapping[str, object] | str | None
    sub_group_size: int
    cpu_checkpointing: bool
    partition_activations: bool
    xla: Mapping[str, bool | int | str | None]
    optimizer: OptimizerConfig | Mapping[str, object] | None
    scheduler: SchedulerConfig | Mapping[str, object] | None
    steps_per_print: int | None
    wall_clock_breakdown: bool
    tensorboard: sections.MonitorConfig | Mapping[str, object] | None
    csv_monitor: sections.MonitorConfig | Mapping[str, object] | None
    wandb: sections.WandbConfig | Mapping[str, object] | None
    dump_state: bool
    autotuning: sections.AutotuningConfig | Mapping[str, object] | None
