"""Which disk a state is put on, and whether it has the room."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from offload.training import BATCH, create, train_step

import zerojax
from zerojax.offload.disk import folder as disk_folder
from zerojax.offload.disk.array import DiskArray
from zerojax.offload.disk.folder import DiskError

pytestmark = pytest.mark.usefixtures("quick_compile")


def nvme(path: Path, **keywords: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": str(path), "buffer_count": 2, **keywords}


def zero_of(optimizer: Any, param: Any) -> zerojax.Zero:
    return zerojax.zero(
        stage=3,
        bf16=True,
        stage3_param_persistence_threshold=0,
        mesh=zerojax.mesh(2),
        sub_group_size=220,
        offload_optimizer=optimizer,
        offload_param=param,
    )


def sizes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("zerojax-*/0*"))


def test_each_section_has_its_own_disk(tmp_path: Path) -> None:
    results = []
    for apart in (False, True):
        first, second = tmp_path / f"first {apart}", tmp_path / f"second {apart}"
        first.mkdir()
        second.mkdir()
        zero = zero_of(nvme(first), nvme(second if apart else first, max_in_cpu=0))
        step, state = zero(train_step), zero.init(create)
        for _ in range(2):
            state, _ = step(state, BATCH)
        results.append([np.asarray(x) for x in jax.tree.leaves(state)])
        zero.states.placer.store.wait()
        zero.states.placer.copies_store.wait()
        assert all(isinstance(x, DiskArray) for x in jax.tree.leaves(state.params))
        low = sum(2 * x.size for x in jax.tree.leaves(state.params))
        expected = (6 * low, low) if apart else (7 * low, 0)
        assert (sizes(first), sizes(second)) == expected
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("optimizer", ["nvme", "cpu"])
def test_the_second_path_is_looked_at_before_any_work(tmp_path: Path, optimizer: str) -> None:
    where = nvme(tmp_path) if optimizer == "nvme" else "cpu"
    zero = zero_of(where, nvme(tmp_path / "none", max_in_cpu=0))
    with pytest.raises(DiskError, match=rf"nvme_path {tmp_path}/none does not exist"):
        zero.init(create)


@pytest.mark.parametrize(("param", "fits"), [(None, True), ({"max_in_cpu": 0}, False)])
def test_room_for_the_copies_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, param: Any, fits: bool
) -> None:
    """Of 960 parameters: 11,520 bytes for masters and moments, 1,920 to compute with."""
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(disk_folder.shutil, "disk_usage", lambda path: usage(12_000))
    zero = zero_of(nvme(tmp_path), None if param is None else nvme(tmp_path, **param))
    if fits:
        zero.init(create)
        return
    with pytest.raises(DiskError, match=r"has 0.012 MB free, and the state needs 0.0134 MB"):
        zero.init(create)
