"""States with padding at rest: saved in their own shape, and restored on any number of devices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint.states import (
    KEY,
    assert_same,
    create_uneven,
    create_uneven_nnx,
    filled,
    values,
    zero_of,
)
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from typer.testing import CliRunner

import zerojax
from zerojax.__main__ import app
from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.exporter import export
from zerojax.checkpoint.saved import SavedStep
from zerojax.plan.stored import StoredArray, pad, unwrap_stored

pytestmark = pytest.mark.usefixtures("quick_compile")

DEVICES = (3, 7, 8)
# Stage and devices of each step.
PLACES = [(3 if n % 2 else 1, n) for n in DEVICES]
SEVEN = DEVICES.index(7)
CREATE: dict[str, Callable[..., Any]] = {"linen": create_uneven, "nnx": create_uneven_nnx}


def abstract_of(zero: zerojax.Zero, form: str = "linen") -> Any:
    return zero.abstract_state(CREATE[form], KEY)


def offloading(devices: int, section: Any) -> zerojax.Zero:
    return zerojax.zero(
        stage=3,
        mesh=zerojax.mesh(devices),
        offload_optimizer=section,
        sub_group_size=1000,
        stage3_param_persistence_threshold=0,
    )


def padded_of(state: Any) -> list[StoredArray]:
    leaves = jax.tree.leaves(state)
    return [x for x in leaves if isinstance(x, StoredArray) and x.stored.shape != x.shape]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps in the order of PLACES."""
    root = tmp_path_factory.mktemp("steps")
    for step, place in enumerate(PLACES):
        zero = zero_of(*place)
        state = filled(abstract_of(zero))
        assert bool(padded_of(state)) == (place[1] in (3, 7))
        with Checkpointer(root, zero) as checkpointer:
            checkpointer.save(step, state)
    return root


@pytest.fixture(scope="module")
def expected() -> Any:
    return filled(abstract_of(zero_of(0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
def test_restores_on_any_number_of_devices(folder: Path, expected: Any, devices: int) -> None:
    zero = zero_of(1 if devices % 2 else 3, devices)
    abstract = abstract_of(zero)
    with Checkpointer(folder, zero, read_only=True) as checkpointer:
        for step in range(len(PLACES)):
            got = checkpointer.restore(abstract, step)
            assert_same(got, expected)
            for x, like in zip(jax.tree.leaves(got), jax.tree.leaves(abstract), strict=True):
                assert unwrap_stored(x).sharding.is_equivalent_to(like.sharding, x.ndim)
            assert_same(checkpointer.restore(got, step), got)  # into a state with arrays
            for x in padded_of(got):
                at_rest = np.array(x.stored)
                at_rest[tuple(map(slice, x.shape))] = 0
                assert not at_rest.any()


@pytest.mark.slow
def test_plain_orbax_reads_the_shape_without_padding(folder: Path, expected: Any) -> None:
    saved = SavedStep(folder / str(SEVEN))
    leaves = values(expected)
    assert {x.name: x.shape for x in saved.arrays()} == {n: x.shape for n, x in leaves.items()}
    assert all((saved.read(name) == x).all() for name, x in leaves.items())
    zero = zero_of(3, 7)
    whole = NamedSharding(zero.mesh, PartitionSpec())
    abstract = jax.tree.map(lambda x: x.update(sharding=whole), abstract_of(zero))
    for step in (SEVEN, DEVICES.index(8)):
        with ocp.StandardCheckpointer() as reader:
            item = folder / str(step) / "state"
            got = reader.restore(item, abstract)
            alone = reader.restore(item)
        assert_same(got, expected)
        np.testing.assert_array_equal(alone["params"]["both"], leaves["params.both"])
    opened = zero.states.open((got,))
    parts = zero.states.state_placer(zero.states.plan(opened)).donatable(opened)
    (placed,) = opened.close(parts)
    assert padded_of(placed)
    assert_same(placed, expected)


@pytest.mark.slow
def test_export_and_inspection_tell_the_shape_without_padding(
    folder: Path, expected: Any, tmp_path: Path
) -> None:
    export(folder, tmp_path / "out", step=SEVEN)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, x in expected.params.items():
        np.testing.assert_array_equal(tensors[name], x, strict=True)
    command = ["inspect", str(folder), "--leaves"]
    shown = CliRunner().invoke(app, command).output.splitlines()
    (line,) = [line for line in shown if line.lstrip().startswith("params.both")]
    assert line.split()[1:] == ["60x150", "float32", "P('data:(1)4',", "'data:(4)2')", "36", "kB"]
    told = CliRunner().invoke(app, [*command, "--step", str(SEVEN), "--json"]).output
    (step,) = json.loads(told)["steps"]
    assert step["status"] == "complete"
    (rows,) = [leaf for leaf in step["leaves"] if leaf["name"] == "params.rows"]
    assert rows["shape"] == [100, 200]
    assert rows["spec"] == [None, "data"]
    assert rows["bytes"] == 80000


@pytest.mark.slow
def test_training_goes_on_while_a_step_is_written(tmp_path: Path) -> None:
    zero = offloading(7, {"device": "cpu"})

    @zero
    def train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            out = x @ params["rows"]
            return jnp.mean(out**2) + jnp.mean((x[:, :60] @ params["both"]) ** 2)

        value, grads = zerojax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    state = filled(abstract_of(zero))
    before = values(filled(abstract_of(zero)))  # a view would keep the arrays from being donated
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
        after, _ = train_step(state, np.ones((7, 100), np.float32))
        assert padded_of(state)
        assert all(x.is_deleted() for x in padded_of(state))
        got = values(checkpointer.restore(abstract_of(zero)))
        for name, x in before.items():
            np.testing.assert_array_equal(got[name], x, err_msg=name)
        checkpointer.save(2, after)
        assert_same(checkpointer.restore(abstract_of(zero)), after, but="nothing")


def test_shards_that_are_padding_alone(tmp_path: Path) -> None:
    """Nine rows on eight devices lie as five pieces of two, the last half empty, and three more."""
    zero = zerojax.zero(stage=1)
    rows = NamedSharding(zero.mesh, PartitionSpec("data"))
    w = np.random.default_rng(0).normal(size=(9, 40)).astype(np.float32)
    padded = StoredArray(jax.device_put(pad(w, (16, 40)), rows), w.shape)
    state: Any = TrainState(jnp.int32(0), None, {"w": padded}, None, ())  # type: ignore[arg-type]
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
        for dtype in (jnp.float32, jnp.bfloat16):
            struct = jax.ShapeDtypeStruct(w.shape, dtype, sharding=rows)
            got = checkpointer.restore({"w": struct})["w"]
            np.testing.assert_array_equal(np.asarray(got), w.astype(dtype), strict=True)
            assert not np.asarray(got.stored)[9:].any()


@pytest.mark.slow
def test_offloaded(tmp_path: Path, expected: Any, folder: Path) -> None:
    section: Any = {"device": "nvme", "nvme_path": str(tmp_path)}
    for step, devices in enumerate((7, 6, 5)):
        zero = offloading(devices, section)
        source = tmp_path / "steps" if step else folder
        with Checkpointer(source, zero, read_only=True) as checkpointer:
            state = checkpointer.restore(abstract_of(zero))
        assert_same(state, expected)
        assert bool(padded_of(state)) == (devices != 5)
        with Checkpointer(tmp_path / "steps", zero) as checkpointer:
            checkpointer.save(step, state)
    zero = zero_of(1, 8)
    with Checkpointer(tmp_path / "steps", zero, read_only=True) as checkpointer:
        for step in range(3):
            assert_same(checkpointer.restore(abstract_of(zero), step), expected)
