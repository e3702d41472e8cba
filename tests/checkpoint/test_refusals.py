"""What cannot be written or restored is told at once: what is wrong, where, and what to do."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from checkpoint.states import KEY
from flax.training.train_state import TrainState
from processes import fork_server

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError

pytestmark = pytest.mark.usefixtures("quick_compile")


def create(
    tx: optax.GradientTransformation | None = None, **shapes: tuple[int, ...]
) -> Callable[..., Any]:
    def made(key: jax.Array) -> TrainState:
        params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return TrainState.create(apply_fn=None, params=params, tx=tx or optax.adam(1e-3))

    return made


@pytest.fixture(scope="module")
def zero() -> zerojax.Zero:
    return zerojax.zero(stage=1)


@pytest.fixture(scope="module")
def there(zero: zerojax.Zero, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10 and 20 of a model of two parameters."""
    folder = tmp_path_factory.mktemp("there")
    state = zero.init(create(a=(8, 4), b=(3,)), KEY)
    with Checkpointer(folder, zero) as checkpointer:
        checkpointer.save(10, state)
        checkpointer.save(20, state)
    return folder


def restore(folder: Path, zero: zerojax.Zero, make: Any, step: int | None = None) -> Any:
    with Checkpointer(folder, zero, read_only=True) as checkpointer:
        return checkpointer.restore(zero.abstract_state(make, KEY), step)


def test_another_model(there: Path, zero: zerojax.Zero) -> None:
    with pytest.raises(CheckpointError) as told:
        restore(there, zero, create(a=(8, 5), c=(2,)))
    said = str(told.value)
    assert f"{there / '20'} holds another model or optimizer" in said
    assert "params.a: saved as [8, 4], the state has [8, 5]" in said
    assert "only in the state: params.c [2] float32" in said
    assert "and 3 more" in said
    assert "restore(abstract_state.params)" in said


def test_what_cannot_be_saved(there: Path, zero: zerojax.Zero) -> None:
    state = zero.init(create(a=(8, 4), b=(3,)), KEY)
    with Checkpointer(there, zero) as checkpointer:
        with pytest.raises(CheckpointError, match="a pytree of arrays, not 'state'"):
            checkpointer.save(30, "state")
        with pytest.raises(CheckpointError, match="has step 20, so step 20 cannot be saved"):
            checkpointer.save(20, state)
        with pytest.raises(CheckpointError, match="has step 20, so step 15 cannot be saved"):
            checkpointer.save(15, state)
        with pytest.raises(CheckpointError, match=r"has no step 11; it has 10, 20"):
            checkpointer.delete(11)
        for step in (-1, 3.0, True, None, "30", 10**400):
            with pytest.raises(CheckpointError, match="an int from 0 to"):
                checkpointer.save(step, state)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="is abstract, ShapeDtypeStruct"):
            checkpointer.save(30, zero.abstract_state(create(a=(8, 4)), KEY))
        for number in ("low", 10**400, 10**5000):
            with pytest.raises(CheckpointError, match=r"metrics\['loss'\]: pass a number"):
                checkpointer.save(30, state, metrics={"loss": number})
        with pytest.raises(CheckpointError, match=r"extra\['n'\] has 16,610 bits"):
            checkpointer.save(30, state, extra={"n": 10**5000})
        assert checkpointer.all_steps() == [10, 20]
    with pytest.raises(CheckpointError, match=r"this Checkpointer of .* was closed"):
        checkpointer.save(30, state)
    with (
        Checkpointer(there, zero, read_only=True) as checkpointer,
        pytest.raises(CheckpointError, match="was opened with read_only=True"),
    ):
        checkpointer.save(30, state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_best": 2}, "pass all"),
        ({"mode": "maximum"}, "pass min or max"),
    ],
)
def test_options_that_make_no_sense(
    tmp_path: Path, zero: zerojax.Zero, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path, zero, **options)


def as_nobody(folder: str) -> None:
    """The rest of the test below, in a process without root's rights."""
    if os.getuid() == 0:
        os.setuid(65534)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*Permission denied"):
        Checkpointer(folder, zerojax.zero(stage=0))
    assert Checkpointer(folder, zerojax.zero(stage=0), read_only=True).all_steps() == [7]


def test_no_permission_to_write(open_to_all: Path) -> None:
    (open_to_all / "7").mkdir()
    open_to_all.chmod(0o555)
    process = fork_server().Process(target=as_nobody, args=(str(open_to_all),))
    process.start()
    process.join()
    assert process.exitcode == 0


def hold(folder: str, connection: Any) -> None:
    with Checkpointer(folder, zerojax.zero(stage=0)):
        connection.send(os.getpid())
        connection.recv()


def test_two_runs_in_one_folder(tmp_path: Path, zero: zerojax.Zero) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = fork_server().Process(target=hold, args=(str(tmp_path), theirs))
    process.start()
    pid = ours.recv()
    with pytest.raises(
        CheckpointError, match=rf"another run writes to {tmp_path} \(process {pid} on .*read_only"
    ):
        Checkpointer(tmp_path, zero)
    Checkpointer(tmp_path, zero, read_only=True).close()
    process.kill()  # the lock goes with it
    process.join()
    Checkpointer(tmp_path, zero).close()


def test_two_in_one_process(tmp_path: Path, zero: zerojax.Zero) -> None:
    state = zero.init(create(a=(8, 4)), KEY)
    with Checkpointer(tmp_path, zero) as first, Checkpointer(tmp_path, zero) as second:
        first.save(1, state)
        first.wait()
        assert second.latest_step() == 1
        with pytest.raises(CheckpointError, match="another Checkpointer here"):
            second.save(2, state)
        first.close()
        second.save(2, state)


def _move_and_make_anew(folder: Path) -> None:
    folder.rename(folder.with_name("before"))
    folder.mkdir()


LOST: dict[str, Callable[[Path], Any]] = {
    "replaced": _move_and_make_anew,
    "lock removed": lambda folder: (folder / ".writer").unlink(),
}


@pytest.mark.parametrize("how", LOST)
def test_a_folder_that_is_lost_under_a_run(tmp_path: Path, zero: zerojax.Zero, how: str) -> None:
    """Another run may take the new folder's lock: both must not save into it."""
    folder, state = tmp_path / "run", zero.init(create(a=(8, 4)), KEY)
    with Checkpointer(folder, zero) as first:
        first.save(1, state)
        first.wait()
        LOST[how](folder)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"run was removed or replaced while this .*"):
                first.save(2, state)
        with Checkpointer(folder, zero) as second:
            second.save(3, state)
            with pytest.raises(CheckpointError, match=r"lock, \.writer, is another file"):
                first.save(4, state)
            with pytest.raises(CheckpointError, match=r"was removed or replaced"):
                first.delete(3)
        assert second.latest_step() == 3
