"""What is read from a YAML file, and what is refused."""

import json
import os
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated import mutated

from zerojax.config import ConfigError, load
from zerojax.config.text_file import repeated
from zerojax.config.yaml_file import read_yaml

# Each line doubles what stands above; 800 bytes for more values than any memory holds.
BILLIONS = b"a0: &a0 {x: 1}\n" + b"".join(
    b"a%d: &a%d {x: *a%d, y: *a%d}\n" % (i, i, i - 1, i - 1) for i in range(1, 34)
)


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


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_what_is_no_file(tmp_path: Path, name: str) -> None:
    """A pipe, which nobody writes to, blocks who opens it."""
    os.mkfifo(tmp_path / name)
    for path in (tmp_path / name, tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="a pipe, a device or a folder"):
            load(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a: [\n", "not valid YAML at line 2, column 1"),
        (b"a: b: c", "not valid YAML at line 1, column 5"),
        (b"a: !!python/object:os.system {}", "could not determine a constructor"),
        (b"--- 1\n--- 2", "but found another document"),
        (b"? {a: 1}\n: 2", "unhashable"),
        (
            b"a: &x [*x]",
            "its aliases (*name) stand for more than 100,000 values, or for themselves",
        ),
        (BILLIONS, "its aliases (*name) stand for more than 100,000 values"),
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


YAML = {
    "distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_machines": 1,
    "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 1.0, "offload_param_device": "cpu"},
}  # fmt: skip
JSON = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": True}
}  # fmt: skip
LETTERS = ["&a ", "*a", "<<: ", "? ", ": ", "- ", "\n", *"[]{}%\0'\"9", "|\n", "!!"]


@st.composite
def texts(draw: Callable[..., Any]) -> tuple[str, str]:
    """A config with one value changed, as YAML or JSON, with a few letters put in."""
    if draw(st.booleans()):
        ending, text = "yaml", yaml.safe_dump(mutated(YAML, draw))
    else:
        ending, text = "json", json.dumps(mutated(JSON, draw))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(LETTERS)) + text[at:]
    return ending, text


@given(texts())
@settings(max_examples=100)
def test_any_text_is_read_or_refused(written: tuple[str, str]) -> None:
    """By lines that name the file, in little memory."""
    ending, text = written
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a.{ending}")
        path.write_bytes(text.encode(errors="surrogatepass"))
        said = str(path)
        tracemalloc.start()
        try:
            load(path)
        except ConfigError as error:
            said = str(error)
        finally:
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert said.startswith(str(path))
    assert all(len(line) < 1000 for line in said.splitlines())
    assert most < 200e6
