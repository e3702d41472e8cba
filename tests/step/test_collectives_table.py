"""The collectives that zerojax decides on, read off the trace: nothing compiles here."""

import functools
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import zerojax
from zerojax.step.collectives_table import CollectivesTable

WIDE, LAYERS, ROWS = 128, 16, 32
HERE = Path(__file__).name


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return nn.tanh(nn.Dense(WIDE, use_bias=False)(x)), None  # layer


class Model(nn.Module):
    """[B, 128] -> [B, 256], perhaps through a loop over layers before."""

    layers: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.layers:
            scan = nn.scan(
                Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
            )
            x, _ = scan(name="layers")(x, None)  # scan
        return nn.Dense(2 * WIDE, name="head")(x)  # head


def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean(state.apply_fn({"params": params}, batch) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss  # update


def create(layers: int = 0) -> TrainState:
    model = Model(layers)
    params = model.init(jax.random.key(0), jnp.ones((1, WIDE)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


def table(layers: int = 0, **config: Any) -> CollectivesTable:
    zero = zerojax.zero(**{"stage3_param_persistence_threshold": 0} | config)
    state = zero.abstract_state(functools.partial(create, layers))
    return zero(train_step).collectives(state, jax.ShapeDtypeStruct((ROWS, WIDE), jnp.float32))


def line_of(text: str) -> str:
    source, first = inspect.getsourcelines(inspect.getmodule(line_of))  # type: ignore[arg-type]
    (found,) = [i for i, each in enumerate(source) if each.rstrip().endswith(f"# {text}")]
    return f"{HERE}:{max(first, 1) + found}"


def brief(rows: Any, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(row, name) for name in names) for row in rows]


KERNEL, HEAD = "params['layers']['Dense_0']['kernel']", "params['head']['kernel']"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(stage: int) -> None:
    found = table(stage=stage).rows
    kernel = [row for row in found if row.shape in ((WIDE, 2 * WIDE), (2 * WIDE, WIDE))]
    sent = 4 * WIDE * 2 * WIDE * 7 // 8
    gathers, scatters = [("all-gather", sent)], [("reduce-scatter", sent)]
    want = [("all-reduce", 2 * sent)] if stage == 0 else [*gathers, *scatters]
    assert brief(kernel, "kind", "bytes") == want
    if stage:
        assert kernel[0].where == ("use" if stage == 3 else "entry")
    assert {row.array for row in kernel} == {HEAD}
    assert {row.times for row in found} == {1}


def test_lines_are_the_users() -> None:
    rows = table(stage=3, bf16=True).rows
    assert {row.line for row in rows if row.array == HEAD} == {line_of("head")}
    assert {row.dtype for row in rows if row.kind == "all-gather"} == {"bfloat16"}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_loop_over_layers(overlap: bool) -> None:
    rows = [row for row in table(LAYERS, stage=3, overlap_comm=overlap).rows if row.array == KERNEL]
    assert {row.line for row in rows} == {line_of("layer")}
    # The first and the last iteration run outside the loop.
    gathered = [
        ("before the loop", 1, "all-gather"),
        ("loop, prefetched", 1, "all-gather"),
        ("loop, prefetched", LAYERS - 2, "all-gather"),
    ]
    reduced = [
        ("loop, deferred", LAYERS - 2, "reduce-scatter"),
        ("loop, deferred", 1, "reduce-scatter"),
        ("after the loop", 1, "reduce-scatter"),
    ]
    want = [*gathered, *gathered, *reduced]
    if not overlap:
        want = [("loop", LAYERS, kind) for kind in ("all-gather", "all-gather", "reduce-scatter")]
    assert sorted(brief(rows, "where", "times", "kind")) == sorted(want)


@pytest.mark.parametrize(
    ("stage", "times", "where"), [(1, 1, "after the loop"), (2, 4, "produced")]
)
def test_micro_batches(stage: int, times: int, where: str) -> None:
    found = table(stage=stage, gradient_accumulation_steps=4)
    rows = [row for row in found.rows if row.array == HEAD]
    assert brief(rows, "kind", "times", "where") == [
        ("all-gather", 1, "entry"),
        ("reduce-scatter", times, where),
    ]


def test_at_stage_3_each_micro_batch_gathers() -> None:
    rows = [row for row in table(stage=3, gradient_accumulation_steps=4).rows if row.array == HEAD]
    assert {row.times for row in rows} == {4}


def test_pipeline_stages() -> None:
    """Stages reduce the gradients of their own layers, and send rows to their neighbours."""
    mesh = zerojax.mesh(axes={"stage": 2, "data": 4})
    rows = table(4, stage=1, gradient_accumulation_steps=4, mesh=mesh).rows
    reduced = [row for row in rows if row.where == "produced"]
    layers, whole = 4 * 2 * WIDE * WIDE, 4 * 2 * WIDE * WIDE  # bytes of a stage, of the head
    assert [(row.kind, row.bytes) for row in reduced if row.array == KERNEL] == [
        ("reduce-scatter", layers * 3 // 4)
    ]
    assert [(row.kind, row.bytes) for row in reduced if row.array == HEAD] == [
        ("reduce-scatter", whole * 3 // 4),
        ("all-reduce", whole // 4),
    ]
    sent = [row for row in rows if row.kind == "collective-permute"]
    assert {(row.where, row.line) for row in sent} == {("between stages", line_of("scan"))}
    assert {(row.shape, row.bytes, row.times) for row in sent} == {((2, WIDE), 4 * 2 * WIDE, 5)}
    assert len(sent) == 4  # inputs and outputs, forward and backward


@pytest.mark.parametrize(("stage", "k"), [(2, 1), (3, 2)])
def test_small_arrays_are_gathered_once_together(stage: int, k: int) -> None:
    rows = table(stage=stage, gradient_accumulation_steps=k).rows
    (bias,) = [row for row in rows if row.where == "entry" and "bias" in row.array]
    assert (bias.kind, bias.times) == ("all-gather", 1)
    assert bias.reason == "small arrays are gathered together"


def test_concrete_arguments_and_the_step_runs_afterwards() -> None:
    zero = zerojax.zero(stage=3)
    step, state, batch = zero(train_step), zero.init(create), np.ones((ROWS, WIDE), np.float32)
    before = step.collectives(state, batch)
    _, loss = step(state, batch)
    assert np.isfinite(loss)
    state = zero.abstract_state(create)
    assert step.collectives(state, batch) == before  # the cache of traces knows the step by now
    assert step.collectives(state, batch) == before


def test_the_norm_of_shards_is_one_number() -> None:
    (norm,) = [row for row in table(stage=1).rows if row.kind == "all-reduce"]
    assert (norm.where, norm.shape, norm.bytes, norm.line) == ("update", (), 7, line_of("update"))
    assert all(row.where != "update" for row in table(stage=0).rows)
