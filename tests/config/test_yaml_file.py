"""What is read from a YAML file, and what is refused."""

from pathlib import Path

import pytest

from zerojax.config import ConfigError, load
from zerojax.config.text_file import repeated
from zerojax.config.yaml_file import read_yaml

CPU = {"device": "cpu"}


def read(folder: Path, text: bytes) -> object:
    path = folder / "a.yaml"
    path.write_bytes(text)
    return read_yaml(path)


def test_values_and_keys_that_are_given_twice(tmp_path: Path) -> None:
    value = read(tmp_path, b"a: 1\nb: {c: no, d: 1, c: 2}\na: 3\n")
    assert value == {"a": 3, "b": {"c": 2, "d": 1}}
    assert [problem.partition(":")[0] for problem in repeated(value)] == ["a", "b.c"]


def test_aliases_of_a_few_values(tmp_path: Path) -> None:
    text = b"a: &a {device: cpu}\nb: *a\nc: [*a, *a]"
    assert read(tmp_path, text) == {"a": CPU, "b": CPU, "c": [CPU, CPU]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a: [\n", "not valid YAML at line 2, column 1"),
        (b"a: b: c", "not valid YAML at line 1, column 5"),
        (b"a: !!python/object:os.system {}", "could not determine a constructor"),
        (b"--- 1\n--- 2", "but found another document"),
        (b"? {a: 1}\n: 2", "unhashable"),
        (b"\x00\x01", "unacceptable character"),
        (b"\xff\xfe\xfa", "not a text file"),
        (b"[" * 5000, "not a usable YAML file: maximum recursion"),
        (b"- a", 'expected an object, got ["a"]'),
        (b"", "expected an object, got null"),
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


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "default_config.yaml")
