"""The frozen configuration that all of zerojax works with once the JSON is read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from zerojax.config.autotuning import AutotuningConfig
from zerojax.config.batch import BatchSizes, solve
from zerojax.config.errors import ConfigError, as_text, closest, hint, quote_name
from zerojax.config.keys import BY_FIELD, KEYS
from zerojax.config.keys.row import ZERO
from zerojax.config.keys.xla import XLA
from zerojax.config.named import NAMED, OptimizerConfig, SchedulerConfig
from zerojax.config.notes import Note
from zerojax.config.sections import (
    OFFLOAD,
    SWITCHED,
    MonitorConfig,
    OffloadOptimizer,
    OffloadParam,
    WandbConfig,
    from_keyword,
)
from zerojax.config.together import contradictions, idle


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """The settings of a run; every feature is off by default.

    Equality and hash ignore `notes`.

    Attributes:
      stage: 0 (replicated), 1 (optimizer state sharded), 2 (gradients too), 3 (parameters too).
      bf16: Whether the step's body sees parameters in bfloat16; master weights keep their dtype.
      fp16: Whether the body sees parameters in float16, with a loss scale; excludes `bf16`.
      auto_cast: Whether float leaves of the batch are cast to the compute dtype too.
      loss_scale: The static loss scale; 0 for a dynamic one.
      initial_scale_power: The exponent of the first dynamic scale, from 0 to 126.
      loss_scale_window: The number of good updates after which the scale doubles.
      hysteresis: The number of overflows after which the scale halves.
      consecutive_hysteresis: Whether a good update refills the hysteresis.
      min_loss_scale: The smallest dynamic scale.
      raise_error_at_min_scale: Whether an overflow at the smallest scale raises; False skips the
        update.
      check_grad_overflow: Whether updates in `bf16` whose gradient is not finite are skipped, as in
        fp16; True by default in a JSON.
      check_finite: Whether updates whose gradient is not finite are skipped at every precision.
      accumulate_statistics: Whether under accumulation each micro-batch may compute statistics of
        its own rows that the state keeps, such as BatchNorm's; if not, such a step is refused.
      compute_grad_norm: Whether the gradient's norm is computed in each update, for telemetry and
        for the warning about numbers that are not finite; False computes it only where clipping or
        the skipping of updates needs it.
      gradient_clipping: The largest global L2 norm of the averaged gradient; 0 turns clipping off.
      gradient_accumulation_steps: Micro-batches per update.
      train_batch_size: Rows per update, over all devices.
      train_micro_batch_size_per_gpu: Rows of one device in one micro-batch.
      grad_accum_dtype: The dtype of the sum over micro-batches; None for the gradient's own.
      stage3_param_persistence_threshold: The number of elements below which a parameter is not
        sharded.
      small_array_size: The most elements of a small array. Such an array is not padded and is sent
        unquantized, a small parameter is gathered with others, once a step, and small arrays beside
        the parameters are replicated. No key of the JSON sets the field.
      stage3_max_live_parameters: The most elements of parameters that stay gathered over an update
        at stage 3; 0 for none.
      stage3_max_reuse_distance: The most elements of other parameters that the step may use before
        the next use of a parameter that stays gathered; None for no limit.
      stage3_gather_16bit_weights_on_model_save: Whether `python -m zerojax export` writes 16-bit
        weights of this run's checkpoints by default, at every stage.
      overlap_comm: False leaves the schedule of collectives to XLA and disables prefetching.
      mics_shard_size: Devices of a shard group. The state is sharded within a group, and each group
        has a copy; -1 (or 0) for one group of all devices.
      pipeline_stages: Devices along the mesh's axis "stage", over which loops over layers run as
        pipelines; None if the mesh decides.
      zero_hpz_partition_size: The number of devices, usually those of a host, that together keep a
        secondary shard of the parameters during a step at stage 3; 1 for none.
      zero_quantized_weights: Whether parameters are gathered in low-bit blocks (qwZ).
      zero_quantized_nontrainable_weights: Whether parameters that the optimizer does not update
        are gathered in low-bit blocks.
      zero_quantized_weights_dtype: The dtype of gathered blocks, "int8" or "float8_e4m3fn".
      zero_quantized_gradients: Whether gradients are reduced in low-bit blocks (qgZ).
      zero_quantized_gradients_dtype: The dtype of reduced blocks, "int8" or "int4".
      zero_quantized_block_size: Elements of a block; None for a size near 256 that suits each
        array.
      offload_optimizer: The place of master weights and moments, from stage 1 on; None for the
        accelerator.
      offload_param: The place of parameters, at stage 3; None for the accelerator.
      sub_group_size: The most elements in one update under offload.
      cpu_checkpointing: Whether residuals of rematerialised blocks in a scan are kept in host
        memory.
      partition_activations: Whether residuals must be sharded over all devices. They are sharded
        with the batch, so that the only effect is an error on a mesh with further axes.
      xla_gpu_enable_latency_hiding_scheduler, ... (all fields with this prefix): Options of XLA's
        GPU compiler for the step, by XLA's names; None for zerojax's choice.
      optimizer, scheduler: The optimizer and the schedule of `zero.optimizer()`.
      steps_per_print: Updates from one printed line to the next; None (or 0) for no lines.
      wall_clock_breakdown: Whether the lines have the time of a step on the device.
      tensorboard, csv_monitor, wandb: The destinations of metrics; None for none.
      dump_state: Whether `zerojax.zero` prints every effective setting.
      autotuning: The bounds of `zerojax fit`, with which `zerojax.zero` refuses to train; None for
        none.
      notes: One note for each key of the JSON, each default that changes numbers, and each keyword
        without effect.

    Raises:
      ConfigError: A wrong value or a contradiction, with the remedy.

    Example:
      >>> ZeroConfig(stage=3, gradient_accumulation_steps=4).batch(world=8)
      BatchSizes(train=None, micro=None, accumulation=4)
    """

    stage: int = 0
    bf16: bool = False
    fp16: bool = False
    auto_cast: bool = False
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0
    raise_error_at_min_scale: bool = True
    check_grad_overflow: bool = False
    check_finite: bool = False
    accumulate_statistics: bool = False
    compute_grad_norm: bool = True
    gradient_clipping: float = 0.0
    gradient_accumulation_steps: int | None = None
    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    grad_accum_dtype: str | None = None
    stage3_param_persistence_threshold: int = 100_000
    small_array_size: int = 8192
    stage3_max_live_parameters: int = 0
    stage3_max_reuse_distance: int | None = None
    stage3_gather_16bit_weights_on_model_save: bool = False
    overlap_comm: bool | None = None
    mics_shard_size: int = -1
    pipeline_stages: int | None = None
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_weights_dtype: str = "int8"
    zero_quantized_gradients: bool = False
    zero_quantized_gradients_dtype: str = "int8"
    zero_quantized_block_size: int | None = None
    offload_optimizer: OffloadOptimizer | None = None
    offload_param: OffloadParam | None = None
    sub_group_size: int = 1_000_000_000
    cpu_checkpointing: bool = False
    partition_activations: bool = False
    xla_gpu_enable_latency_hiding_scheduler: bool | None = None
    xla_gpu_all_gather_combine_threshold_bytes: int | None = None
    xla_gpu_reduce_scatter_combine_threshold_bytes: int | None = None
    xla_gpu_all_reduce_combine_threshold_bytes: int | None = None
    xla_gpu_enable_while_loop_unrolling: str | None = None
    xla_gpu_experimental_parallel_collective_overlap_limit: int | None = None
    xla_gpu_experimental_parallel_scale_up_collective_overlap_limit: int | None = None
    xla_gpu_experimental_enable_nccl_symmetric_buffers: bool | None = None
    xla_disable_hlo_passes: str | None = None
    xla_gpu_all_gather_mode: str | None = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    steps_per_print: int | None = None
    wall_clock_breakdown: bool = False
    tensorboard: MonitorConfig | None = None
    csv_monitor: MonitorConfig | None = None
    wandb: WandbConfig | None = None
    dump_state: bool = False
    autotuning: AutotuningConfig | None = None
    notes: tuple[Note, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        problems = []
        checked: dict[str, object] = {}
        for name, key in BY_FIELD.items():
            value = getattr(self, name)
            if value is None and key.default is None:
                continue
            try:
                checked[name] = key.kind.check(value)
            except ConfigError as error:
                problems.append(f"{name}: {error}")
            else:
                object.__setattr__(self, name, checked[name])
        for name, cls in _CLASSES.items():
            value = getattr(self, name)
            if value is None or isinstance(value, cls):
                checked[name] = value
            else:
                problems.append(f"{name}: expected {cls.__name__} or None, got {as_text(value)}")
        problems += contradictions(checked)
        if problems:
            raise ConfigError(problems)
        object.__setattr__(self, "steps_per_print", self.steps_per_print or None)
        largest = BY_FIELD["sub_group_size"].default
        object.__setattr__(self, "sub_group_size", self.sub_group_size or largest)
        own_notes, idle_notes = self._own_notes(), _idle_notes(checked, self.notes)
        object.__setattr__(self, "notes", (*own_notes, *idle_notes))

    def _own_notes(self) -> Iterator[Note]:
        """Yields the notes of the config's file; notes on keywords are computed anew."""
        keyword_names = {*BY_FIELD, *OFFLOAD}
        return (
            n for n in self.notes if n.key in KEYS or n.key.partition(".")[0] not in keyword_names
        )

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Self:
        """Builds a config from keywords; a section is a config object or a mapping as in the JSON.

        An offload section may be the name of a device: `offload_optimizer="cpu"`.

        Raises:
          ConfigError: An unknown keyword, with the closest known keyword, or a wrong value.

        Example:
          >>> ZeroConfig.from_keywords(stag=3)
          Traceback (most recent call last):
          zerojax.config.errors.ConfigError: stag: unknown keyword; did you mean `stage`?
        """
        known = [f.name for f in fields(cls) if f.name != "notes"]
        problems = [_unknown_keyword(name, known) for name in keywords if name not in known]
        for name in _CLASSES:
            if keywords.get(name) is None:
                continue
            try:
                given, named = keywords.pop(name), NAMED.get(name)
                keywords[name] = named.of(given) if named else from_keyword(name, given)
            except ConfigError as error:
                problems.extend(error.problems)
        try:
            config = cls(**{k: v for k, v in keywords.items() if k in known})
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        if problems:
            raise ConfigError(problems)
        return config

    @property
    def compute_dtype(self) -> str | None:
        """The compute dtype of the step's body, "fp16" or "bf16"; None for the parameters' own."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else None

    @property
    def skips_overflow(self) -> bool:
        """True if updates whose gradient is not finite are skipped."""
        return self.fp16 or self.check_finite or (self.bf16 and self.check_grad_overflow)

    @property
    def xla_options(self) -> dict[str, bool | int | str]:
        """The options of XLA that are not None, by XLA's names."""
        given = {key.field: getattr(self, key.field) for key in XLA if key.field}
        return {name: value for name, value in given.items() if value is not None}

    def batch(self, world: int, stages: int = 1) -> BatchSizes:
        """Returns the batch sizes on `world` data-parallel devices.

        Args:
          world: The data-parallel devices of each pipeline stage.
          stages: Pipeline stages, for the check that the sizes suit them.
        """
        return solve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world,
            stages,
        )

    def words(self, field: str) -> str:
        """Returns "key = value" for a field that one key sets, as in the file that set the field.

        Example:
          >>> ZeroConfig(mics_shard_size=2).words("mics_shard_size")
          'zero_optimization.mics_shard_size = 2'
        """
        path, value = BY_FIELD[field].path, getattr(self, field)
        for note in self.notes:
            if path in note.sets:
                why = "" if note.holds == value else f" ({note.reason})"
                return f"{note.key} = {note.value}{why}"
        return f"{path} = {as_text(value)}"

    def check_partition(self, world: int) -> None:
        """Checks that `zero_hpz_partition_size` divides `world`, the devices that shard the state.

        Raises:
          ConfigError: The partition size does not divide the number of devices.
        """
        size = self.zero_hpz_partition_size
        if size > 1 and world % size:
            divisors = [k for k in range(1, world + 1) if world % k == 0]
            raise ConfigError(
                f"{ZERO}.zero_hpz_partition_size = {size} does not divide the {world} devices over "
                f"which the state is sharded; set it to one of {', '.join(map(str, divisors))}: "
                "the GPUs of a host, as a rule; 1 is off"
            )


_CLASSES: dict[str, type] = {**NAMED, **SWITCHED, **OFFLOAD}


def quiet(config: ZeroConfig) -> ZeroConfig:
    """Returns the config without its one-time reports, for steps only compiled or timed."""
    return replace(config, dump_state=False, autotuning=None)


def _idle_notes(values: Mapping[str, Any], notes: tuple[Note, ...]) -> Iterator[Note]:
    """Yields a note for each keyword without effect; keys of a JSON already have notes."""
    noted = {path for note in notes for path in (note.key, *note.sets)}
    for name, reason in idle(values).items():
        key = BY_FIELD[name]
        if values.get(name) != getattr(ZeroConfig, name) and key.path not in noted:
            yield Note(name, values[name], "no effect", reason)
    for section in OFFLOAD:
        given = values.get(section)
        for name, reason in given.idle().items() if given else ():
            value, path = getattr(given, name), f"{ZERO}.{section}.{name}"
            if value != KEYS[path].default and path not in noted:
                yield Note(f"{section}.{name}", value, "no effect", reason)


def _unknown_keyword(name: str, known: list[str]) -> str:
    sections = {path.split(".")[0] for path in KEYS}
    for key in map(KEYS.get, (f"{name}.enabled", f"{ZERO}.{name}")):
        if key is not None and key.treatment == "off only":
            return f"{name}: not supported: {key.why}"
    if name in sections:
        return f"{name}: a key of the JSON, not a keyword; pass the complete config as a dict"
    others = f"some are {', '.join(known[:5])}; help(zerojax.ZeroConfig) has all"
    return f"{quote_name(name)}: unknown keyword; {hint(closest(name, known), others)}"
