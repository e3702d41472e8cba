"""Rows from files: what is read, and what is refused by name."""

from pathlib import Path

import pytest

from examples.tables import read


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
