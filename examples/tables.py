"""Rows with named columns, from local files, folders of them, or the `datasets` library.

>>> import tempfile
>>> file = tempfile.NamedTemporaryFile("w", suffix=".jsonl")
>>> _ = file.write('{"text": "to be", "label": 1}\\n'); file.flush()
>>> read(file.name, ["text", "label"])
[{'text': 'to be', 'label': 1}]
"""

import csv
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
SPLITS = {"train": {"train", "training"}, "validation": {"validation", "valid", "val", "dev"}}
"""The words in a file's path that name its split, as `datasets` knows them."""


def dataset(name: str, configuration: str | None = None) -> str:
    """The source of `--dataset_name` and `--dataset_config_name`: a folder, or a name for
    `datasets` such as `glue:mrpc`.

    Raises:
      FileNotFoundError: The folder has no folder of that configuration.
    """
    folder = pathlib.Path(name)
    if not folder.is_dir():
        return f"{name}:{configuration}" if configuration else name
    if configuration and not (folder / configuration).is_dir():
        raise FileNotFoundError(f"--dataset_config_name: {folder / configuration} does not exist")
    return str(folder / (configuration or ""))


def files(folder: str | pathlib.Path, split: str, *more: str) -> list[pathlib.Path]:
    """The files of a split, in the order of their names: `train-00000-of-00002.parquet`,
    `data/dev.jsonl`. Where no name has a split, all are to train on.

    Args:
      more: Suffixes to read besides `SUFFIXES`.
    """
    found = sorted(p for p in pathlib.Path(folder).rglob("*") if p.suffix in (*SUFFIXES, *more))
    words = {p: {*re.split(r"[^a-z]+", str(p.relative_to(folder)).lower())} for p in found}
    named = {name: [p for p in found if words[p] & SPLITS[name]] for name in SPLITS}
    if not any(named.values()) and not any(words[p] & {"test", "testing"} for p in found):
        named["train"] = found
    return named[split]


def read(source: str, columns: Sequence[str], *, split: str = "train") -> list[dict[str, Any]]:
    """The rows of a file, or of a split of a folder or a dataset.

    Args:
      source: A path that ends in .json or .jsonl (an object a line), .csv (a header first) or
        .parquet, a folder of such files (`files`), or a name for `datasets.load_dataset`, a
        configuration after a colon: `glue:mrpc`.
      columns: Those to keep, all of which each row must have.
      split: Of a folder or a dataset: "train" or "validation".

    Raises:
      FileNotFoundError: There is no such file, or the folder has none of that split.
      ValueError: A line is no object, a column is missing, or there are no rows.
      ImportError: A file or a dataset needs a library that is not installed.
    """
    path = pathlib.Path(source)
    if path.is_dir():
        of_split = files(path, split)
        if not of_split:
            raise FileNotFoundError(
                f"{source} has no file for {split}: {' or '.join(SUFFIXES)}, with "
                f"{' or '.join(sorted(SPLITS[split]))} in its name"
            )
        return [row for file in of_split for row in read(str(file), columns)]
    named = path.suffix not in SUFFIXES
    if not named and not path.is_file():
        raise FileNotFoundError(f"{source} does not exist")
    readers = {".csv": _csv, ".parquet": _parquet}
    rows = _dataset(source, split) if named else readers.get(path.suffix, _json)(path)
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


def _parquet(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"to read {path}: pip install pyarrow") from error
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def _dataset(source: str, split: str) -> list[dict[str, Any]]:
    name, _, configuration = source.partition(":")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{source} is neither a folder nor a {', '.join(SUFFIXES)} file; to load it as a "
            "dataset: pip install datasets"
        ) from error
    return list(load_dataset(name, configuration or None, split=split))
