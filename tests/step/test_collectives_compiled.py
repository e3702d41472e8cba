"""The table of collectives against the program that XLA compiles for 8 absent H100s: the same bytes
by kind within 1%, for programs of ``tests/programs`` in which rows do not meet."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from equal import arguments, zero_for
from flax import linen as nn
from flax.training.train_state import TrainState
from programs import PROGRAMS
from step.test_collectives_table import train_step

import zerojax
from zerojax.hlo.traffic import Collective, collectives
from zerojax.step.collectives_table import CollectivesTable

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("require_gpu_compiler")]

DEVICES = 8
NEAR = 0.01
NUMBERS = 16 * 8 * 2
"""Bytes of the numbers that XLA all-reduces for the program itself: losses, metrics, norms."""


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


def check(step: Any, *args: Any) -> None:
    table, found = step.collectives(*args), list[Collective]()
    for program in step.programs(*args):
        found += collectives(program.lowered.compile().as_text())
    wrong = difference(table, [each for each in found if each.group_size > 1])
    assert not wrong, f"{wrong}\n{table}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "tables", "odd"])
def test_the_table_is_what_the_program_sends(name: str) -> None:
    """Each array is gathered on its own, however small."""
    zero = zero_for(3, mesh=zerojax.topology("h100", DEVICES), small_array_size=0)
    state = zero.abstract_state(PROGRAMS[name].create, jax.random.key(5))
    check(zero(PROGRAMS[name].step), state, *arguments(name, "float32", 1)[0])


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "axes", "config"),
    [
        (16, None, {"stage": 3}),
        (16, None, {"stage": 3, "overlap_comm": False}),
        (2, None, {"stage": 3, "stage3_max_live_parameters": 10**9}),
        (2, None, {"stage": 1, "gradient_accumulation_steps": 4}),
        (2, None, {"stage": 3, "gradient_accumulation_steps": 4}),
        (2, None, {"stage": 3, "zero_quantized_weights": True}),
        (2, None, {"stage": 3, "zero_hpz_partition_size": 4}),
        (2, {"replica": 2, "data": 4}, {"stage": 2, "gradient_accumulation_steps": 4}),
        (2, None, {"stage": 3, "offload_optimizer": {"device": "cpu"}}),
        (16, {"stage": 4, "data": 2}, {"stage": 1, "gradient_accumulation_steps": 8}),
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
    state, step = zero.abstract_state(create), zero(train_step)
    batch = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16)
    check(step, state, batch)
