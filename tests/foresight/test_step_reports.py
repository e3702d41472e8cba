"""What a config asks to be told of a step once, on one compiled step for all tables."""

import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.config.profiling import CommsLoggerConfig, FlopsProfilerConfig
from zerojax.devices.rates import rates
from zerojax.foresight import comms_logger, flops_profiler
from zerojax.hlo.origins import by_origin
from zerojax.hlo.program import parse
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS, WIDE = 16, 8  # of all devices, and of every layer
# Of a device: two products forward; backward those of both kernels, and one of an input.
PRODUCT = 2 * (ROWS // 8) * WIDE * WIDE
PLAIN = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}
TABLES = {
    "memory_breakdown": True,
    "comms_logger": {"enabled": True, "debug": True},
    "flops_profiler": {"enabled": True, "profile_step": 1, "top_modules": 2},
}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(nn.Dense(WIDE, use_bias=False, name="fc")(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Block(name="b")(Block(name="a")(x))


def run(config: dict[str, Any], steps: int = 3) -> tuple[Any, Any, Any]:
    """Step, state and batch, after so many steps."""
    zero = zerojax.zero(config)

    def create_state(key: jax.Array) -> TrainState:
        params = Model().init(key, jnp.zeros((1, WIDE)))["params"]
        return TrainState.create(apply_fn=Model().apply, params=params, tx=zero.optimizer())

    @zero
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.square(state.apply_fn({"params": params}, batch)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    state = zero.init(create_state, jax.random.key(0))
    batch = np.linspace(-1, 1, ROWS * WIDE, dtype=np.float32).reshape(ROWS, WIDE)
    for _ in range(steps):
        state, _ = train_step(state, batch)
    return train_step, state, batch


def tables(caplog: pytest.LogCaptureFixture) -> dict[str, list[str]]:
    """The lines of each table, by its section."""
    told = [record.getMessage().splitlines() for record in caplog.records]
    return {lines[0].partition(":")[0]: lines for lines in told}


@pytest.fixture(scope="module")
def plain(quick_compile: None) -> tuple[str, Any]:
    """The compiled step's text, and the parameters after three steps, without any table."""
    step, state, batch = run(PLAIN)
    text = next(step.programs(state, batch)).lowered.compile().as_text()
    return text, jax.device_get(state.params)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> tuple[dict[str, list[str]], Any, list[str]]:
    """The tables of a run, its parameters, and what was compiled in its second step and third."""
    caplog.set_level(logging.INFO, "zerojax")
    _, state, _ = run(PLAIN | TABLES)
    return tables(caplog), jax.device_get(state.params), [r.getMessage() for r in caplog.records]


def test_the_tables_of_a_step(plain: tuple[str, Any], told: Any) -> None:
    text, params = plain
    by_section, same, messages = told
    assert len(messages) == 3  # each once
    jax.tree.map(np.testing.assert_array_equal, same, params)

    memory = {line.split("  ")[0]: line for line in by_section["memory_breakdown"][1:]}
    state = 2 * WIDE * WIDE * 4 // 8
    assert f"{state} B" in memory["parameters"]
    assert memory.keys() >= {"optimizer state", "batch", "temporaries", "peak"}
    assert f"gradients ({state} B where all exist at once)" in memory["temporaries"]

    sent = collectives(text)
    first, heads, *rows = by_section["comms_logger"]
    assert "no times: the forecast knows no such devices" in first
    assert heads.split()[-1] == "from"
    counted = sum(int(re.split(r"\s{2,}", row)[4]) for row in rows)
    assert counted == sum(each.times for each in sent if each.group_size > 1)
    assert any("all-gather" in row and "1 x 8" in row for row in rows)

    profile = by_section["flops_profiler"]
    assert f"matrix products {5 * PRODUCT / 1e3:.3g} KFLOPs" in profile[1]
    assert f"{2 * PRODUCT} FLOPs of them in the forward pass" in profile[1]
    assert re.match(r"measured: \S+ ms, \S+ \w+ a second", profile[2])
    assert "no time by module" in profile[3]
    assert profile[5] == f"depth 1: b {3 * PRODUCT} FLOPs, a {2 * PRODUCT} FLOPs"
    rows = {line.split()[0]: line.split()[1:] for line in profile[-5:]}
    assert rows["a"] == ["64", str(2 * PRODUCT), "40.0%"]
    assert rows["all"][0] == "128"


def test_times_are_those_of_the_forecast(plain: tuple[str, Any]) -> None:
    """As on devices that it knows."""
    h100, text = rates("h100"), plain[0]
    config = CommsLoggerConfig(prof_all=False, prof_ops=("all_gather_into_tensor",), verbose=True)
    sent = [(each, 2) for each in collectives(text)]
    first, heads, *rows = comms_logger.table(sent, config, h100, (0,) * 8).splitlines()
    assert "ms under way, forecast for h100" in first
    assert "ms a step" in heads
    gathers = [each for each in collectives(text) if each.kind == "all-gather"]
    assert len(rows) == len(gathers)
    assert all(row.startswith("all-gather") for row in rows)

    root = flops_profiler.Module(inside={"a": flops_profiler.Module()})
    flops_profiler.attributed(root, by_origin(parse(text), h100), times=2)
    assert root.work.flops == 2 * 5 * PRODUCT
    inside = sum(module.work.seconds for module in root.inside.values())
    assert inside == pytest.approx(root.work.seconds)
    listed = FlopsProfilerConfig(module_depth=1, top_modules=0)
    lines = flops_profiler.table(root, listed, 1e-3, "h100", root.work.seconds).splitlines()
    assert "50.0% of it waiting for collectives and copies" in lines[3]
    assert lines[4].split()[-2:] == ["of", "time"]
    shares = [float(line.split()[-1].rstrip("%")) for line in lines[5:]]
    assert sum(shares[1:]) == pytest.approx(shares[0], abs=0.3) == 50
    assert any("(update and the rest)" in line for line in lines)


def test_a_file_in_place_of_the_log(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, plain: tuple[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "zerojax")
    file = tmp_path / "made" / "profile.txt"
    run(PLAIN | {"flops_profiler": {"enabled": True, "profile_step": 0, "output_file": str(file),
                                    "detailed": False}}, steps=1)  # fmt: skip
    assert file.read_text().startswith("flops_profiler: step 0")
    assert not caplog.records
    (tmp_path / "folder").mkdir()
    section = {"enabled": True, "output_file": str(tmp_path / "profile.txt" / "x")}
    (tmp_path / "profile.txt").touch()
    with pytest.raises(OSError, match=r"profile\.txt"):
        run(PLAIN | {"flops_profiler": section}, steps=1)


def test_modules_of_nnx_by_their_scopes() -> None:
    """The parameters' paths are the modules'; operations have the names that the author gives."""
    zero = zerojax.zero(stage=3)
    model = nnx.eval_shape(lambda: nnx.Sequential(nnx.Linear(4, 2, rngs=nnx.Rngs(0))))
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param))
    root = flops_profiler.modules(zero.plan(model, optimizer).leaves["params"])
    assert [(each.path, each.module.parameters) for each in root.below()] == [
        ("", 10), ("layers", 10), ("layers/0", 10),
    ]  # fmt: skip
    work = flops_profiler.OriginWork(flops=6, forward=6)
    flops_profiler.attributed(root, {"jit(f)/transpose(jvp(layers/0))/dot_general": work})
    assert root.inside["layers"].inside["0"].work == work
    flops_profiler.attributed(root, {"jit(f)/jvp()/dot_general": work})
    bare = flops_profiler.Module(inside={"a": flops_profiler.Module()})
    said = flops_profiler.table(bare, FlopsProfilerConfig(), 1.0, "", 0.0)
    assert "jax.named_scope" in said


def test_offload_has_a_table_of_all_its_programs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zerojax")
    offloaded = {**PLAIN["zero_optimization"], "offload_optimizer": {"device": "cpu"}}
    run(PLAIN | TABLES | {"zero_optimization": offloaded}, steps=2)
    by_section = tables(caplog)
    assert any(line.startswith("host memory") for line in by_section["memory_breakdown"])
    assert f"matrix products {5 * PRODUCT / 1e3:.3g} KFLOPs" in by_section["flops_profiler"][1]
