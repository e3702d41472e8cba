"""States in host memory and on a disk: saved and restored as any other, and into each other."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint.recorded import flip
from checkpoint.states import KEY, assert_same, create_linen, filled, values
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedCheckpointError, piecewise
from zerojax.checkpoint.checksum import begin_share, checksum
from zerojax.checkpoint.saved import SavedStep
from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.placement.placer import Placer

pytestmark = pytest.mark.usefixtures("quick_compile")

Place = tuple[str, int, str]
# Where the state lies, devices, precision.
PLACES: list[Place] = [("device", 8, "fp16"), ("host", 2, "bf16"), ("disk", 8, "fp32")]


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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, swap: Path) -> tuple[Path, Any]:
    """One checkpoint from each place: step i from its i-th; and what all of them hold."""
    root, first = tmp_path_factory.mktemp("places"), tmp_path_factory.mktemp("first")
    plain = zero_of(("device", 1, "fp16"), swap)
    expected = filled(plain.init(create_linen, KEY))
    with Checkpointer(first, plain) as checkpointer:
        checkpointer.save(0, expected)
    for step, place in enumerate(PLACES):
        zero = zero_of(place, swap)
        with Checkpointer(first, zero, read_only=True) as checkpointer:
            state = checkpointer.restore(zero.abstract_state(create_linen, KEY))
        with Checkpointer(root, zero) as checkpointer:
            checkpointer.save(step, state)
    return root, expected


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_restores_from_everywhere(written: tuple[Path, Any], place: Place, swap: Path) -> None:
    root, expected = written
    zero = zero_of(place, swap)
    abstract = zero.abstract_state(create_linen, KEY)
    planned = [leaf.place for leaf in zero.plan(abstract).all_leaves()]
    assert {place[0], "device"} == set(planned)
    with Checkpointer(root, zero, read_only=True) as checkpointer:
        for step in range(len(PLACES)):
            got = checkpointer.restore(abstract, step)
            assert_same(got, expected)
            parts = zero.states.open((got,)).parts
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
def test_training_goes_on(tmp_path: Path, swap: Path, trained: Trained) -> None:
    """After the state was restored on a disk of other devices, and saved there."""
    zero, step, states, folder = trained
    other = zero_of(("disk", 2, "fp32"), swap, params=False)
    with Checkpointer(folder, other, read_only=True) as checkpointer:
        state = checkpointer.restore(other.abstract_state(create_trainable, KEY), 0)
    with Checkpointer(tmp_path, other) as checkpointer:
        checkpointer.save(0, state)
    with Checkpointer(tmp_path, zero, read_only=True) as checkpointer:
        state = checkpointer.restore(zero.abstract_state(create_trainable, KEY))
    for expected in states[1:]:
        state, _ = step(state, BATCH)
        assert_holds(state, expected)


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


CASES = [
    ((16, 6), P("a"), jnp.float32),
    ((6, 16), P(None, ("a", "b")), jnp.bfloat16),
    ((12, 10, 3), P("b", None), jnp.float32),
    ((8, 4, 5), P("a", "b"), jnp.float16),
    ((7, 11), P(), jnp.int32),
    ((33,), P(), jnp.bool_),
    ((), P(), jnp.float32),
]


@pytest.mark.parametrize("shape", [(16, 6), (1, 10, 1000), (40, 3, 50), (33,), ()])
def test_chunks_divide_a_shard_and_are_contiguous_in_it(shape: tuple[int, ...]) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    specs = [P(), *([P("a")] if shape[:1] in ((16,), (40,)) else [])]
    for sharding in (NamedSharding(mesh, spec) for spec in specs):
        shard = sharding.shard_shape(shape)
        for most in (4, 40, 400, 10**6):
            chunk = piecewise.chunk_of(shape, sharding, 4, most)
            assert math.prod(chunk) * 4 <= max(most, 4)
            cut = [d for d in range(len(shape)) if chunk[d] < shard[d]]
            assert all(chunk[d] == 1 for d in cut[:-1])
            assert all(
                n % c == 0 for n, whole, c in zip(shard, shape, chunk, strict=True) if n < whole
            )


@pytest.mark.parametrize("piece", [7, 1000])
def test_what_lies_on_a_disk_in_pieces_is_saved_completely(
    tmp_path: Path, swap: Path, piece: int
) -> None:
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


def on_disk(zero: zerojax.Zero, x: jax.Array, piece: int, name: str) -> DiskArray:
    size = int(np.prod(x.sharding.shard_shape(x.shape)))
    pieces = [range(start, min(start + piece, size)) for start in range(0, size, piece)]
    assert isinstance(x.sharding, NamedSharding)
    store = zero.states.placer.store
    leaf = DiskLeaf(store, f"{name} {piece}", x.shape, x.dtype, x.sharding, pieces)
    leaf.fill(x)
    return leaf.advance()


def test_a_damaged_checkpoint_yields_no_handle(
    tmp_path: Path, lying: tuple[zerojax.Zero, TrainState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number of one array is another, so that only its checksum can tell."""
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
    read = SavedStep.read

    def changed(self: SavedStep, name: str, index: Any = ...) -> np.ndarray:
        x = read(self, name, index).copy()
        x.flat[-1:] += np.float32(1e-3) if name.endswith("nu.w") else 0
        return x

    monkeypatch.setattr(SavedStep, "read", changed)
    expected = r"differs from what was saved: opt_state.0.nu.w"
    checkpointer = Checkpointer(tmp_path, zero, read_only=True)
    with pytest.raises(DamagedCheckpointError, match=expected):
        checkpointer.restore(abstract)
    assert len(made) == 6
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


@pytest.mark.parametrize("shape", [(), (3, 2000, 1500)])
def test_checksums_of_host_memory_are_those_of_the_device(shape: tuple[int, ...]) -> None:
    x = jnp.asarray(np.arange(math.prod(shape)).reshape(shape), jnp.float32)
    host = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    assert begin_share(host)() % 2**32 == int(checksum(x))
