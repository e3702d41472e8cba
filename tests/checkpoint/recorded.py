"""Small steps on disk, made of plain orbax and a record, with arrays of every kind."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.checkpoint import record as records
from zerojax.checkpoint import state_tree
from zerojax.checkpoint.checksum import checksum, share
from zerojax.checkpoint.record import LeafRecord, Record
from zerojax.checkpoint.saved import STATE, SavedArrays


def tree(seed: int = 0) -> dict[str, Any]:
    """No element of it is zero, so that a chunk that is lost cannot pass for one that is there."""
    rng = np.random.default_rng(seed)
    cut = NamedSharding(zerojax.mesh(), PartitionSpec("data"))

    def made(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.asarray(rng.integers(1, 7, shape).astype(np.float32) / 8, dtype)

    return {
        "params": {
            "wide": jax.device_put(made((64, 24), jnp.float32), cut),
            "half": jax.device_put(made((16, 5), jnp.bfloat16), cut),
            "narrow": made((11,), jnp.float8_e4m3fn),
        },
        "opt_state": [{"mu": made((64, 24), jnp.float32), "none": None}, {}],
        "step": jnp.int32(seed + 5),
        "key": jax.random.key(seed + 1),
        "int4": jnp.asarray(rng.integers(1, 7, 9), jnp.int4),
        "mask": jnp.asarray([True, True, True]),
        "waves": made((3,), jnp.complex64) * (1 + 2j),
        "numpy": rng.normal(size=4),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps that are not to be changed."""
    directory = tmp_path_factory.mktemp("made")
    for step in (90, 100):
        save(directory, step, tree(step))
    return directory


@pytest.fixture
def steps(made: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(made, tmp_path / "steps"))


def save_plain(directory: Path, step: int, saved: Any, **keywords: Any) -> Path:
    """By orbax alone, as zerojax has it write; returns the step's folder."""
    handlers = {STATE: ocp.PyTreeCheckpointHandler(use_compression=False)}
    with ocp.CheckpointManager(directory, item_handlers=handlers) as manager:
        args = ocp.args.PyTreeSave(saved, **keywords)
        manager.save(step, args=ocp.args.Composite(**{STATE: args}))
    return directory / str(step)


def save(directory: Path, step: int, saved: Any, **keywords: Any) -> Path:
    """The same with a record."""
    folder = save_plain(directory, step, saved, custom_metadata=records.MARK)
    write(folder, saved, **keywords)
    return folder


def write(
    folder: Path, saved: Any, max_bytes: int = records.FULL_DIGEST_BYTES, **fields: Any
) -> Record:
    """Writes the record of a step that is there; files of more than ``max_bytes`` get no digest."""
    record = Record(
        **{
            "step": int(folder.name),
            "saved": "2026-01-02T03:04:05+00:00",
            "versions": {"zerojax": "0.1.0", "jax": "0.10.2"},
            "form": "linen",
            "stage": 2,
            "compute_dtype": "bfloat16",
            "mesh": {"data": 8},
            "axis": "data",
            "devices": "NVIDIA H100",
            "processes": 1,
            "config": {"stage": 2},
            "leaves": {name: _leaf(x) for name, x in state_tree.arrays_by_name(saved).items()},
            "files": records.files(epath.Path(folder), max_bytes),
            "metrics": {"loss": 2.5},
            "extra": None,
            **fields,
        }
    )
    records.write(epath.Path(folder), record)
    return record


def _leaf(x: Any) -> LeafRecord:
    sharding = getattr(x, "sharding", None)
    return LeafRecord(
        shape=x.shape,
        dtype=str(x.dtype),
        spec=[*sharding.spec] if isinstance(sharding, NamedSharding) else None,
        checksum=share(x) if isinstance(x, np.ndarray) else int(checksum(x)),
    )


def read(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every array bit for bit, whatever the record says."""
    arrays = SavedArrays(folder)
    found = {name: arrays.read(name) for name in arrays.names}
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in found.items()}


def flip(file: Path, at: int, mask: int = 1) -> None:
    """Changes bits of one byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= mask
    file.write_bytes(data)
