"""Seconds that zerojax and plain orbax take to save and restore one state, turn by turn."""

import contextlib
import dataclasses
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from rich.progress import track

import zerojax
from benchmarks.savers import SAVERS, Saver, bytes_of, create_state_of

SAVE, CALL, STEP, NEXT_STEP = "save", "save's call", "step", "first step after save's call"
COLD, WARM = "restore, nothing cached", "restore, cached"
COPY = "copy of the files"
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of each turn, by who took it: a key of ``SAVERS``, or ``COPY``."""

    what: str
    seconds: dict[str, list[float]]

    def median(self, by: str) -> float:
        return statistics.median(self.seconds[by])

    @property
    def speed(self) -> float:
        """zerojax's speed over orbax's: the median over turns, in which neighbours are compared."""
        pairs = zip(self.seconds["orbax"], self.seconds["zerojax"], strict=True)
        return statistics.median(orbax / ours for orbax, ours in pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """Timings of a state, and its sizes.

    Attributes:
      state_bytes: bytes of the state's arrays.
      disk_bytes: bytes of a save's files, by saver.
      devices, elsewhere: the devices that saved the state, and the others that restored it too.
      first_calls: seconds until the first call of save returned, by saver; it compiles programs.
    """

    state_bytes: int
    disk_bytes: dict[str, int]
    devices: str
    elsewhere: str
    first_calls: dict[str, float]
    timings: list[Timing]

    def timing(self, what: str) -> Timing | None:
        return next((each for each in self.timings if each.what == what), None)


class Clock:
    """Seconds by what was timed and who took them."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, list[float]]] = {}

    @contextlib.contextmanager
    def time(self, what: str, by: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        taken = time.perf_counter() - began
        self.seconds.setdefault(what, {}).setdefault(by, []).append(taken)


def take_turns(
    gigabytes: float, rounds: int, folder: Path, mesh: Mesh, *, cold: bool = True
) -> Turns:
    """Saves and restores ``rounds`` times, after a first time that does not count.

    ``cold``: also when the system's page cache is dropped, where that is permitted.
    """
    zero = zerojax.zero(stage=3, mesh=mesh)
    half = zerojax.mesh(max(1, mesh.size // 2))
    other = zerojax.zero(stage=2, mesh=half)
    elsewhere = f"stage 2 on {half.size} devices"
    create_state = create_state_of(gigabytes)
    state = zero.init(create_state)
    places = {
        **({COLD: zero.abstract_state(create_state)} if cold else {}),
        WARM: zero.abstract_state(create_state),
        f"restore to {elsewhere}": other.abstract_state(create_state),
    }
    clocks = [Clock(), Clock()]
    sizes: dict[str, int] = {}
    for turn in track(range(1 + rounds), "taking turns", transient=True):
        # Who goes first alternates, as the second finds another machine.
        order = [*SAVERS] if turn % 2 else [*reversed(SAVERS)]
        clock = clocks[min(turn, 1)]
        savers = {by: SAVERS[by](folder / by, zero) for by in order}
        _save(savers, state, clock)
        sizes = {by: sum(map(_size, _files(folder / by))) for by in savers}
        _copy(folder / "zerojax", folder / "copy", clock)
        for what, abstract in places.items():
            _restore(what, abstract, savers, state, clock)
        state = _train_on(savers, state, clock)
        for by, saver in savers.items():
            saver.close()
            shutil.rmtree(folder / by)
    return Turns(
        state_bytes=bytes_of(state),
        disk_bytes=sizes,
        devices=f"stage 3 on {mesh.size} devices",
        elsewhere=elsewhere,
        first_calls={by: taken[0] for by, taken in clocks[0].seconds[CALL].items()},
        timings=[Timing(what=what, seconds=each) for what, each in clocks[1].seconds.items()],
    )


def _save(savers: dict[str, Saver], state: TrainState, clock: Clock) -> None:
    for by, saver in savers.items():
        os.sync()
        with clock.time(SAVE, by):
            saver.save(1, state)
            saver.wait()


def _copy(source: Path, target: Path, clock: Clock) -> None:
    target.mkdir()
    os.sync()
    with clock.time(SAVE, COPY):
        for i, file in enumerate(_files(source)):
            copied = shutil.copyfile(file, target / str(i))
            with copied.open("rb+") as written:
                os.fsync(written)  # as both savers do
    shutil.rmtree(target)


def _restore(
    what: str, abstract: TrainState, savers: dict[str, Saver], state: TrainState, clock: Clock
) -> None:
    for by, saver in savers.items():
        os.sync()
        if what == COLD and not drop_caches():
            return
        with clock.time(what, by):
            restored = jax.block_until_ready(saver.restore(abstract))
        if what == WARM and not _same(jax.tree.leaves(restored), jax.tree.leaves(state)):
            raise RuntimeError(f"{by} restored other numbers than it saved")
        del restored


def _train_on(savers: dict[str, Saver], state: TrainState, clock: Clock) -> TrainState:
    """Two steps, a save, a step: the first warms up, the second and the last are compared."""
    for by, saver in savers.items():
        os.sync()
        state = jax.block_until_ready(_step(state))
        with clock.time(STEP, by):
            state = jax.block_until_ready(_step(state))
        with clock.time(CALL, by):
            saver.save(2, state)
        with clock.time(NEXT_STEP, by):
            state = jax.block_until_ready(_step(state))
        saver.wait()
    return state


def drop_caches() -> bool:
    """Makes the system forget the files it has read, where it may."""
    os.sync()
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        return False
    return True


@jax.jit
def _same(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
    pairs = zip(a, b, strict=True)
    return jnp.stack([jnp.array_equal(x, y, equal_nan=True) for x, y in pairs]).all()


def _touch(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: x * 0.999 if jnp.issubdtype(x.dtype, jnp.floating) else x, state)


_step = jax.jit(_touch, donate_argnums=0)
"""Reads and writes every array, in its own memory."""


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _size(file: Path) -> int:
    return file.stat().st_size
