import asyncio
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint.states import KEY, SPECS, assert_same, create_linen, create_nnx, filled, zero_of
from flax import nnx
from flax.training.train_state import TrainState
from orbax.checkpoint import v1

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedCheckpointError
from zerojax.checkpoint import checkpointer as checkpointer_module
from zerojax.plan.stored import unwrap_stored

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def zero() -> zerojax.Zero:
    return zero_of(3, 4)


@pytest.fixture(scope="module")
def state(zero: zerojax.Zero) -> Any:
    return filled(zero.init(create_linen, KEY))


@pytest.fixture(scope="module")
def abstract(zero: zerojax.Zero) -> Any:
    return zero.abstract_state(create_linen, KEY)


def test_the_state_may_be_donated_at_once(tmp_path: Path, zero: Any, state: Any) -> None:
    donated = filled(state)
    double = jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, donated)
        double(donated)
        checkpointer.wait()
        assert_same(checkpointer.restore(state), state)
        gone = filled(state)
        double(gone)
        with pytest.raises(CheckpointError, match=r"was donated to a step: save the state that"):
            checkpointer.save(2, gone)


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path, zero: Any, state: Any) -> None:
    options: Any = {"keep": 2, "keep_best": 1, "metric": "loss"}
    with Checkpointer(tmp_path, zero, **options) as checkpointer:
        for step, loss in enumerate([3.0, 1.0, 2.5, 2.0, 1.5]):
            checkpointer.save(step, state, metrics={"loss": loss})
        checkpointer.wait()
        assert checkpointer.all_steps() == [1, 3, 4]
        assert checkpointer.latest_step() == 4
        assert checkpointer.best_step() == 1
    with Checkpointer(tmp_path, zero, **options) as checkpointer:  # metrics come from disk
        checkpointer.save(5, state, metrics={"loss": 0.5})
        checkpointer.wait()
        assert checkpointer.all_steps() == [4, 5]
        with pytest.raises(CheckpointError, match="step 6 has no metric 'loss'"):
            checkpointer.save(6, state)
    assert not (tmp_path / ".deleted").exists()


def test_a_step_that_is_retired_while_it_is_read(
    tmp_path: Path, zero: Any, state: Any, abstract: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path, zero) as writer:
        for step in (1, 2, 3):
            writer.save(step, state)

    def gone(folder: Any, *rest: Any) -> Any:
        shutil.rmtree(folder)
        raise DamagedCheckpointError("a file is missing")

    with Checkpointer(tmp_path, zero, read_only=True) as reader:
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer_module, "restore", gone)
            with pytest.raises(CheckpointError, match=r"step 2 was removed: .* one of \[1, 3\]"):
                reader.restore(abstract, 2)
        tries = [gone, checkpointer_module.restore]
        monkeypatch.setattr(checkpointer_module, "restore", lambda *a: tries.pop(0)(*a))
        assert_same(reader.restore(abstract), state)
        assert reader.all_steps() == [1]


def test_extra_comes_back_with_its_keys(tmp_path: Path, zero: Any, state: Any) -> None:
    key = jax.random.split(jax.random.key(5, impl="rbg"), 2)
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state, extra={"row": 17, "keys": [key], "at": np.float32(0.5)})
        extra = checkpointer.extra()
        assert extra["row"] == 17
        assert extra["at"] == 0.5
        assert extra["keys"][0].dtype == key.dtype
        assert (jax.random.key_data(extra["keys"][0]) == jax.random.key_data(key)).all()
        with pytest.raises(CheckpointError, match=r"extra\['a'\]\[0\]: ndarray is neither JSON"):
            checkpointer.save(2, state, extra={"a": [np.ones(3)]})
        with pytest.raises(CheckpointError, match=r"the key 3 cannot be stored"):
            checkpointer.save(2, state, extra={3: 1})


def test_a_notebook_saves(tmp_path: Path, zero: Any, state: Any) -> None:
    """Which runs a loop of asyncio's."""

    async def cell() -> list[int]:
        with Checkpointer(tmp_path, zero) as checkpointer:
            checkpointer.save(1, state)
            checkpointer.wait()
            return checkpointer.all_steps()

    assert asyncio.run(cell()) == [1]


def test_config_mesh_and_specs_are_recorded(tmp_path: Path, zero: Any, state: Any) -> None:
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
    record = json.loads((tmp_path / "1" / "zerojax.json").read_text())["record"]
    assert record["stage"] == record["config"]["stage"] == 3
    assert record["mesh"] == {"data": 4}
    assert record["leaves"]["params.layer.kernel"]["spec"] == [None, "data"]
    assert record["leaves"]["params.layer.kernel"]["shape"] == [8, 16]
    assert set(record["versions"]) == {"zerojax", "jax", "flax", "optax", "orbax-checkpoint"}


def test_orbax_alone_restores_what_zerojax_saved(
    tmp_path: Path, zero: Any, state: Any, abstract: Any
) -> None:
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
    assert_same(v1.load(tmp_path / "1", abstract), state)
    assert_same(v1.training.Checkpointer(tmp_path).load(1, abstract), state)
    with ocp.CheckpointManager(tmp_path) as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        assert_same(manager.restore(1, args=args)["state"], state)
    assert_same(ocp.StandardCheckpointer().restore(tmp_path / "1" / "state", abstract), state)


def _manager_default(path: Path, state: Any) -> None:
    with ocp.CheckpointManager(path) as manager:
        manager.save(5, args=ocp.args.StandardSave(state))


def _standard(path: Path, state: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


@pytest.mark.parametrize("write", [_manager_default, _standard])
def test_reads_a_train_state_that_plain_orbax_wrote(tmp_path: Path, write: Any) -> None:
    """Whichever folders it made, which is the matter of ``test_saved.py``."""
    plain = filled(jax.jit(create_linen)(KEY)).replace(step=41)  # a Python int, as at the start
    write(tmp_path / "plain", plain)
    zero = zero_of(3, 8, "fp16")
    with Checkpointer(tmp_path / "plain", zero, read_only=True) as checkpointer:
        got = checkpointer.restore(zero.abstract_state(create_linen, KEY))
    for name in ("params", "batch_stats", "step"):
        jax.tree.map(np.testing.assert_array_equal, getattr(got, name), getattr(plain, name))
    jax.tree.map(np.testing.assert_array_equal, got.opt_state, plain.opt_state)
    assert int(zerojax.telemetry(got)["step"]) == 41
    assert float(zerojax.telemetry(got)["loss_scale"]) == 2.0**16


def test_parameters_alone(tmp_path: Path, zero: Any, state: Any) -> None:
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
        other = zero_of(2, 8)
        abstract = other.abstract_state(create_linen, KEY).params
        got = checkpointer.restore(abstract)
        jax.tree.map(np.testing.assert_array_equal, got, state.params)
        assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(
            lambda x: x.sharding, abstract
        )
        low = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), state.params)
        for x, y in zip(
            jax.tree.leaves(checkpointer.restore(low)), jax.tree.leaves(state.params), strict=True
        ):
            np.testing.assert_array_equal(x, y.astype(jnp.bfloat16))


def test_parameters_of_nnx_alone(tmp_path: Path, zero: Any) -> None:
    model, optimizer = filled(zero.init(create_nnx, KEY))
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, (model, optimizer))
        params = nnx.state(zero.abstract_state(create_nnx, KEY)[0], nnx.Param)
        got = checkpointer.restore(params)
    jax.tree.map(np.testing.assert_array_equal, got, nnx.state(model, nnx.Param))


@pytest.mark.slow
def test_pieces_in_the_order_of_partitions(tmp_path: Path) -> None:
    """From hpZ to none and other partitions, numbers of devices and meshes, and back."""

    def of(devices: int, partition: int, **axes: int) -> zerojax.Zero:
        return zerojax.zero(
            stage=3,
            mesh=zerojax.mesh(devices, axes or None),
            specs=SPECS if axes else None,
            stage3_param_persistence_threshold=0,
            zero_hpz_partition_size=partition,
        )

    zeros = [of(8, 4), of(8, 1), of(4, 2), of(6, 3), of(8, 2, data=4, model=2), of(8, 2)]
    state = saved = filled(zeros[0].init(create_linen, KEY))
    assert "data:(2)4" in str(unwrap_stored(state.params["embed"]).sharding.spec)
    for step, (one, other) in enumerate(itertools.pairwise(zeros)):
        with Checkpointer(tmp_path / str(step), one) as checkpointer:
            checkpointer.save(1, state)
        with Checkpointer(tmp_path / str(step), other) as checkpointer:
            state = checkpointer.restore(other.abstract_state(create_linen, KEY))
    assert_same(state, saved)


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    zero = zerojax.zero(
        stage=3,
        fp16=True,
        gradient_accumulation_steps=2,
        stage3_param_persistence_threshold=0,
        hysteresis=1,
    )

    def create(key: jax.Array) -> TrainState:
        params = {"w": jax.random.normal(key, (16, 8))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))

    @zero
    def step(state: TrainState, x: jax.Array) -> tuple[TrainState, Any]:
        def loss_fn(params: Any) -> jax.Array:
            return ((x @ params["w"]).astype(jnp.float32) ** 2).mean()

        loss, grads = zerojax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    batches = np.random.default_rng(0).normal(size=(8, 16, 16)).astype(np.float16)
    batches[2] *= 300  # overflows: the loss scale moves
    state = zero.init(create, KEY)
    with Checkpointer(tmp_path, zero) as checkpointer:
        for i, x in enumerate(batches):
            state, _ = step(state, x)
            if i == 3:
                checkpointer.save(4, state, extra={"next": 4})
        resumed = checkpointer.restore(zero.abstract_state(create, KEY))
        assert int(zerojax.telemetry(resumed)["skipped_steps"]) >= 1
        for x in batches[checkpointer.extra()["next"] :]:
            resumed, _ = step(resumed, x)
    assert_same(resumed, state, but="nothing")
