"""Safetensors files written in blocks: what the library reads of them, and what an error leaves."""

import itertools
import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from zerojax.weights.writer import DTYPES, TensorSpec, writing

SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (4, 6), (3, 4, 5), (2, 1, 3, 2), (0, 3)]


def drawn(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def specs(arrays: dict[str, np.ndarray]) -> list[TensorSpec]:
    return [TensorSpec(name, x.shape, x.dtype) for name, x in arrays.items()]


def write(folder: pathlib.Path, arrays: dict[str, np.ndarray], **keywords: Any) -> None:
    with writing(folder, specs(arrays), **{"max_bytes": 10**9, **keywords}) as put:
        for name, x in arrays.items():
            put(name, x)


def names(folder: pathlib.Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name, strict=True)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if not d.startswith("float8")])
def test_the_library_reads_every_dtype(dtype: str, tmp_path: pathlib.Path) -> None:
    arrays = {"a": np.asarray([[0, 1], [2, 1]]).astype(getattr(ml_dtypes, dtype, dtype))}
    write(tmp_path, arrays)
    assert_same(load_file(tmp_path / "model.safetensors"), arrays)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_the_library_knows_dtypes_that_numpy_lacks(dtype: str, tmp_path: pathlib.Path) -> None:
    write(tmp_path, {"a": np.ones((3, 2), getattr(ml_dtypes, dtype))})
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.get_slice("a").get_dtype() == DTYPES[dtype]
        assert file.get_slice("a").get_shape() == [3, 2]


@pytest.mark.parametrize("step", [1, 2])
def test_blocks_come_in_any_order(step: int, tmp_path: pathlib.Path) -> None:
    arrays = drawn({f"x{i}": shape for i, shape in enumerate(SHAPES)}, ml_dtypes.bfloat16)
    blocks = [
        (name, start)
        for name, x in arrays.items()
        for start in itertools.product(*(range(0, n, step) for n in x.shape))
    ]
    np.random.default_rng(1).shuffle(blocks)
    with writing(tmp_path, specs(arrays), max_bytes=40) as put:
        for name, start in blocks:
            x = arrays[name]
            strides = [n // x.itemsize for n in x.strides]
            offset = sum(i * n for i, n in zip(map(int, start), strides, strict=True))
            put(name, x[tuple(slice(i, i + step) for i in start)], offset, strides)
    found: dict[str, np.ndarray] = {}
    for file in tmp_path.glob("*.safetensors"):
        found |= load_file(file)
    assert_same(found, arrays)


def test_files_are_filled_in_the_order_of_names(tmp_path: pathlib.Path) -> None:
    arrays = drawn({"h.10.w": (10,), "h.2.w": (10,), "h.2.b": (2,), "big": (100,), "z": (1,)})
    write(tmp_path, arrays, max_bytes=88)
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(tmp_path) == [*files, "model.safetensors.index.json"]
    assert [sorted(load_file(tmp_path / file)) for file in files] == [
        ["big"],
        ["h.10.w", "h.2.b", "h.2.w"],
        ["z"],
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in arrays.values())
    assert index["weight_map"] == {
        "big": files[0], "h.2.b": files[1], "h.2.w": files[1], "h.10.w": files[1], "z": files[2]
    }  # fmt: skip


def test_what_an_earlier_save_left_goes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.safetensors").write_text("")
    arrays = drawn({"a": (10,), "b": (10,)})
    write(tmp_path, arrays, max_bytes=40, texts={"config.json": "{}"})
    assert len(names(tmp_path)) == 5
    write(tmp_path, arrays)
    assert names(tmp_path) == ["config.json", "mine.safetensors", "model.safetensors"]
    write(tmp_path, arrays, max_bytes=40)
    assert "model.safetensors" not in names(tmp_path)


def test_an_error_leaves_the_folder_as_it_was(tmp_path: pathlib.Path) -> None:
    arrays = drawn({"a": (4, 3), "b": (2,)})
    write(tmp_path / "there", arrays)
    changed = arrays | {"a": arrays["a"] + 1}

    def interrupted(folder: pathlib.Path) -> None:
        with writing(folder, specs(changed), max_bytes=10) as put:
            put("a", changed["a"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "there")
    assert names(tmp_path / "there") == ["model.safetensors"]
    assert_same(load_file(tmp_path / "there" / "model.safetensors"), arrays)
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "a" / "b")
    assert names(tmp_path) == ["there"]


def test_a_tensor_that_was_not_written_completely_is_an_error(tmp_path: pathlib.Path) -> None:
    arrays = drawn({"a": (4, 3), "b": (2,)})
    with (
        pytest.raises(ValueError, match=r"a: 12 bytes were not written \(2 such tensors\)"),
        writing(tmp_path / "out", specs(arrays), max_bytes=10**6) as put,
    ):
        put("a", arrays["a"][1:], offset=3)
    assert not (tmp_path / "out").exists()
