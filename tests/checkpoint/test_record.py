"""The record beside a step: it comes back as it was, or not at all."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from checkpoint.recorded import flip, write
from etils import epath

from zerojax.checkpoint import CheckpointError, DamagedCheckpointError
from zerojax.checkpoint import record as records


@pytest.fixture
def folder(tmp_path: Path) -> epath.Path:
    folder = tmp_path / "7"
    (folder / "state" / "d").mkdir(parents=True)
    (folder / "state" / "_METADATA").write_text("{}")
    (folder / "state" / "d" / "data").write_bytes(bytes(range(100)))
    (folder / "_CHECKPOINT_METADATA").write_text("orbax changes it while it commits")
    write(folder, {}, max_bytes=50)
    return epath.Path(folder)


def test_it_comes_back(folder: epath.Path) -> None:
    extra = {"epoch": 1, "order": [1.5, None, True, "ä"]}
    written = write(Path(folder), {}, metrics={"loss": math.inf}, extra=extra)
    assert records.read(folder) == written
    write(Path(folder), {}, metrics={"loss": math.nan})  # as a run that diverges has
    read = records.read(folder)
    assert read is not None
    assert read.metrics is not None
    assert math.isnan(read.metrics["loss"])


def test_what_is_recorded_of_files(folder: epath.Path) -> None:
    files = records.files(folder, max_bytes=50)
    assert {name: file.bytes for name, file in files.items()} == {
        "state/_METADATA": 2,
        "state/d/data": 100,
    }
    assert files["state/_METADATA"].crc32 is not None
    assert files["state/d/data"].crc32 is None
    assert records.files(folder)["state/d/data"].crc32 is not None


def changed(folder: epath.Path) -> list[str]:
    return [str(problem) for problem in problems(folder)]


def problems(folder: epath.Path) -> list[CheckpointError]:
    record = records.read(folder)
    assert record is not None
    return records.find_changes(folder, record)


def test_changed_files_are_named(folder: epath.Path) -> None:
    assert changed(folder) == []
    state = Path(folder) / "state"
    flip(state / "d" / "data", 3)
    assert changed(folder) == []  # a large one: its arrays have checksums
    (state / "new").write_text("of no one")
    (Path(folder) / "_CHECKPOINT_METADATA").unlink()
    assert changed(folder) == []
    flip(state / "_METADATA", 1)
    assert changed(folder) == [f"{state}/_METADATA was changed after the save: its CRC differs"]
    (state / "_METADATA").unlink()
    (state / "d" / "data").write_bytes(b"")
    assert changed(folder) == [
        f"{state}/_METADATA is missing",
        f"{state}/d/data has 0 bytes instead of 100",
    ]


def sealed(folder: epath.Path, body: Any, version: Any = 1) -> None:
    """Writes a record whose digest is right, whatever it says."""
    digest = records.seal(version, body)
    text = {"format": version, "sha256": digest, "record": body}
    (Path(folder) / records.FILE).write_text(json.dumps(text))


def body_of(folder: epath.Path) -> Any:
    return json.loads((Path(folder) / records.FILE).read_text())["record"]


def test_a_newer_format(folder: epath.Path) -> None:
    sealed(folder, body_of(folder), 2)
    with pytest.raises(CheckpointError, match=r"has format 2, .* up to 1: update zerojax") as error:
        records.read(folder)
    assert not isinstance(error.value, DamagedCheckpointError)
