"""Offload changes no number: where the state lies is all that differs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from offload import same_bits
from offload.same_bits import CASES, Case
from offload.training import BATCH, create, train_step

import zerojax

SCRIPT = Path(same_bits.__file__)


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What the script says of each case that this session is about, by name."""
    wanted = {
        item.callspec.params["case"].name
        for item in request.session.items
        if isinstance(item, pytest.Function) and "case" in getattr(item, "fixturenames", ())
        and item.module is request.module
    }  # fmt: skip
    out = tmp_path_factory.mktemp("equal") / "lines"
    flags = f"{os.environ['XLA_FLAGS']} {same_bits.FLAGS}"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(out), *wanted],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = out.read_text().splitlines() if out.exists() else []
    found = {line["case"]: line for line in map(json.loads, lines)}
    missing = {"error": done.stdout[-4000:] or "it said nothing"}
    return {name: found.get(name, missing) for name in wanted}


def marked(case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=[pytest.mark.sweep] if case.sweep else [])


@pytest.mark.slow
@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_the_same_numbers(told: dict[str, dict[str, Any]], case: Case) -> None:
    got = told[case.name]
    assert "error" not in got, got["error"]
    assert not got["differs"]
    assert got["places"] == sorted({"device", case.place})
    assert (2 < got["skipped"] < same_bits.STEPS / 2) == ("fp16" in case.base)


def zero_for(tmp_path: Path, where: str, *, donate: bool = True, **keywords: Any) -> zerojax.Zero:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2}
    sections: dict[str, Any] = {
        "cpu": {"offload_optimizer": "cpu"},
        "both": {"offload_optimizer": "cpu", "offload_param": "cpu"},
        "param": {"offload_param": "cpu"},
        "nvme": {"offload_optimizer": nvme},
    }[where]
    return zerojax.zero(
        stage=3, stage3_param_persistence_threshold=0, mesh=zerojax.mesh(2), donate=donate,
        **sections, **{"sub_group_size": 60, **keywords},
    )  # fmt: skip


def host(state: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(state)]


WHERE = pytest.mark.parametrize("where", ["cpu", "both", "param", "nvme"])


@WHERE
@pytest.mark.usefixtures("quick_compile")
def test_where_it_lies_stays(tmp_path: Path, where: str) -> None:
    """And a state that was used up is refused."""
    zero = zero_for(tmp_path, where)
    state = zero.init(create)
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(state)]
    types = [type(x) for x in jax.tree.leaves(state)]
    step = zero(train_step)
    for _ in range(2):
        state, _ = step(state, BATCH)
        assert [x.sharding.memory_kind for x in jax.tree.leaves(state)] == kinds
        assert [type(x) for x in jax.tree.leaves(state)] == types
    assert len({*zip(kinds, types, strict=True)}) == 2
    used, (state, _) = state, step(state, BATCH)
    with pytest.raises(ValueError, match="an earlier step took over the memory"):
        step(used, BATCH)


@pytest.mark.parametrize("where", ["cpu", "both"])
@pytest.mark.usefixtures("quick_compile")
def test_a_state_that_is_kept_can_be_used_again(tmp_path: Path, where: str) -> None:
    zero = zero_for(tmp_path, where, donate=False)
    old = zero.init(create)
    before = host(old)
    step = zero(train_step)
    new, loss = step(old, BATCH)
    jax.tree.map(np.testing.assert_array_equal, host(old), before)
    again, same = step(old, BATCH)
    assert loss == same
    jax.tree.map(np.testing.assert_array_equal, host(again), host(new))
    step(again, BATCH)
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    assert all(a.sharding == b.sharding for a, b in pairs)


def test_what_lies_on_disk_cannot_be_kept(tmp_path: Path) -> None:
    zero = zero_for(tmp_path, "nvme", donate=False)
    state = zero.init(create)
    with pytest.raises(ValueError, match=r"donate=False cannot keep a state on disk.* offload to"):
        zero(train_step)(state, BATCH)
    host(state)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["both", "nvme"])
@pytest.mark.usefixtures("quick_compile")
def test_a_state_from_elsewhere_is_placed(tmp_path: Path, where: str) -> None:
    """A plain one, whose own arrays live on, and one of another config."""
    zero = zero_for(tmp_path, where)
    step = zero(train_step)
    plain = create()
    want = host(step(zero.init(create), BATCH)[0])
    jax.tree.map(np.testing.assert_array_equal, host(step(plain, BATCH)[0]), want)
    assert not any(x.is_deleted() for x in jax.tree.leaves(plain) if isinstance(x, jax.Array))
    other = zerojax.zero(stage=3, stage3_param_persistence_threshold=0, mesh=zerojax.mesh(2))
    jax.tree.map(np.testing.assert_array_equal, host(step(other.init(create), BATCH)[0]), want)
    back, _ = other(train_step)(step(create(), BATCH)[0], BATCH)
    assert all(x.sharding.memory_kind == "device" for x in jax.tree.leaves(back))


@pytest.mark.usefixtures("quick_compile")
def test_arrays_of_one_group_start_at_rows_of_their_own(tmp_path: Path) -> None:
    """Of seven rows on each device the last comes with half of the next array's eight."""

    def create() -> TrainState:
        values = np.linspace(-1, 1, 56)
        params = {"wide": values.reshape(14, 4), "tall": values[:32].reshape(16, 2)}
        tx = optax.adam(1e-2)
        return TrainState.create(apply_fn=None, params=jax.tree.map(jnp.float32, params), tx=tx)

    def step(state: TrainState, batch: Any) -> TrainState:
        def loss(p: Any) -> jax.Array:
            return jnp.mean((batch[:, :14] @ p["wide"]) ** 2) + jnp.mean((batch @ p["tall"]) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    zero = zero_for(tmp_path, "cpu", sub_group_size=30)
    state, want = zero.init(create), create()
    for _ in range(3):
        state, want = zero(step)(state, BATCH), jax.jit(step)(want, BATCH)
    for a, b in zip(host(state.params), host(want.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@WHERE
@pytest.mark.usefixtures("quick_compile")
def test_a_skipped_step_moves_nothing(tmp_path: Path, where: str) -> None:
    zero = zero_for(tmp_path, where, fp16=True, initial_scale_power=60, hysteresis=9)
    state = zero.init(create)
    before = jax.tree.leaves((state.params, state.opt_state[0].mu))
    state, _ = zero(train_step)(state, BATCH)
    assert zerojax.telemetry(state)["skipped_steps"] == 1
    after = jax.tree.leaves((state.params, state.opt_state[0].mu))
    assert all(a is b for a, b in zip(before, after, strict=True))
