"""Loading at stage 3, small: every byte once."""

import pathlib

import pytest

from benchmarks.weights import COUNTING, measure, table, write


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.usefixtures("quick_compile")
def test_a_small_llama(scan: bool, tmp_path: pathlib.Path) -> None:
    write(tmp_path, "llama-tiny")
    loaded = measure(str(tmp_path), "llama-tiny", scan)
    assert loaded.tensors <= loaded.read <= loaded.files + COUNTING
    assert loaded.shards >= loaded.tensors
    assert len(table([loaded])) == 2
