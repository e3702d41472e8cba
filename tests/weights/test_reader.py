"""Headers and indices that are not as safetensors writes them: the right tensors, or one error."""

import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest
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
        ("a\0b", "which is not there"),
        ("n" * 5000, "which is not there"),
        ("absent.safetensors", "which is not there"),
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
