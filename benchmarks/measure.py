"""Compiles one training step for absent devices, and writes down what it costs.

    record = compile_case(Case(stage=3))
    record.peak_bytes, record.moved_bytes, record.compile_seconds

The program is a GPT of ``zerojax.models.gpt``, its blocks rematerialised, trained with AdamW in
bf16 or fp16 over fp32 masters. ``memory.py`` prints these records, and the tests assert on them.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import zerojax
from benchmarks.lifetimes import gather_lifetimes, peak_gathered_bytes
from benchmarks.plain import count, plain_jit
from zerojax.devices.topology import GPUS_PER_HOST
from zerojax.hlo.traffic import collectives
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.loss import loss_fn

MASTER_BYTES = 12  # a parameter's fp32 master and two fp32 moments
COMPUTE_BYTES = 2  # bf16 or fp16
LEARNING_RATE = 3e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step to compile.

    Attributes:
      stage: the ZeRO stage, or None for plain ``jax.jit`` with the state sharded only by its
        ``in_shardings`` and ``out_shardings``.
      replicas: groups of ``devices / replicas`` that shard the state; 1 is a plain mesh.
      accumulate: micro-batches a step.
      scan: whether the blocks are stacked and scanned.
      micro_batch: sequences a device sees in one micro-batch.
      device: a name that ``zerojax.topology`` knows.
      precision: "bf16"; "fp16", with a dynamic loss scale; or "bf16 checked", which skips steps
        that overflow.
      partition: GPUs that keep a secondary shard together (hpZ); 1 for none.
      live: ``stage3_max_live_parameters``, elements that stay gathered over an update. The
        ``expected_`` figures are right for 0 and for at least the number of parameters.
    """

    stage: int | None
    devices: int = 8
    replicas: int = 1
    accumulate: int = 1
    scan: bool = False
    n_layer: int = 24
    n_head: int = 25
    n_embd: int = 1600
    vocab_size: int = 50304
    block_size: int = 1024
    micro_batch: int = 4
    device: str = "h100"
    precision: str = "bf16"
    partition: int = 1
    live: int = 0

    @property
    def name(self) -> str:
        words = ["plain jit" if self.stage is None else f"stage {self.stage}"]
        words += [f"gas {self.accumulate}"] if self.accumulate > 1 else []
        words += ["scan"] if self.scan else []
        words += [f"{self.replicas} x {self.group}"] if self.replicas > 1 else []
        words += [self.precision] if self.precision != "bf16" else []
        words += [f"hpZ {self.partition}"] if self.partition > 1 else []
        words += ["stays gathered"] if self.live else []
        return ", ".join(words)

    @property
    def group(self) -> int:
        """Devices over which the state is sharded."""
        return self.devices // self.replicas

    @property
    def model(self) -> GPT:
        return GPT(
            GPTConfig(
                vocab_size=self.vocab_size,
                block_size=self.block_size,
                n_layer=self.n_layer,
                n_head=self.n_head,
                n_embd=self.n_embd,
                scan=self.scan,
                remat=True,
            )
        )

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Tokens of all devices: one more than a sequence, for the shifted targets."""
        sequences = self.devices * self.micro_batch * self.accumulate
        return {"tokens": jax.ShapeDtypeStruct((sequences, self.block_size + 1), jnp.int32)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The costs of a case, for each device. Sizes in bytes, times in seconds.

    Attributes:
      parameters: the model's number of parameters.
      resting_bytes: the step's arguments less the batch, which is what lives between steps.
      expected_resting_bytes: 12P/N over a group of N, or 12P at stage 0.
      argument_bytes, temporary_bytes: arguments and temporaries by XLA's ``memory_analysis``.
      moved_bytes: bytes that a device sends in a step, by kind of collective, counted from the
        compiled text.
      expected_moved_bytes: the same by theory, see :func:`expected_moved`.
      between_bytes: bytes that have to come into each host in a step, by kind of collective.
      expected_between_bytes: their total by theory, see :func:`expected_between`.
      collective_dtypes: payload bytes a step by kind of collective, then by dtype.
      gather_dtypes: payload bytes a step of the all-gathers of parameters, by dtype.
      collective_counts: collectives in the text by kind; one in a loop counts once.
      largest_all_reduce: payload bytes of the largest all-reduce, without those that sum shards
        between groups.
      crossing_bytes: gathered parameters that live from the forward to the backward pass.
      peak_gathered_bytes: the most gathered arrays held at once.
      trace_seconds: seconds of tracing and lowering, in Python.
      compile_seconds: seconds of XLA's compile.
    """

    case: Case
    parameters: int
    resting_bytes: int
    expected_resting_bytes: int
    argument_bytes: int
    temporary_bytes: int
    moved_bytes: dict[str, int]
    expected_moved_bytes: dict[str, int]
    between_bytes: dict[str, int]
    expected_between_bytes: int
    collective_dtypes: dict[str, dict[str, int]]
    gather_dtypes: dict[str, int]
    collective_counts: dict[str, int]
    largest_all_reduce: int
    crossing_bytes: int
    peak_gathered_bytes: int
    trace_seconds: float
    compile_seconds: float

    @property
    def peak_bytes(self) -> int:
        """Arguments and temporaries together: the outputs take the donated arguments' place."""
        return self.argument_bytes + self.temporary_bytes

    @property
    def all_to_all(self) -> int:
        return self.collective_counts.get("all-to-all", 0)

    @property
    def total_moved_bytes(self) -> int:
        return sum(self.moved_bytes.values())

    @property
    def total_expected_moved_bytes(self) -> int:
        return sum(self.expected_moved_bytes.values())


def compile_case(case: Case) -> Record:
    """Compiles a case and measures it.

    Raises:
      ImportError: the GPU compiler's wheels are not installed.
    """
    return measure(case, compile_step(case))


class Compiled(NamedTuple):
    """A compiled step, and the seconds that tracing and compiling it took."""

    executable: Any
    parameters: int
    trace_seconds: float
    compile_seconds: float


def compile_step(case: Case) -> Compiled:
    """Traces, lowers and compiles the step of a case."""
    mesh = zerojax.topology(
        case.device, case.devices, replicas=case.replicas if case.replicas > 1 else None
    )
    began = time.perf_counter()
    lower = lower_plain if case.stage is None else lower_zero
    lowered, parameters = lower(case, mesh)
    traced = time.perf_counter()
    executable = lowered.compile()
    return Compiled(executable, parameters, traced - began, time.perf_counter() - traced)


def measure(case: Case, compiled: Compiled) -> Record:
    """Reads memory, collectives and lifetimes off a compiled step."""
    memory = compiled.executable.memory_analysis()
    text = compiled.executable.as_text()
    moves = collectives(text)
    gathered = [each for each in gather_lifetimes(text) if each.of_parameter]
    times = {(each.computation, each.name): each.times for each in moves}
    batch_bytes = math.prod(case.batch["tokens"].shape) * 4 // case.devices
    shards = 1 if case.stage == 0 else case.group
    return Record(
        case=case,
        parameters=compiled.parameters,
        resting_bytes=memory.argument_size_in_bytes - batch_bytes,
        expected_resting_bytes=MASTER_BYTES * compiled.parameters // shards,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        moved_bytes=_sum_by((each.kind, each.moved_bytes) for each in moves),
        expected_moved_bytes=expected_moved(case, compiled.parameters),
        between_bytes=between_hosts(text),
        expected_between_bytes=expected_between(case, compiled.parameters),
        collective_dtypes={
            kind: _sum_by(
                (dtype, each.times * size)
                for each in moves
                if each.kind == kind
                for dtype, size in each.bytes_by_dtype.items()
            )
            for kind in dict.fromkeys(each.kind for each in moves)
        },
        gather_dtypes=_sum_by(
            (each.shape.dtype, each.bytes * times[each.computation, each.name]) for each in gathered
        ),
        collective_counts=_sum_by((each.kind, 1) for each in moves),
        largest_all_reduce=max(
            (
                each.payload_bytes
                for each in moves
                if each.kind == "all-reduce" and each.group_size > case.replicas
            ),
            default=0,
        ),
        crossing_bytes=sum(each.bytes for each in gathered if each.crosses),
        peak_gathered_bytes=peak_gathered_bytes(text),
        trace_seconds=compiled.trace_seconds,
        compile_seconds=compiled.compile_seconds,
    )


def expected_moved(case: Case, parameters: int) -> dict[str, int]:
    """Bytes each of n devices should send in a step, in a ring, for P parameters of 2 bytes.

    One pass over all parameters is ``(n-1)/n * 2P``. With g micro-batches a step takes:

    - stage 0: one all-reduce, 2 passes
    - stage 1: one all-gather and one reduce-scatter
    - stage 2: one all-gather and g reduce-scatters
    - stage 3 (and plain jit, sharded in the same way): 2g all-gathers and g reduce-scatters; one
      all-gather where parameters stay gathered

    With r groups of d devices, n is d for gathers and scatters, and one all-reduce sums the shards
    between groups: ``2 * (r-1)/r * 2P/d``. With a secondary shard over p GPUs (hpZ), each gather
    but one takes ``(p-1)/p * 2P``.
    """
    size, d, r = COMPUTE_BYTES * parameters, case.group, case.replicas
    replicated = round(2 * (case.devices - 1) / case.devices * size)
    once = round((d - 1) / d * size)
    g = case.accumulate
    if case.stage == 0:
        return {"all-reduce": replicated}
    shards = {"all-reduce": round(2 * (r - 1) / r * size / d)} if r > 1 else {}
    scatters = 1 if case.stage == 1 else g
    gathered = once if case.stage in (1, 2) or case.live else 2 * g * once
    if case.partition > 1 and not case.live:
        p = case.partition
        gathered = round(size * (2 * g * (p - 1) / p + 1 / p - 1 / d))
    return {"all-gather": gathered, "reduce-scatter": scatters * once, **shards}


def expected_between(case: Case, parameters: int) -> int:
    """Bytes that have to come into each host in a step, for P parameters of 2 bytes.

    One pass over all parameters by a group on h hosts, a gather or a scatter, is ``(h-1)/h * 2P``.
    A step takes the passes of ``expected_moved``; with a secondary shard in each host 1 gather,
    however many the micro-batches. The shards that r groups of d devices sum between them add
    ``2 * (r-1)/r * 2P * 8/d``: a host has 8 of its group's d.
    """
    size, g = COMPUTE_BYTES * parameters, case.accumulate
    hosts, mine = (math.ceil(n / GPUS_PER_HOST) for n in (case.devices, case.group))
    once = (mine - 1) / mine
    if case.stage == 0:
        return round(2 * (hosts - 1) / hosts * size)
    gathers = 1 if case.stage in (1, 2) or case.partition > 1 or case.live else 2 * g
    between = min(case.replicas, hosts)  # hosts over which a shard is summed
    held = min(GPUS_PER_HOST, case.group) / case.group  # of all shards, in a host
    scatters = 1 if case.stage == 1 else g
    return round(((gathers + scatters) * once + 2 * (between - 1) / between * held) * size)


def between_hosts(text: str) -> dict[str, int]:
    """Bytes that have to come into each host in a step, by kind of collective.

    Of a payload, gathered or to be reduced, by a group of n devices over h hosts, a host has 1/h
    itself; each of its other groups is another payload.
    """
    total: dict[str, int] = {}
    for each in collectives(text):
        n = max(len({device // GPUS_PER_HOST for device in group}) for group in each.groups)
        if n > 1:
            mine = sum(any(device < GPUS_PER_HOST for device in group) for group in each.groups)
            passes = 2 if each.kind == "all-reduce" else 1
            size = each.times * each.payload_bytes * passes * mine * (n - 1) // n
            total[each.kind] = total.get(each.kind, 0) + size
    return total


def train_step_of(
    model: GPT, cast: Callable[[Any], Any] = lambda params: params, fused_loss: bool = False
) -> Callable[[TrainState, Any], tuple[TrainState, Any]]:
    """The single-device step that all cases share; ``cast`` is applied to the parameters, and a
    fused loss is the model's own."""

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        def loss(params: Any) -> jax.Array:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
            apply: Any = functools.partial(model.apply, {"params": cast(params)}, inputs)
            return apply(targets=targets).mean() if fused_loss else loss_fn(apply(), targets)

        value, grads = zerojax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return train_step


def create_state_of(
    model: GPT, optimizer: optax.GradientTransformation | None = None
) -> Callable[[jax.Array], TrainState]:
    """``create_state(key)`` for a GPT under AdamW, or under another optimizer."""

    def create_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        tx = optimizer or optax.adamw(LEARNING_RATE)
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return create_state


def lower_zero(case: Case, mesh: Mesh) -> tuple[jax.stages.Lowered, int]:
    """Lowers the decorated step; returns it and the number of parameters."""
    checked = case.precision == "bf16 checked"
    precision = {"bf16": {"enabled": True, "check_grad_overflow": checked}}
    zero = zerojax.zero(
        {
            "train_micro_batch_size_per_gpu": case.micro_batch,
            "gradient_accumulation_steps": case.accumulate,
            "gradient_clipping": 0.0,
            **({"fp16": {"enabled": True}} if case.precision == "fp16" else precision),
            "zero_optimization": {
                "stage": case.stage,
                "zero_hpz_partition_size": case.partition,
                "stage3_max_live_parameters": case.live,
            },
        },
        mesh=mesh,
    )
    state = zero.abstract_state(create_state_of(case.model), jax.random.key(0))
    lowered = zero(train_step_of(case.model)).lower(state, case.batch)
    return lowered, count(state.params)


def lower_plain(case: Case, mesh: Mesh) -> tuple[jax.stages.Lowered, int]:
    """Lowers the step under plain ``jax.jit`` with sharded state, and leaves the rest to XLA."""
    state = jax.eval_shape(create_state_of(case.model), jax.random.key(0))
    step = train_step_of(
        case.model, lambda params: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    )
    return plain_jit(step, mesh, state).lower(state, case.batch), count(state.params)


def _sum_by(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for key, size in sizes:
        total[key] = total.get(key, 0) + size
    return total
