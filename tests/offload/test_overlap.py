"""Reads for the next sub-group are under way while the one before is updated."""

import itertools
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from groups import LIMIT
from offload.training import BATCH, create, train_step, zero_for
from offload.watched_store import WatchedStore

from zerojax.offload.disk import file as disk_file

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow
def test_reads_span_the_update_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the update of sub-group k has made is not written before a read of k+1 has begun, and
    that read does not go on before it is written: a loop that reads before or after an update, and
    not during it, would wait for ever.
    """
    issued: list[tuple[str, str]] = []
    written: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def event(kind: str, key: str) -> None:
        what, when_ = kind.split()
        if when_ == "issued":
            issued.append((what, key))
        elif what == "write":
            written[key].set()

    zero = zero_for(tmp_path)
    store = zero.states.placer._store = WatchedStore(tmp_path, event)
    step, state = zero(train_step), zero.init(create)
    for _ in range(2):  # the first one reads all parameters besides, to compute with
        issued.clear()
        state, _ = step(state, BATCH)
        store.wait()
    runs = [[key for _, key in run] for _, run in itertools.groupby(issued, key=lambda e: e[0])]
    reads = [key for run in runs[::2] for key in run]
    first = set(runs[1])  # what is written first
    groups = [first, set(runs[0]) - first, *map(set, runs[2::2])]
    assert len(groups) > 3
    assert all(groups)
    assert sum(map(len, groups)) == len(reads) == len(set(reads))
    marks = [min(group) for group in groups]
    before = {k: mark for mark, group in zip(marks, groups[1:], strict=False) for k in group}
    files = {store._blocks[key].file: key for key in reads}
    begun = {mark: threading.Event() for mark in marks[:-1]}
    alone: list[str] = []
    read, write = disk_file.read, disk_file.write

    def together(key: str, other: threading.Event, what: str) -> None:
        if not alone and not other.wait(LIMIT):
            alone.append(f"{what} {key}")

    def reading(path: Path, nbytes: int) -> np.ndarray:
        if (key := files[path]) in before:
            begun[before[key]].set()
            together(key, written[before[key]], "the update waited for the read of")
        return read(path, nbytes)

    def writing(path: Path, data: np.ndarray) -> None:
        if (key := files[path]) in begun:
            together(key, begun[key], "no read began before the end of the write of")
        write(path, data)

    monkeypatch.setattr(disk_file, "read", reading)
    monkeypatch.setattr(disk_file, "write", writing)
    written.clear()
    step(state, BATCH)
    store.wait()
    assert not alone
    assert all(each.is_set() for each in begun.values())
