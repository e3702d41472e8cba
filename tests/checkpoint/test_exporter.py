"""Parameters as safetensors: the numbers, the files, the memory, and what errors leave behind."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint import recorded
from checkpoint.states import KEY, create_nnx, filled, values, zero_of
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import zerojax
from zerojax.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpointError,
    saved,
)
from zerojax.checkpoint import record as records
from zerojax.checkpoint.exporter import export
from zerojax.checkpoint.naming import Renamed
from zerojax.weights import Tensor

ROOT = Path(__file__).parents[2]
GATHER = "stage3_gather_16bit_weights_on_model_save"


def tree(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    mesh = zerojax.mesh()
    rows = NamedSharding(mesh, PartitionSpec("data"))
    columns = NamedSharding(mesh, PartitionSpec(None, "data"))
    params = {
        "wte": jax.device_put(draw(57, 16), columns),
        "h": {"w": jax.device_put(draw(3, 16, 8), columns), "b": draw(3, 8)},
        "half": jax.device_put(draw(16, 3).astype(jnp.bfloat16), rows),
        "ids": jnp.arange(5),
        "scale": jnp.float32(2.5),
    }
    return {"params": params, "opt_state": draw(57, 16), "step": jnp.int32(1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, with records."""
    directory = tmp_path_factory.mktemp("steps")
    for step in (1, 2):
        recorded.save(directory, step, tree(step), extra={"n": step})
    return directory


def loaded(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def flat(seed: int) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree(seed)["params"])
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves
    }


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name, strict=True)


# What is written


def test_a_folder_of_steps_or_a_step(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    told = export(folder, tmp_path / "empty")
    assert told.files == ("model.safetensors",)
    assert told.tensors == 6
    assert told.nbytes == sum(x.nbytes for x in flat(2).values())
    assert told.dtypes == ("bfloat16", "float32", "int32")
    assert_same(loaded(tmp_path / "empty"), flat(2))
    export(folder, tmp_path / "a" / "b", step=1)
    assert_same(loaded(tmp_path / "a" / "b"), flat(1))
    export(folder / "1", tmp_path / "c")
    assert_same(loaded(tmp_path / "c"), flat(1))


def test_files_make_no_difference(folder: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    export(folder, tmp_path / "out", max_shard_size="1KB", progress=lambda *at: told.append(at))
    assert_same(loaded(tmp_path / "out"), flat(2))
    total = sum(x.nbytes for x in flat(2).values())
    assert len(told) >= 6
    assert told == sorted(told)
    assert told[-1] == (total, total)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = [*index["weight_map"].values()]
    assert files.count(index["weight_map"]["wte"]) == 1  # of 3,648 bytes, a file of its own


def test_a_map_of_names_and_a_config(folder: Path, tmp_path: Path) -> None:
    names = {"wte": "embed.weight", "{path:path}": "{path}"}
    export(folder, tmp_path / "out", names=names, config={"model_type": "mine"})
    expected = flat(2)
    expected["embed.weight"] = expected.pop("wte")
    assert_same(loaded(tmp_path / "out"), expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "mine"}
    with pytest.raises(CheckpointError, match="wpe is no parameter"):
        export(folder, tmp_path / "other", names={"wpe": "x", "{path:path}": "{path}"})


def layers(shapes: Any, extra: Any) -> Renamed:
    """Of stacked parameters a tensor for each layer."""
    names = {"h/{x}": Tensor("h.{x}.{layer}", "... -> layer ..."), "{path:path}": "{path}"}
    return Renamed(names, {"about.txt": f"{extra}"})


def by_layer(seed: int) -> dict[str, np.ndarray]:
    params = flat(seed)
    stacked = {name: params.pop(name) for name in ("h.w", "h.b")}
    return params | {f"{name}.{i}": x[i] for name, x in stacked.items() for i in range(3)}


def test_stacked_layers_apart(folder: Path, tmp_path: Path) -> None:
    told = export(folder, tmp_path / "out", names=layers, max_shard_size="1KB")
    assert_same(loaded(tmp_path / "out"), by_layer(2))
    assert told.tensors == 10
    assert (tmp_path / "out" / "about.txt").read_text() == "{'n': 2}"
    assert "about.txt" in told.files


@pytest.mark.slow
def test_what_the_checkpointer_saved_at_stage_3(tmp_path: Path) -> None:
    zero = zero_of(3)
    state = filled(zero.init(create_nnx, KEY))
    with Checkpointer(tmp_path / "in", zero) as checkpointer:
        checkpointer.save(1, state)
    export(tmp_path / "in", tmp_path / "out")
    expected = {name.removeprefix("0.").removesuffix(".value"): x
                for name, x in values(state).items()
                if name.startswith("0.") and "rngs" not in name}  # fmt: skip
    assert_same(loaded(tmp_path / "out"), expected)
    assert "norm.mean" in expected


# The dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", "float32"), ("bfloat16", "bfloat16"), ("fp16", "float16")],
)
def test_floats_are_cast_and_no_more(name: str, dtype: str, folder: Path, tmp_path: Path) -> None:
    export(folder, tmp_path / "out", dtype=name)
    expected = {n: x if n == "ids" else x.astype(jnp.dtype(dtype)) for n, x in flat(2).items()}
    assert_same(loaded(tmp_path / "out"), expected)


@pytest.mark.parametrize(
    ("config", "compute", "dtype"),
    [({GATHER: False}, "fp16", "float32"), ({GATHER: True}, None, "bfloat16")],
)
def test_the_runs_config_may_ask_for_16_bits(
    config: Any, compute: Any, dtype: str, tmp_path: Path
) -> None:
    recorded.save(tmp_path / "in", 1, tree(), config=config, compute_dtype=compute)
    export(tmp_path / "in", tmp_path / "out")
    assert loaded(tmp_path / "out")["wte"].dtype.name == dtype
    export(tmp_path / "in", tmp_path / "wide", dtype="float32")
    assert loaded(tmp_path / "wide")["wte"].dtype.name == "float32"


def test_an_overflow_is_named_and_infinity_is_not_one(tmp_path: Path) -> None:
    large = {"params": {"ok": jnp.asarray([jnp.inf, jnp.nan, 1e-9]), "big": jnp.asarray([1, -7e4])}}
    recorded.save(tmp_path / "in", 1, large)
    with pytest.raises(
        CheckpointError, match=r"params.big holds -70000, and float16 ends at 65504"
    ):
        export(tmp_path / "in", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    export(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    assert str(loaded(tmp_path / "out")["ok"][:2].tolist()) == "[inf, nan]"


# What goes wrong


def test_out_must_be_empty(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"not empty: choose another folder"):
        export(tmp_path / "nothing", tmp_path)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file is a file"):
        export(tmp_path / "nothing", tmp_path / "file")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/out cannot be written"):
        export(folder, tmp_path / "file" / "out")

    def mkdir(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "out")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(CheckpointError, match="Permission denied: 'out'; choose another folder"):
        export(folder, tmp_path / "out")


@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk(
    there: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, written = os.pwrite, list[int]()

    def full(file: int, data: Any, at: int) -> int:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(at)
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    if there:
        (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"No space left .* with 5,400 bytes free"):
        export(folder, tmp_path / "out")
    assert (tmp_path / "out").exists() == there
    assert not there or not [*(tmp_path / "out").iterdir()]


def test_a_wrong_number_is_found(tmp_path: Path) -> None:
    step = recorded.save(tmp_path / "in", 1, tree())
    leaves = records.read(saved.epath.Path(step)).leaves
    wrong = leaves["params.h.w"].model_copy(update={"checksum": 1})
    recorded.write(step, tree(), leaves=leaves | {"params.h.w": wrong})
    with pytest.raises(DamagedCheckpointError, match=r"params\.h\.w differs from what was saved"):
        export(tmp_path / "in", tmp_path / "a" / "out")
    assert not (tmp_path / "a").exists()


# Memory

MEASURED = """
import sys
import numpy as np
import safetensors.numpy
from zerojax.checkpoint.checksum import share
from zerojax.checkpoint.exporter import export

def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10

share(np.zeros(3, np.float32), (0,))
before = peak()
for dtype in ("float32", "bfloat16"):
    told = export(sys.argv[1], f"{sys.argv[2]}/{dtype}", max_shard_size="50MB", dtype=dtype)
    print(len(told.files), peak() - before)
"""


@pytest.mark.sweep
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak from")
def test_400_mb_take_less_than_two_files_of_50(tmp_path: Path) -> None:
    params = {f"w{i}": np.full((5, 2500, 1000), i, np.float32) for i in range(5)}
    params["wte"] = np.ones((50257, 750), np.float32)  # 151 MB, a file of its own
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:  # pytest would keep a gigabyte
        recorded.save(Path(folder) / "in", 1, {"params": params})
        run = [sys.executable, "-c", MEASURED, f"{folder}/in", f"{folder}/out"]
        told = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    wide, wide_growth, narrow, narrow_growth = map(int, told.stdout.split())
    assert (wide, narrow) == (6 + 1, 4 + 1)
    assert 0 < wide_growth <= narrow_growth < 2 * 50e6
