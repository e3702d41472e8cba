"""Steps read from their files: whoever wrote them, and what is said where there are none."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint.recorded import save, tree, write
from orbax.checkpoint import v1

from zerojax.checkpoint import DamagedCheckpointError
from zerojax.checkpoint.saved import SavedStep, find
from zerojax.checkpoint.steps_folder import folders

STATE = {
    "params": {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(3, jnp.bfloat16)},
    "opt_state": [{"mu": jnp.zeros(4)}, None, {}],
    "step": jnp.int32(3),
}


def manager(path: Path) -> None:
    with ocp.CheckpointManager(path) as made:
        made.save(5, args=ocp.args.StandardSave(STATE))


def standard(path: Path) -> None:
    with ocp.StandardCheckpointer() as made:
        made.save(path / "5", STATE)


def pytree(**keywords: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**keywords)) as made:
            made.save(path / "5", args=ocp.args.PyTreeSave(STATE))

    return write


def v1_steps(path: Path) -> None:
    with v1.training.Checkpointer(path) as made:
        made.save(5, STATE)


def fixed_length(path: Path) -> None:
    options = ocp.CheckpointManagerOptions(step_format_fixed_length=8)
    with ocp.CheckpointManager(path, options=options) as made:
        made.save(5, args=ocp.args.StandardSave(STATE))


def ours(path: Path) -> None:
    save(path, 5, STATE)


WRITERS = {
    "manager": manager,
    "standard": standard,
    "zarr": pytree(use_ocdbt=False),
    "compressed": pytree(use_compression=True),
    "v1 steps": v1_steps,
    "fixed length": fixed_length,
    "ours": ours,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_whoever_wrote_it(tmp_path: Path, writer: str) -> None:
    WRITERS[writer](tmp_path)
    assert [*folders(tmp_path)] == [5]
    folder = folders(tmp_path)[5]
    for saved in find(tmp_path), find(tmp_path, 5), find(folder), SavedStep(folder):
        assert (saved.record is None) == (writer != "ours")
        leaves = {leaf.name: leaf for leaf in saved.arrays()}
        assert [*leaves] == ["opt_state.0.mu", "params.b", "params.w", "step"]
        assert leaves["opt_state.0.mu"].path == ("opt_state", "0", "mu")
        assert (leaves["params.w"].shape, leaves["params.w"].dtype) == ((3, 4), np.float32)
        assert (leaves["params.b"].dtype, leaves["params.b"].bytes) == (jnp.bfloat16, 6)
        assert leaves["step"].shape == ()
        np.testing.assert_array_equal(saved.read("params.w"), STATE["params"]["w"], strict=True)
        np.testing.assert_array_equal(saved.read("params.w", np.s_[1:, 2]), [6, 10])
        assert saved.read("step") == 3


@pytest.mark.parametrize("at_most", [100, 999, 10**6])
@pytest.mark.parametrize("compressed", [False, True])
def test_blocks_add_up(tmp_path: Path, at_most: int, compressed: bool) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_compression=compressed)
    with ocp.Checkpointer(handler) as made:
        made.save(tmp_path / "5", args=ocp.args.PyTreeSave(tree()))
    saved = find(tmp_path)
    for leaf in saved.arrays():
        whole = saved.read(leaf.name)
        got, seen = np.zeros_like(whole), np.zeros(whole.shape, int)
        cut = 8 if leaf.name in ("params.wide", "params.half") else 1
        least = leaf.bytes // cut if compressed else leaf.dtype.itemsize
        for start, block in saved.blocks(leaf.name, at_most):
            index = tuple(slice(i, i + n) for i, n in zip(start, block.shape, strict=True))
            got[index] = block
            seen[index] += 1
            assert block.nbytes <= max(at_most, least)
        assert (seen == 1).all()
        assert got.tobytes() == whole.tobytes()
    n = len([*saved.blocks("params.wide", at_most)])  # 64 rows of 96 bytes, in chunks of 8
    assert n == ({100: 8, 999: 8} if compressed else {100: 64, 999: 7}).get(at_most, 1)


def without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


def rewritten(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Edits orbax's metadata and makes a record that agrees with it."""

    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
        write(folder, STATE)

    return edit


METADATA = "state/_METADATA"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without(METADATA), f"{METADATA} is missing"),
        (without(METADATA, "zerojax.json"), "holds no arrays"),
        (rewritten(METADATA, '"key": "w"', '"key": "u"'), "params.u was not saved"),
    ],
)
def test_damage(tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    folder = save(tmp_path, 5, STATE)
    find(tmp_path)
    damage(folder)
    with pytest.raises(DamagedCheckpointError, match=re.escape(says)):
        find(tmp_path)


def test_a_chunk_that_is_lost(tmp_path: Path) -> None:
    """It does not read as zeros, unless that is how orbax writes zeros."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as made:
        made.save(tmp_path / "5", args=ocp.args.PyTreeSave(STATE))
    (tmp_path / "5" / "params.w" / "0.0").unlink()
    saved = find(tmp_path)
    for access in saved.read, lambda name: [*saved.blocks(name)]:
        with pytest.raises(DamagedCheckpointError, match=r"params\.w cannot be read"):
            access("params.w")
    metadata = tmp_path / "5" / "_METADATA"
    stored = '"store_array_data_equal_to_fill_value": '
    metadata.write_text(metadata.read_text().replace(f"{stored}true", f"{stored}false"))
    assert not find(tmp_path).read("params.w").any()
