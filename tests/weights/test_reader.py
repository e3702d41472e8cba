"""Headers and indices that are not as safetensors writes them: the right tensors, or one error."""

import json
import os
import pathlib
import tempfile
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated import mutated
from safetensors.numpy import save, save_file

from zerojax.weights.reader import open_tensors
from zerojax.weights.writer import INDEX, SINGLE

TENSORS = {"a": np.arange(4, dtype=np.float32).reshape(2, 2), "b.c": np.arange(3, dtype=np.int8)}
GOOD = save(TENSORS, {"format": "pt"})
LENGTH = int.from_bytes(GOOD[:8], "little")
HEADER, DATA = json.loads(GOOD[8 : 8 + LENGTH]), GOOD[8 + LENGTH :]
DEEP = "[" * 10**5 + "]" * 10**5


def file_of(header: str, data: bytes = DATA) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + data


def with_a(**changes: Any) -> bytes:
    return file_of(json.dumps(HEADER | {"a": HEADER["a"] | changes}))


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    with open_tensors(path) as tensors:
        return {name: x.read(np.empty(x.shape, x.dtype)) for name, x in tensors.items() if x.dtype}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (file_of(DEEP), "invalid JSON"),
        (with_a(shape=[-2, -2]), "invalid value: integer `-2`"),
        (with_a(data_offsets=[0, 12]), "invalid shape, data type, or offset"),
        (file_of(json.dumps(HEADER), DATA[:-1]), "not fully covered"),
        (b"\xff" * 8 + DATA, "header too large"),
    ],
)  # fmt: skip
def test_a_header_that_no_writer_writes(data: bytes, says: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / SINGLE
    file.write_bytes(data)
    for path in (file, tmp_path):
        named = rf"model.safetensors \(\d+ bytes\) .*{says}"
        with pytest.raises(ValueError, match=named) as raised:
            read(path)
        assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("../secret.safetensors", "outside of the folder"),
        ("{parent}/secret.safetensors", "outside of the folder"),
        ("", "outside of the folder"),
        ("a\0b", "which is not in the folder"),
        ("n" * 5000, "File name too long"),
        ("absent.safetensors", "which is not in the folder"),
    ],
)
def test_an_index_stays_in_its_folder(named: str, says: str, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "secret.safetensors")
    places = dict.fromkeys(TENSORS, named.replace("{parent}", str(tmp_path)))
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises((ValueError, FileNotFoundError), match=says) as raised:
        read(folder)
    assert str(folder / INDEX) in str(raised.value)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("text", [DEEP, '{"a": NaN', "[]"])
def test_an_index_that_is_none(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=rf"{INDEX}: not JSON"):
        read(tmp_path)
    os.remove(tmp_path / INDEX)
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(FileNotFoundError, match="has neither"):
        read(tmp_path)


def test_files_may_be_links_to_a_cache(tmp_path: pathlib.Path) -> None:
    """As ``huggingface_hub`` lays a snapshot out."""
    folder = tmp_path / "snapshots"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "blob")
    (folder / "model-00001-of-00001.safetensors").symlink_to(tmp_path / "blob")
    places = dict.fromkeys(TENSORS, "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    np.testing.assert_array_equal(read(folder)["a"], TENSORS["a"])


HOSTILE: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([
        None, True, -1, 2**31, 2**63, 10**400, 0.5, 1e400, float("nan"), "", "22", "F32", "../x",
        "x" * 10**5, [], {}, [2.9, 2.9], [0], [0, 0], [0, 2**62], [2**62, 2**62], [1] * 10**5,
    ]),
    st.integers(), st.text(max_size=8),
    st.lists(st.integers(-1, 20), max_size=3),
)  # fmt: skip


@st.composite
def changed_trees(draw: Callable[..., Any], good: Any) -> str:
    """A good JSON with some values changed, removed, renamed; as text, perhaps a letter off."""
    tree = good
    for _ in range(draw(st.integers(1, 3))):
        tree = mutated(tree, draw, HOSTILE)
    text = json.dumps(tree)
    if draw(st.booleans()):
        where = draw(st.integers(0, len(text) - 1))
        letter = draw(st.sampled_from(['"', "{", "[", "]", "9", "\0", ""]))
        text = text[:where] + letter + text[where:]
    return text


@st.composite
def damaged_files(draw: Callable[..., Any]) -> bytes:
    """A good file with another header, or with bytes changed, added or cut off."""
    if draw(st.booleans()):
        return file_of(draw(changed_trees(HEADER)))
    data = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 3))):
        data[draw(st.integers(0, 7 + LENGTH))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) + draw(st.binary(max_size=9))


def outcome(path: pathlib.Path) -> None:
    """What is read has the bytes of the good file, or there is one error that names the file."""
    tracemalloc.start()
    said, found = str(path), dict[str, np.ndarray]()
    try:
        found = read(path)
    except (ValueError, FileNotFoundError) as error:
        said = str(error)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(path) in said
    assert "\n" not in said
    assert len(said) < 1500
    good = {x.tobytes() for x in TENSORS.values()}
    # A renamed tensor, or one in another shape of the same size, is the model's to refuse.
    assert {x.tobytes() for x in found.values()} <= good | {DATA, b""}
    assert most < 200e6


@given(damaged_files())
@settings(max_examples=80)
def test_any_damaged_file_is_read_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, SINGLE)
        file.write_bytes(data)
        outcome(file)


@given(changed_trees({"metadata": {"total_size": 19}, "weight_map": dict.fromkeys(TENSORS, "w")}))
@settings(max_examples=50)
def test_any_damaged_index_is_read_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "w").write_bytes(GOOD)
        pathlib.Path(folder, INDEX).write_text(text)
        outcome(pathlib.Path(folder))
