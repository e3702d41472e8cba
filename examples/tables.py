"""Rows with named columns, from local files or the `datasets` library.

>>> import tempfile
>>> file = tempfile.NamedTemporaryFile("w", suffix=".jsonl")
>>> _ = file.write('{"text": "to be", "label": 1}\\n'); file.flush()
>>> read(file.name, ["text", "label"])
[{'text': 'to be', 'label': 1}]
"""

import csv
import json
import pathlib
from collections.abc import Sequence
from typing import Any

SUFFIXES = (".json", ".jsonl", ".csv")


def read(source: str, columns: Sequence[str], *, split: str = "train") -> list[dict[str, Any]]:
    """The rows of a file, or of a split of a dataset.

    Args:
      source: A path that ends in .json or .jsonl (an object a line) or .csv (a header first), or a
        name for `datasets.load_dataset`, a configuration after a colon: `glue:mrpc`.
      columns: Those to keep, all of which each row must have.
      split: Of a dataset.

    Raises:
      FileNotFoundError: There is no such file.
      ValueError: A line is no object, a column is missing, or there are no rows.
      ImportError: A dataset is named, and `datasets` is not installed.
    """
    path = pathlib.Path(source)
    named = path.suffix not in SUFFIXES
    if not named and not path.is_file():
        raise FileNotFoundError(f"{source} does not exist")
    rows = (
        _dataset(source, split) if named else _csv(path) if path.suffix == ".csv" else _json(path)
    )
    for number, row in enumerate(rows, 1):
        if missing := [name for name in columns if row.get(name) is None]:
            has = ", ".join(map(str, row))
            raise ValueError(f"{source}: row {number} has no column {missing[0]!r}, only {has}")
    if not rows:
        raise ValueError(f"{source} has no rows")
    return [{name: row[name] for name in columns} for row in rows]


def _json(path: pathlib.Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}; an object a line is read") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is no object")
        rows += [row] if row else []
    return rows


def _csv(path: pathlib.Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _dataset(source: str, split: str) -> list[dict[str, Any]]:
    name, _, configuration = source.partition(":")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{source} is no {', '.join(SUFFIXES)} file; to load it as a dataset: "
            "pip install datasets"
        ) from error
    return list(load_dataset(name, configuration or None, split=split))
