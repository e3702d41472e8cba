"""The table of collectives against the program that XLA compiles for 8 absent H100s: the same bytes
by kind within 1%, for the programs of the conformance corpus."""

import collections
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from equal import arguments
from flax import linen as nn
from flax.training.train_state import TrainState
from programs import PROGRAMS, Kind

import zerojax
from zerojax.hlo.traffic import Collective, collectives
from zerojax.step.collectives_table import CollectivesTable

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("require_gpu_compiler")]

DEVICES = 8
NEAR = 0.01
NUMBERS = 16 * 8 * 2
"""Bytes of the numbers that XLA all-reduces for the program itself: losses, metrics, norms."""

EXPECTED: dict[str, str] = {
    # Batch statistics: XLA sends sums over rows of the program's own.
    "convnet-3-1": "scatter 5,600 for 5,684",
    "convnet-1-1": "gather 5,684 for 5,852; scatter 5,600 for 5,684",
    "nnx_norm-3-1": "scatter 5,824 for 5,936",
    "batch_norm-3-1": "scatter 616 for 644",
    "nnx_batch_norm-3-1": "scatter 616 for 644",
    # XLA exchanges pieces of arrays that the program splits.
    "lstm-3-1": "collective-permute 0 for 88",
    "decorator_halving-3-1": "collective-permute 0 for 384",
    # XLA multiplies shards of a matrix of one column and adds up numbers.
    "policy-3-1": "gather 588 for 532",
    "advantage_normalized-3-1": "gather 588 for 532",
    "advantage_own-3-1": "gather 896 for 812",
    "policy_unrolled-3-1": "gather 1,176 for 1,064",
    "action_values-3-1": "gather 1,288 for 1,204",
    "gan_two_states-2-1": "gather 812 for 784",
    # XLA gathers once, or adds up before it reduces, what the program uses several times.
    "gan_simultaneous-3-1": "gather 2,240 for 2,156",
    "gan_two_states-3-1": "gather 2,240 for 2,156",
    "gan_alternating-3-1": "gather 2,240 for 2,156; scatter 1,036 for 784",
    "gan_weighted-3-1": "gather 3,360 for 3,304; reduce 7 for 1,043",
    # Rows meet: XLA sends activations.
    "contrastive-3-1": "gather 1,008 for 1,904; scatter 504 for 1,400",
    "decorrelated-3-1": "reduce 7 for 903",
    "policy_looped-3-1": "gather 448 for 1,260",
    "loss_chunked-3-1": "gather 728 for 984",
    "results_hard-3-1": "gather 1,232 for 2,128",
    "results_hard-2-1": "gather 504 for 1,400",
    "graphs-3-1": "gather 1,204 for 5,236; scatter 756 for 4,788",
    # Gradients are compared element by element before the update.
    "gradients_chosen-3-1": "reduce 7 for 1,022; scatter 504 for 0",
    # Gradients of gradients, of which XLA reduces some elsewhere.
    "sharpness-3-1": "scatter 952 for 1,008",
    "meta_learning-3-1": "scatter 1,680 for 1,736",
    "penalty_wide-3-1": "reduce 7 for 2,702",
    "reused_curved-3-1": "reduce 7 for 114,709; scatter 64,512 for 35,840",
    "nnx_reused_curved-3-1": "reduce 7 for 114,709; scatter 64,512 for 35,840",
    "reused_penalized-3-1": "all-to-all 0 for 15,232; scatter 96,768 for 64,512",
    "nnx_reused_penalized-3-1": "all-to-all 0 for 15,232; scatter 96,768 for 64,512",
    # Layers are so small that XLA gathers each once for the forward and the backward pass.
    "quantized_base-3-1": "gather 784 for 560",
    "stack_shared-3-1": "gather 13,720 for 9,100",
    "stack_in_a_loop-3-1": "gather 10,864 for 7,280",
    "stack_in_parts-3-1": "gather 10,976 for 7,280",
    "stack_by_index-3-1": "gather 10,976 for 7,280",
    "stack_joined-3-1": "gather 10,976 for 7,280; reduce 7 for 7,406; scatter 3,696 for 0",
}
"""Program, stage and micro-batches of those that differ by more: bytes in the table for those in
the program, by reason."""

SHOWN = ["mlp-3-1", "tables-3-1", "odd-3-1"]
"""Those that are no sweep."""


def sweep(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.sweep)


class _Called(Exception):
    """A step was called."""


def lowering(name: str, stage: int, k: int, **config: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """The decorated step of a program, for absent GPUs, and what it is called with."""
    program = PROGRAMS[name]
    zero = zerojax.zero(
        stage=stage,
        gradient_accumulation_steps=k,
        mesh=zerojax.topology("h100", DEVICES),
        **{"stage3_param_persistence_threshold": 0} | config,
    )
    step = program.step_on(zero) if program.step_on else program.step
    state = zero.abstract_state(program.create, jax.random.key(5))
    given, calls = arguments(name, "float32", 1)[0], []

    def note(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        raise _Called

    if program.call is None:
        calls.append(((*state, *given) if program.nnx else (state, *given), {}))
    else:
        with pytest.raises(_Called):
            program.call(note, state, given)
    return zero(step, **program.jit, **program.zero), *calls[0]


def difference(table: CollectivesTable, compiled: list[Collective]) -> str:
    """Kinds whose bytes differ by more than 1%, and what is on one side alone; empty if none."""
    want = table.bytes_by_kind()
    got = collections.Counter[str]()
    for each in compiled:
        got[each.kind] += each.moved_bytes
    wrong = [
        f"{kind}: {want.get(kind, 0):,} bytes in the table, {got[kind]:,} in the program"
        for kind in sorted({*want, *got})
        if abs(want.get(kind, 0) - got[kind])
        > max(NEAR * got[kind], NUMBERS if kind == "all-reduce" else 0)
    ]
    return "\n".join([*wrong, *_alone(table, compiled)]) if wrong else ""


def _alone(table: CollectivesTable, compiled: list[Collective]) -> Iterator[str]:
    """Arrays that only the table, or only the compiled program sends, matched by kind and size."""
    left = collections.defaultdict(list)
    for row in table.rows:
        left[row.kind, row.bytes].append(row)
    for each in compiled:
        ring = each.moved_bytes / max(each.times * each.payload_bytes, 1)
        for shape in each.shapes:
            rows = left[each.kind, round(shape.bytes * ring)]
            for _ in range(each.times):
                if rows and (rows[0].times == each.times or len(rows) == 1):
                    rows.pop(0)
                    break
            else:
                dims = "x".join(map(str, shape.dims)) or "scalar"
                yield f"  XLA alone: {each.times} x {each.kind} {shape.dtype} {dims} {each.op_name}"
    for rows in left.values():
        for row in rows:
            yield (
                f"  table alone: {row.times} x {row.kind} {row.dtype} {row.shape} {row.array} "
                f"({row.where}, {row.line})"
            )


def check(name: str, stage: int, k: int, **config: Any) -> None:
    step, args, kwargs = lowering(name, stage, k, **config)
    table = step.collectives(*args, **kwargs)
    text = step.lower(*args, **kwargs).compile().as_text()
    found = [each for each in collectives(text) if each.group_size > 1]
    wrong = difference(table, found)
    if known := EXPECTED.get(f"{name}-{stage}-{k}"):
        assert wrong, f"within 1% now: take {name}-{stage}-{k} out of EXPECTED ({known})"
        pytest.xfail(known)
    assert not wrong, f"{name}, stage {stage}, {k} micro-batches\n{wrong}\n{table}"


def cells() -> Iterator[Any]:
    """Every program at stage 3 on the global batch, and some at another stage or with
    micro-batches. Names choose which, so that a program more leaves the others as they are."""
    others = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 4)]
    for name, program in PROGRAMS.items():
        number = zlib.crc32(name.encode())
        for stage, k in [(3, 1)] + [others[number // 8 % 5]] * (number % 8 == 0):
            outcome = program.once if k == 1 else program.accumulated
            if program.axes or outcome.kind is Kind.REFUSED:
                continue
            shown = f"{name}-{stage}-{k}"
            mark = pytest.mark.slow if shown in SHOWN else pytest.mark.sweep
            yield pytest.param(name, stage, k, marks=mark, id=shown)


@pytest.mark.parametrize(("name", "stage", "k"), list(cells()))
def test_the_table_is_what_the_program_sends(name: str, stage: int, k: int) -> None:
    """Each array is gathered on its own, however small."""
    check(name, stage, k, small_array_size=0)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return x + nn.Dense(256)(nn.tanh(nn.Dense(512)(x))), None


class Model(nn.Module):
    """[B, 256] -> [B, 512] through layers, in a loop or written out."""

    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.layers < 16:
            for _ in range(self.layers):
                x, _ = Layer()(x, None)
        else:
            scan = nn.scan(
                Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
            )
            x, _ = scan()(x, None)
        return nn.Dense(512)(x)


def model_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean(state.apply_fn({"params": params}, batch) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "axes", "config"),
    [
        (16, None, {"stage": 3}),
        sweep(16, None, {"stage": 1}),
        (16, None, {"stage": 3, "overlap_comm": False}),
        (2, None, {"stage": 3, "stage3_max_live_parameters": 10**9}),
        sweep(16, None, {"stage": 3, "stage3_max_live_parameters": 10**9}),
        (2, None, {"stage": 1, "gradient_accumulation_steps": 4}),
        sweep(16, None, {"stage": 1, "gradient_accumulation_steps": 4}),
        sweep(16, None, {"stage": 2, "gradient_accumulation_steps": 4}),
        (2, None, {"stage": 3, "gradient_accumulation_steps": 4}),
        (2, None, {"stage": 3, "zero_quantized_weights": True}),
        pytest.param(
            *(2, None, {"stage": 3, "zero_quantized_gradients": True}),
            marks=[
                pytest.mark.sweep,
                pytest.mark.xfail(reason="lists a reduction behind that of the codes, too"),
            ],
        ),
        (2, None, {"stage": 3, "zero_hpz_partition_size": 4}),
        sweep(2, {"replica": 2, "data": 4}, {"stage": 3}),
        (2, {"replica": 2, "data": 4}, {"stage": 2, "gradient_accumulation_steps": 4}),
        (2, None, {"stage": 3, "offload_optimizer": {"device": "cpu"}}),
        (16, {"stage": 4, "data": 2}, {"stage": 1, "gradient_accumulation_steps": 8}),
        sweep(16, {"stage": 2, "data": 4}, {"stage": 0, "gradient_accumulation_steps": 2}),
        sweep(16, {"stage": 2, "data": 4}, {"stage": 3, "gradient_accumulation_steps": 4}),
    ],
)
def test_features(layers: int, axes: Any, config: dict[str, Any]) -> None:
    model = Model(layers)

    def create() -> TrainState:
        params = model.init(jax.random.key(0), jnp.ones((1, 256)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    mesh = zerojax.topology("h100", DEVICES, axes=axes)
    zero = zerojax.zero(mesh=mesh, bf16=True, stage3_param_persistence_threshold=0, **config)
    rows = 4 * DEVICES * config.get("gradient_accumulation_steps", 1)
    state, step = zero.abstract_state(create), zero(model_step)
    batch = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16)
    table, found = step.collectives(state, batch), list[Collective]()
    for program in step.programs(state, batch):
        found += collectives(program.lowered.compile().as_text())
    wrong = difference(table, [each for each in found if each.group_size > 1])
    assert not wrong, f"{wrong}\n{table}"
