"""States in host memory and on a disk: saved and restored as any other, and into each other."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint.recorded import flip
from checkpoint.states import KEY, assert_same, create_linen, create_nnx, filled, values
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedCheckpointError, piecewise
from zerojax.checkpoint import checksum as checksum_module
from zerojax.checkpoint.checksum import checksum
from zerojax.checkpoint.saved import SavedStep
from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.placement.placer import Placer

pytestmark = pytest.mark.usefixtures("quick_compile")

Place = tuple[str, int, str]
# Where the state lies, devices, precision.
PLACES: list[Place] = [
    ("device", 1, "fp16"),
    ("device", 8, "fp32"),
    ("host", 1, "bf16"),
    ("host", 2, "fp16"),
    ("host", 8, "fp32"),
    ("disk", 1, "fp32"),
    ("disk", 8, "bf16"),
]
FORMS: dict[str, tuple[Callable[..., Any], list[Place]]] = {
    "linen": (create_linen, PLACES),
    "nnx": (create_nnx, PLACES[1::3] + PLACES[-1:]),
}


def zero_of(place: Place, disk_path: Path, *, params: bool = True) -> zerojax.Zero:
    """With parameters elsewhere too, or the optimizer's state and masters alone."""
    where, devices, precision = place
    nvme = {"device": "nvme", "nvme_path": str(disk_path)}
    section: Any = {"device": None, "host": "cpu", "disk": nvme}[where]
    keywords: dict[str, Any] = {} if precision == "fp32" else {precision: True}
    return zerojax.zero(
        stage=3,
        mesh=zerojax.mesh(devices),
        stage3_param_persistence_threshold=0,
        offload_optimizer=section,
        offload_param=section if params else None,
        sub_group_size=100,
        **keywords,
    )


@pytest.fixture(scope="module")
def swap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvme")


@pytest.fixture(scope="module")
def lying(swap: Path) -> tuple[zerojax.Zero, TrainState]:
    zero = zero_of(("disk", 8, "fp32"), swap)
    return zero, zero.init(create_trainable, KEY)


@pytest.fixture(scope="module", params=FORMS)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, swap: Path
) -> tuple[str, Path, Any]:
    """One checkpoint from each place: step i from its i-th; and what all of them hold."""
    create, places = FORMS[request.param]
    root, first = tmp_path_factory.mktemp(request.param), tmp_path_factory.mktemp("first")
    plain = zero_of(("device", 1, "fp16"), swap)
    expected = filled(plain.init(create, KEY))
    with Checkpointer(first, plain) as checkpointer:
        checkpointer.save(0, expected)
    for step, place in enumerate(places):
        zero = zero_of(place, swap)
        with Checkpointer(first, zero, read_only=True) as checkpointer:
            state = checkpointer.restore(zero.abstract_state(create, KEY))
        with Checkpointer(root, zero) as checkpointer:
            checkpointer.save(step, state)
    return request.param, root, expected


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_restores_from_everywhere(written: tuple[str, Path, Any], place: Place, swap: Path) -> None:
    form, root, expected = written
    create, places = FORMS[form]
    if place not in places:
        pytest.skip("enough with the other form")
    zero = zero_of(place, swap)
    abstract = zero.abstract_state(create, KEY)
    planned = [leaf.place for leaf in zero.plan(abstract).all_leaves()]
    assert {place[0], "device"} == set(planned)
    with Checkpointer(root, zero, read_only=True) as checkpointer:
        for step in range(len(places)):
            got = checkpointer.restore(abstract, step)
            assert_same(got, expected)
            parts = zero.states.open(got if isinstance(got, tuple) else (got,)).parts
            assert [place_of(x) for x in jax.tree.leaves(parts)] == planned
            pairs = zip(jax.tree.leaves(got), jax.tree.leaves(abstract), strict=True)
            assert all(x.sharding.is_equivalent_to(s.sharding, len(x.shape)) for x, s in pairs)


def place_of(x: Any) -> str:
    if isinstance(x, DiskArray):
        return "disk"
    return "host" if x.sharding.memory_kind == "pinned_host" else "device"


TX = optax.adamw(1e-2)


def create_trainable(key: jax.Array) -> TrainState:
    params = {"w": jax.random.normal(key, (64, 32)), "v": jnp.ones((32, 8))}
    return TrainState.create(apply_fn=None, params=params, tx=TX)


def step_of(zero: zerojax.Zero) -> Any:
    @zero
    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((batch @ params["w"] @ params["v"]) ** 2)

        value, grads = zerojax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return train_step


BATCH = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)


Trained = tuple[zerojax.Zero, Any, list[dict[str, np.ndarray]], Path]


@pytest.fixture(scope="module", params=["host", "disk"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, swap: Path
) -> Trained:
    """A step, the states 0 to 2 in a row, and where they were saved as they came."""
    zero = zero_of((request.param, 8, "fp32"), swap, params=False)
    step, folder = step_of(zero), tmp_path_factory.mktemp(request.param)
    state, states = zero.init(create_trainable, KEY), []
    with Checkpointer(folder, zero) as checkpointer:
        for n in range(3):
            states.append({name: x.copy() for name, x in values(state).items()})
            checkpointer.save(n, state)
            state, _ = step(state, BATCH)
    return zero, step, states, folder


def assert_holds(state: Any, expected: dict[str, np.ndarray]) -> None:
    got = values(state)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name, strict=True)


@pytest.mark.slow
@pytest.mark.one_in(2)
def test_what_is_saved_does_not_change_with_the_next_step(trained: Trained) -> None:
    zero, _, states, folder = trained
    with Checkpointer(folder, zero, read_only=True) as checkpointer:
        for n, expected in enumerate(states):
            got = checkpointer.restore(zero.abstract_state(create_trainable, KEY), n)
            assert_holds(got, expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("origin", ["device", "host", "disk"])
def test_training_goes_on(tmp_path: Path, swap: Path, trained: Trained, origin: str) -> None:
    zero, step, states, folder = trained
    other = zero_of((origin, 2, "fp32"), swap, params=False)
    with Checkpointer(folder, other, read_only=True) as checkpointer:
        state = checkpointer.restore(other.abstract_state(create_trainable, KEY), 0)
    with Checkpointer(tmp_path, other) as checkpointer:
        checkpointer.save(0, state)
    with Checkpointer(tmp_path, zero, read_only=True) as checkpointer:
        state = checkpointer.restore(zero.abstract_state(create_trainable, KEY))
    for expected in states[1:]:
        state, _ = step(state, BATCH)
        assert_holds(state, expected)


def test_plain_orbax_may_save_host_memory(tmp_path: Path, swap: Path) -> None:
    zero = zero_of(("host", 8, "fp32"), swap)
    state = zero.init(create_trainable, KEY)
    expected = {name: x.copy() for name, x in values(state).items()}
    w = state.params["w"]
    in_place = jax.jit(lambda x: x.at[0].set(7), donate_argnums=0, out_shardings=w.sharding)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
        jax.block_until_ready(in_place(w))
        manager.wait_until_finished()
    with Checkpointer(tmp_path, zero) as checkpointer:
        assert_holds(checkpointer.restore(zero.abstract_state(create_trainable, KEY)), expected)


def test_host_memory_is_given_back_to_the_next_step(tmp_path: Path, swap: Path) -> None:
    """Whoever refers to it keeps a step from using it again."""
    zero = zero_of(("host", 8, "fp32"), swap)
    state = zero.init(create_trainable, KEY)
    use_up = jax.jit(jnp.copy, donate_argnums=0)
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
        assert donated(use_up, state.params["w"])
        got = checkpointer.restore(zero.abstract_state(create_trainable, KEY))
        assert donated(use_up, got.params["w"])


def donated(use_up: Any, x: jax.Array) -> bool:
    jax.block_until_ready(use_up(x))
    return x.is_deleted()


def test_other_floats_are_cast_where_they_lie(tmp_path: Path, swap: Path) -> None:
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), create_trainable(KEY).params)
    plain = TrainState.create(apply_fn=None, params=low, tx=TX)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(plain))
    for where in ("host", "disk"):
        zero = zero_of((where, 8, "bf16"), swap)
        with Checkpointer(tmp_path, zero, read_only=True) as checkpointer:
            got = checkpointer.restore(zero.abstract_state(create_trainable, KEY)).params["w"]
        assert got.dtype == np.float32
        assert place_of(got) == where
        np.testing.assert_array_equal(np.asarray(got), np.asarray(low["w"], np.float32))


CASES = [
    ((16, 6), P("a"), jnp.float32),
    ((6, 16), P(None, ("a", "b")), jnp.bfloat16),
    ((12, 10, 3), P("b", None), jnp.float32),
    ((8, 4, 5), P("a", "b"), jnp.float16),
    ((7, 11), P(), jnp.int32),
    ((33,), P(), jnp.bool_),
    ((), P(), jnp.float32),
]


@pytest.mark.parametrize("piece", [7, 29, 1000])
def test_every_chunk_is_written_once_and_completely(
    tmp_path: Path, swap: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(piecewise, "CHUNK_BYTES", 40)
    monkeypatch.setattr(piecewise, "_TOGETHER", 300)
    boxes: dict[str, list[Any]] = {}
    write = piecewise._Transactions.write

    def writing(self: Any, spec: Any, context: Any, index: Any, block: np.ndarray) -> None:
        boxes.setdefault(str(spec["kvstore"]), []).append((index, spec["metadata"]["chunks"]))
        write(self, spec, context, index, block)

    monkeypatch.setattr(piecewise._Transactions, "write", writing)
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    zero = zero_of(("disk", 8, "fp32"), swap)
    arrays = {}
    for i, (shape, spec, dtype) in enumerate(CASES):
        x = np.asarray(np.random.default_rng(i).normal(size=shape) * 100)
        arrays[str(i)] = jax.device_put(jnp.asarray(x).astype(dtype), NamedSharding(mesh, spec))
    handles = {name: on_disk(zero, x, piece, name) for name, x in arrays.items()}
    state = TrainState(jnp.int32(0), None, handles, None, ())  # type: ignore[arg-type]
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
    saved = SavedStep(tmp_path / "1")
    for name, x in arrays.items():
        np.testing.assert_array_equal(saved.read(f"params.{name}"), np.asarray(x))
    assert len(boxes) == len(CASES)
    for found in boxes.values():
        for index, chunks in found:
            assert all(s.start % n == 0 for s, n in zip(index, chunks, strict=True))
            assert all(s.stop - s.start <= n for s, n in zip(index, chunks, strict=True))
        starts = [tuple(s.start for s in index) for index, _ in found]
        assert len(set(starts)) == len(starts)


def on_disk(zero: zerojax.Zero, x: jax.Array, piece: int, name: str) -> DiskArray:
    size = int(np.prod(x.sharding.shard_shape(x.shape)))
    pieces = [range(start, min(start + piece, size)) for start in range(0, size, piece)]
    assert isinstance(x.sharding, NamedSharding)
    store = zero.states.placer.store
    leaf = DiskLeaf(store, f"{name} {piece}", x.shape, x.dtype, x.sharding, pieces)
    leaf.fill(x)
    return leaf.advance()


def test_plain_orbax_reads_what_lay_on_a_disk(
    tmp_path: Path, lying: tuple[zerojax.Zero, TrainState]
) -> None:
    zero, state = lying
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
    plain = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    abstract = plain.abstract_state(create_trainable, KEY)
    with ocp.StandardCheckpointer() as reader:
        got = reader.restore(tmp_path / "1" / "state", abstract)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(got))
    assert_same(got, state)


@pytest.mark.parametrize("what", ["data", "record"])
def test_a_damaged_checkpoint_yields_no_handle(
    tmp_path: Path,
    lying: tuple[zerojax.Zero, TrainState],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    zero, state = lying
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
    made: list[DiskLeaf] = []
    create = Placer.disk_leaf

    def creating(self: Placer, *args: Any) -> DiskLeaf:
        made.append(create(self, *args))
        return made[-1]

    monkeypatch.setattr(Placer, "disk_leaf", creating)
    abstract = zero.abstract_state(create_trainable, KEY)
    if what == "data":  # one number of one array, so that only its checksum can tell
        read = SavedStep.read

        def changed(self: SavedStep, name: str, index: Any = ...) -> np.ndarray:
            x = read(self, name, index).copy()
            x[..., -1] += np.float32(1e-3) if name.endswith("nu.w") else 0
            return x

        monkeypatch.setattr(SavedStep, "read", changed)
        expected = r"other numbers than were saved: opt_state.0.nu.w"
    else:
        data = max((tmp_path / "1").rglob("d/*"), key=lambda file: file.stat().st_size)
        flip(data, data.stat().st_size // 2, 128)
        expected = "is not as it was written"
    checkpointer = Checkpointer(tmp_path, zero, read_only=True)
    with pytest.raises(DamagedCheckpointError, match=expected):
        checkpointer.restore(abstract)
    assert len(made) == (6 if what == "data" else 0)
    assert not any(leaf.generation for leaf in made)


def test_a_damaged_disk_is_told_and_the_last_step_stays(
    tmp_path: Path, lying: tuple[zerojax.Zero, TrainState]
) -> None:
    zero, state = lying
    again = zero.init(create_trainable, jax.random.key(1))
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
        again.params["w"].leaf.store.wait()
        damage(again.params["w"])
        with pytest.raises(CheckpointError, match=r"step 2 was not saved .*step 1 is the last goo"):
            checkpointer.save(2, again)
        assert checkpointer.all_steps() == [1]
        checkpointer.save(3, state)
        checkpointer.wait()
        assert checkpointer.all_steps() == [1, 3]


def damage(x: DiskArray) -> None:
    """Every file of the store in which it lies that has the bytes of its first shard."""
    wanted = x.leaf.read_shard(0, 0).result().tobytes()
    for file in Path(x.leaf.store.path).iterdir():
        if file.read_bytes().startswith(wanted):
            flip(file, 0, 1)


def test_a_half_updated_leaf_is_not_saved(tmp_path: Path, swap: Path) -> None:
    zero = zero_of(("disk", 8, "fp32"), swap)
    state = zero.init(create_trainable, KEY)
    leaf = state.params["w"].leaf
    leaf.write(0, {d: np.zeros(len(leaf.chunks[0]), np.float32) for d in jax.devices()})
    with Checkpointer(tmp_path, zero) as checkpointer:
        with pytest.raises(CheckpointError, match="is half updated"):
            checkpointer.save(1, state)
        gone = dataclasses.replace(state, params={**state.params, "w": leaf.advance()})
        leaf.advance()
        with pytest.raises(CheckpointError, match=r"params.w was donated to a step"):
            checkpointer.save(1, gone)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(64, 33), (3, 2, 1100), (2500,), ()])
def test_checksums_of_host_memory_are_those_of_the_device(shape: tuple[int, ...]) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    host = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_module, "_BROUGHT", 1000)
        patch.setattr(checksum_module, "checksum", checksum.__wrapped__)
        assert int(checksum.__wrapped__(host)) == int(checksum(x))
