"""Rows from files: what is read, and what is refused by name."""

import sys
from pathlib import Path

import pytest

from examples.tables import dataset, files, read


def test_csv_and_json_give_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x,y,z\n"to, be",1,2\n')
    (tmp_path / "a.jsonl").write_text('{"x": "to, be", "y": "1", "z": 0}\n\n')
    rows = [read(str(tmp_path / name), ["x", "y"]) for name in ("a.csv", "a.jsonl")]
    assert rows[0] == rows[1] == [{"x": "to, be", "y": "1"}]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "x\n1\n", "row 1 has no column 'y', only x"),
        ("a.jsonl", "{\n", "line 1: .* an object a line is read"),
        ("a.csv", "x,y\n", "has no rows"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        read(str(tmp_path / name), ["x", "y"])


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.csv does not exist"):
        read(str(tmp_path / "none.csv"), ["x"])


def test_a_folder_has_splits(tmp_path: Path) -> None:
    folder = tmp_path / "talk" / "train"  # the word in the folder's own name is no split
    (folder / "data").mkdir(parents=True)
    for name in ("data/train-00001.csv", "data/train-00000.csv", "dev.csv", "test.csv"):
        (folder / name).write_text(f"x\n{name}\n")
    assert [row["x"] for row in read(str(folder), ["x"])] == [
        "data/train-00000.csv",
        "data/train-00001.csv",
    ]
    assert read(str(folder), ["x"], split="validation") == [{"x": "dev.csv"}]
    (folder / "dev.csv").unlink()
    with pytest.raises(FileNotFoundError, match="no file for validation"):
        read(str(folder), ["x"], split="validation")


def test_a_folder_without_splits_is_to_train_on(tmp_path: Path) -> None:
    for name in ("a.txt", "b.csv", "notes.md"):
        (tmp_path / name).write_text("x\n1\n")
    assert [path.name for path in files(tmp_path, "train", ".txt")] == ["a.txt", "b.csv"]
    assert files(tmp_path, "validation") == []


def test_the_name_of_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "mrpc").mkdir()
    assert dataset("glue", "mrpc") == "glue:mrpc"
    assert dataset(str(tmp_path), "mrpc") == str(tmp_path / "mrpc")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*cola"):
        dataset(str(tmp_path), "cola")


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"x": ["a", "b"], "y": [1, 2]}), tmp_path / "a.parquet")
    assert read(str(tmp_path / "a.parquet"), ["x"]) == [{"x": "a"}, {"x": "b"}]


def test_a_library_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_text("")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source, says in (
        (str(tmp_path / "a.parquet"), "pip install pyarrow"),
        ("glue", "datasets"),
    ):
        with pytest.raises(ImportError, match=says):
            read(source, ["x"])
