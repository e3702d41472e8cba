"""What recurrent models send, asserted on what the benchmark prints; and that all models run."""

import dataclasses
import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from swept import swept

import zerojax
from benchmarks.architecture_models import Sizes, architectures
from benchmarks.architectures import DEVICES, STAGES, WITHIN, missed, sent, table
from benchmarks.compiled import Cost, Program, compile_program, lower_program
from zerojax.hlo.traffic import collectives

TINY = Sizes(
    layers=2,
    width=512,
    vocabulary=2048,
    tokens=32,
    image=64,
    expert_width=512,
    steps=64,
    convolutions=(1, 1),
    rows=1,
    recurrent_rows=2,
    image_rows=1,
)
ALL = architectures(TINY)
LSTM = ALL[-1]
gpu_compile = [
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]


@functools.cache
def cost(stage: int) -> Cost:
    return compile_program(LSTM, stage, DEVICES)


class TestCompiled:
    pytestmark = gpu_compile

    @pytest.mark.parametrize("architecture", ALL, ids=lambda each: each.name)
    def test_every_architecture_lowers(self, architecture: Program) -> None:
        """Plain jit's step is the same but for a cast: one will do."""
        stages: tuple[int | None, ...] = (3, None) if architecture is LSTM else (3,)
        for stage in stages:
            _, parameters = lower_program(architecture, stage, DEVICES)
            assert parameters > 500_000

    @pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.sweep), 3])
    def test_an_lstm_sends_what_theory_asks_for(self, stage: int) -> None:
        found = cost(stage)
        assert sent(found) < WITHIN
        assert found.units["all-gather"] < 1.1 * (stage - 1)
        assert found.units["reduce-scatter"] < 1.1
        assert found.units["all-reduce"] < 0.02
        assert missed([found]) == []

    @pytest.mark.parametrize(("model", "stage"), swept(product(["by hand", "gru"], [3, 2])))
    def test_other_loops_over_time_do_too(self, model: str, stage: int) -> None:
        """Weights of 512 x 512 and more; a unit is their bf16 once. Stage 1 is stage 2's program
        without accumulation."""
        units = {"gru": gru_units, "by hand": scan_units}[model](stage)
        assert units["all-gather"] < 1.1 * (stage - 1)
        assert units["reduce-scatter"] < 1.1
        assert units.get("all-reduce", 0) < 0.02


class GRU(nnx.Module):
    """[B, T, 512] -> the same."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        cell = nnx.GRUCell(512, 512, dtype=jnp.bfloat16, rngs=rngs)
        self.rnn = nnx.RNN(cell, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rnn(x.astype(jnp.bfloat16))


def gru_units(stage: int) -> dict[str, float]:
    mesh = zerojax.topology("h100", DEVICES)
    zero = zerojax.zero(stage=stage, bf16=True, mesh=mesh)

    def create() -> tuple[Any, Any]:
        model = GRU(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @zero
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: (model(batch) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    state = zero.abstract_state(create)
    return units(step.lower(*state, jax.ShapeDtypeStruct((16, 64, 512), jnp.float32)), 512 * 3072)


def scan_units(stage: int) -> dict[str, float]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ params["within"] + x @ params["into"])
            return h, h

        x = x.astype(params["into"].dtype)
        return (jax.lax.scan(cell, jnp.zeros(x.shape[1:], x.dtype), x)[1] ** 2).mean()

    return units(lowered(loss, stage), 2 * 512 * 512)


def lowered(loss: Callable[..., jax.Array], stage: int) -> jax.stages.Lowered:
    mesh = zerojax.topology("h100", DEVICES)
    zero = zerojax.zero(stage=stage, bf16=True, mesh=mesh)

    def create(key: jax.Array) -> TrainState:
        params = {"within": jnp.zeros((512, 512)), "into": jnp.zeros((512, 512))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    @zero
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state.params, batch.swapaxes(0, 1))
        return state.apply_gradients(grads=grads), value

    state = zero.abstract_state(create, jax.random.key(0))
    return step.lower(state, jax.ShapeDtypeStruct((16, 64, 512), jnp.float32))


def units(lowered: jax.stages.Lowered, parameters: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in collectives(lowered.compile().as_text()):
        share = each.times * each.payload_bytes / (2 * parameters)
        found[each.kind] = found.get(each.kind, 0) + share
    return found


def test_the_table_says_what_was_measured_beside_the_theory() -> None:
    three = Cost(
        name="LSTM, 2 layers",
        stage=3,
        devices=DEVICES,
        arrays=50_000_000,
        units={"all-gather": 1.7, "reduce-scatter": 1.0, "collective-permute": 0.25},
        moved_bytes=236_250_000,
        argument_bytes=2_000_000_000,
        temporary_bytes=500_000_000,
        seconds=12.4,
    )
    head, row = table([three])
    assert dict(zip(head, row, strict=True)) == {
        "architecture": "LSTM, 2 layers",
        "": "stage 3",
        "parameters M": "50",
        "gathers": "1.70 (2)",
        "scatters": "1.00 (1)",
        "all-reduces": "0.00",
        "all-to-alls": "0.00",
        "other": "0.25",
        "sent / theory": "0.90",
        "peak MB": "2,500",
        "seconds": "12",
    }
    assert missed([three]) == []
    more = dataclasses.replace(three, moved_bytes=315_000_000)
    assert missed([more]) == ["LSTM, 2 layers, stage 3: sends 1.20 of the theory, limit 1.1"]
    plain = dataclasses.replace(more, stage=None)
    assert table([plain])[1][1:5] == ["plain jit", "50", "1.70", "1.00"]
    assert missed([plain]) == []  # no limit for what is not ours
    assert None in STAGES
