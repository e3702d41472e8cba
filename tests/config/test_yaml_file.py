"""What is read from a YAML file, and what is refused."""

from pathlib import Path

import pytest

from zerojax.config import ConfigError, load
from zerojax.config.files import read_yaml, repeated


def read(folder: Path, text: bytes) -> object:
    path = folder / "a.yaml"
    path.write_bytes(text)
    return read_yaml(path)


def test_values_and_keys_that_are_given_twice(tmp_path: Path) -> None:
    value = read(tmp_path, b"a: 1\nb: {c: no, d: 1, c: 2}\na: 3\n")
    assert value == {"a": 3, "b": {"c": 2, "d": 1}}
    assert [problem.partition(":")[0] for problem in repeated(value)] == ["a", "b.c"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a: [\n", "not valid YAML at line 2, column 1"),
        (b"a: !!python/object:os.system {}", "could not determine a constructor"),
        (b"[" * 5000, "not a usable YAML file: maximum recursion"),
        (b"distributed_type: NO\n1: 2", "1: keys are strings; put it in quotes"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert says in str(error.value)
    assert str(error.value).startswith(str(path))
