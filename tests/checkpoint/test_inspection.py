"""What a checkpoint holds, told from its files; damage is the matter of `test_damage.py`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.recorded import made as made
from checkpoint.recorded import save_plain
from checkpoint.recorded import steps as steps
from etils import epath

from zerojax.checkpoint import inspection
from zerojax.checkpoint import record as records
from zerojax.checkpoint.inspection import InspectedStep, inspect

pytestmark = pytest.mark.usefixtures("quick_compile")


def only(checkpoint: Path, **keywords: Any) -> InspectedStep:
    (step,) = inspect(checkpoint, **keywords).steps
    return step


def test_what_is_told_of_a_step(made: Path) -> None:
    found = inspect(made)
    assert [step.step for step in found.steps] == [90, 100]
    assert found.newest_intact is found.steps[1]
    assert found.damaged == found.unfinished == found.deleted == ()
    step = found.steps[1]
    assert (step.status, step.problems, step.notes) == ("complete", (), ())
    assert (step.form, step.saved) == ("linen", "2026-01-02T03:04:05+00:00")
    assert step.folder == f"{made}/100"
    assert step.record == records.read(epath.Path(made / "100"))
    on_disk = sum(f.stat().st_size for f in (made / "100").rglob("*") if f.is_file())
    assert step.bytes_on_disk == on_disk


def test_what_is_told_of_arrays(made: Path) -> None:
    step = only(made, step=100)
    told = {array.name: array for array in step.arrays}
    wide = told["params.wide"]
    assert (wide.shape, wide.dtype, wide.spec) == ((64, 24), "float32", ["data"])
    assert (wide.bytes, wide.group) == (64 * 24 * 4, "parameters")
    assert told["opt_state.0.mu"].group == "optimizer state"
    assert told["numpy"].spec is None
    key = told["key"]  # as it was saved, and not the numbers on disk
    assert (key.shape, key.dtype, key.bytes, key.group) == ((), "key<fry>", 8, "other state")
    assert step.sizes == {
        "parameters": 6144 + 160 + 11,
        "optimizer state": 6144,
        "other state": 4 + 8 + 9 + 3 + 24 + 32,
    }
    assert sum(step.dtypes.values()) == sum(step.sizes.values())
    assert next(iter(step.dtypes)) == "float32"
    assert step.dtypes["bfloat16"] == 160


def test_a_step_s_own_folder(steps: Path) -> None:
    assert only(steps / "100").step == 100
    (steps / "100").rename(steps.parent / "best")
    assert only(steps.parent / "best").step == 100  # as recorded
    (steps.parent / "best" / "state" / "_METADATA").unlink()
    assert only(steps.parent / "best").status == "damaged"


def test_files_that_the_disk_does_not_give(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(inspection.records, "sizes", fails)
    found = inspect(steps)
    assert {step.status for step in found.steps} == {"not verifiable"}  # and not damaged
    assert found.damaged == ()
    assert found.newest_intact is None
    assert any("Input/output error" in line for line in found.steps[1].notes)


def test_an_array_outside_of_the_folder(tmp_path: Path) -> None:
    folder = save_plain(tmp_path, 5, {"a": {"w": np.ones(3)}})
    file = folder / "state" / "_METADATA"
    file.write_text(file.read_text().replace('"key": "a"', '"key": "../../a"'))
    (problem,) = only(tmp_path).problems
    assert "an array's name leaves the folder: ('../../a', 'w')" in problem
