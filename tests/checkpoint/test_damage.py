"""Every file of a step, damaged in every way: it is noticed, or the arrays are what they were."""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from checkpoint.recorded import flip, read, save, tree, write
from checkpoint.recorded import steps as steps
from checkpoint.states import KEY, assert_same, filled, zero_of
from etils import epath
from flax.training.train_state import TrainState

from zerojax.checkpoint import Checkpointer, DamagedCheckpointError, state_tree
from zerojax.checkpoint import record as records
from zerojax.checkpoint.inspection import InspectedStep, inspect
from zerojax.checkpoint.saved import SavedStep

Damage = Callable[[Path], None]

pytestmark = pytest.mark.usefixtures("quick_compile")

COMMITS = {"_CHECKPOINT_METADATA", "commit_success.txt"}
"""What orbax writes beside the arrays while it commits: nothing that is read with them."""


def cut(share: float) -> Damage:
    def damage(file: Path) -> None:
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * share)])

    return damage


def flipped(place: float, mask: int = 1) -> Damage:
    return lambda file: flip(file, int(place * (file.stat().st_size - 1)), mask)


def flipped_anywhere(seed: int) -> Damage:
    def damage(file: Path) -> None:
        rng = random.Random(f"{seed} {file.stat().st_size}")
        flip(file, rng.randrange(file.stat().st_size), rng.randrange(1, 256))

    return damage


def added(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


DAMAGES: dict[str, Damage] = {
    "first byte": flipped(0),
    "middle byte": flipped(0.5, 128),
    **{f"random byte {seed}": flipped_anywhere(seed) for seed in range(3)},
    "half": cut(0.5),
    "emptied": cut(0),
    "removed": Path.unlink,
    "longer": added,
}


def data_of(folder: Path) -> Path:
    """The file with the arrays."""
    return max(folder.rglob("d/*"), key=lambda file: file.stat().st_size)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 100 and 200, of whose files those with arrays have no digest."""
    directory = tmp_path_factory.mktemp("made")
    for step in (100, 200):
        folder = save(directory, step, tree(step))
        data = data_of(folder)
        record = write(folder, tree(step), max_bytes=data.stat().st_size - 1)
        assert [name for name, f in record.files.items() if f.crc32 is None] == [
            str(data.relative_to(folder))
        ]
    return directory


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def each_file(made: Path, directory: Path) -> Iterator[tuple[str, Path]]:
    """The files of step 200, one after the other in a fresh copy of it."""
    for name in files(made / "200"):
        shutil.rmtree(directory / "200")
        shutil.copytree(made / "200", directory / "200")
        yield name, directory / "200" / name


def looked(directory: Path, step: int = 200, **keywords: Any) -> InspectedStep:
    (found,) = inspect(directory, step=step, **keywords).steps
    return found


def names_something(problems: tuple[str, ...], file: Path, leaves: set[str]) -> bool:
    return any(str(file) in line or any(leaf in line for leaf in leaves) for line in problems)


@pytest.mark.parametrize("damage", DAMAGES)
def test_inspection_notices(made: Path, steps: Path, damage: str) -> None:
    truth = read(made / "200")
    record = records.read(epath.Path(made / "200"))
    assert record is not None
    for name, file in each_file(made, steps):
        DAMAGES[damage](file)
        found = looked(steps)
        if found.problems:
            assert found.status == "damaged"
            assert names_something(found.problems, file, set(truth)), (name, found.problems)
            continue
        assert read(steps / "200") == truth, name
        digested = name in record.files and record.files[name].crc32 is not None
        assert name in COMMITS or not digested, name
        if name == records.FILE:
            assert records.read(epath.Path(steps / "200")) == record


def swap(a: Path, b: Path) -> None:
    a.rename(a.with_name("swapped"))
    b.rename(a)
    a.with_name("swapped").rename(b)


def replace_state(steps: Path) -> None:
    """By that of the other step, intact in itself, with a record of the right step."""
    shutil.rmtree(steps / "200" / "state")
    shutil.copytree(steps / "100" / "state", steps / "200" / "state")


def other_state_with_files_that_agree(steps: Path) -> None:
    """As before, and the list of files is brought up to date, but not the checksums."""
    record = records.read(epath.Path(steps / "200"))
    assert record is not None
    replace_state(steps)
    folder = epath.Path(steps / "200")
    records.write(folder, record.model_copy(update={"files": records.files(folder)}))


def lost_record(steps: Path) -> None:
    (steps / "200" / records.FILE).unlink()
    flipped(0.5)(data_of(steps / "200"))


INTACT_STEPS: dict[str, tuple[Callable[[Path], None], str]] = {
    "steps swapped": (lambda steps: swap(steps / "100", steps / "200"), "is of step 100"),
    "other state, files agree": (other_state_with_files_that_agree, "params.wide differs"),
    "record lost": (lost_record, "zerojax.json is missing"),
}


@pytest.mark.parametrize("kind", INTACT_STEPS)
def test_more_than_a_file(steps: Path, kind: str) -> None:
    damage, says = INTACT_STEPS[kind]
    damage(steps)
    found = inspect(steps)
    assert [step.step for step in found.steps] == [100, 200]
    assert found.steps[-1].status == "damaged"
    assert any(says in problem for problem in found.steps[-1].problems), found.steps[-1].problems
    if kind != "steps swapped":
        assert found.newest_intact is found.steps[0]
    if kind != "other state, files agree":  # which takes reading the arrays
        with pytest.raises(DamagedCheckpointError, match=re.escape(says)):
            SavedStep(steps / "200")


def create(key: jax.Array) -> TrainState:
    """With an array that orbax writes into a file of its own, and one that it does not."""
    params = {"wide": jax.random.normal(key, (256, 64)), "odd": jax.random.normal(key, (3, 5))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Steps 100 and 200 as training writes them, the state and what to restore it into."""
    directory, zero = tmp_path_factory.mktemp("trained"), zero_of(3, 4)
    state = filled(zero.init(create, KEY))
    with Checkpointer(directory, zero) as checkpointer:
        for step in (100, 200):
            checkpointer.save(step, state)
    return directory, state, zero.abstract_state(create, KEY)


def restored_or_refused(steps: Path, file: Path, trained: tuple[Path, Any, Any]) -> bool:
    """Whether it was refused, in words that help."""
    _, state, abstract = trained
    error: DamagedCheckpointError | None = None
    with Checkpointer(steps, zero_of(3, 4), read_only=True) as checkpointer:
        try:
            assert_same(checkpointer.restore(abstract), state)
        except DamagedCheckpointError as raised:
            error = raised
    if error is None:
        return False
    first, *_, last = str(error).splitlines()
    assert names_something(
        (first,), file, {*state_tree.arrays_by_name(state_tree.tree_of(state))}
    ), error
    assert last.startswith("Step 100 looks complete: restore(abstract_state, step=100)")
    return error.newest_intact == 100


@pytest.mark.parametrize("damage", ["random byte 0", "removed"])
def test_restoring_notices(trained: tuple[Path, Any, Any], tmp_path: Path, damage: str) -> None:
    made, *_ = trained
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for name, file in each_file(made, tmp_path):
        DAMAGES[damage](file)
        refused = restored_or_refused(tmp_path, file, trained)
        assert refused == (name not in COMMITS), name


def test_restoring_notices_without_digests(trained: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """As in files of more than 16 MB: orbax or the checksum of an array has to notice."""
    made, *_ = trained
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    refused = 0
    for name, file in each_file(made, tmp_path):
        if "/d/" not in name:
            continue
        folder = epath.Path(tmp_path / "200")
        record = records.read(folder)
        assert record is not None
        bare = {n: f.model_copy(update={"crc32": None}) for n, f in record.files.items()}
        records.write(folder, record.model_copy(update={"files": bare}))
        flipped_anywhere(0)(file)
        refused += restored_or_refused(tmp_path, tmp_path / "200" / "state", trained)
    assert refused >= 2
