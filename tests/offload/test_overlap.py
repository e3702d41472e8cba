"""Reads for the next sub-group are under way while the one before is updated."""

import itertools
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from offload.training import BATCH, create, train_step, zero_for
from offload.watched_store import WatchedStore

from zerojax.offload.disk import file as disk_file

pytestmark = pytest.mark.usefixtures("quick_compile")

SECONDS = 20


def test_reads_span_the_update_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of sub-group k+1 are held until what the update of k has made is on the disk: a loop
    that reads before or after an update, and not during it, either waits for ever or holds none.
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
    held, late, read = set[str](), [], disk_file.read

    def holding(path: Path, nbytes: int) -> np.ndarray:
        key = files[path]
        if key in before and not written[before[key]].is_set():
            held.add(before[key])
            if not written[before[key]].wait(SECONDS):
                late.append(key)
        return read(path, nbytes)

    monkeypatch.setattr(disk_file, "read", holding)
    for _ in range(3):  # on a busy machine a write may be over before a thread begins to read
        written.clear()
        state, _ = step(state, BATCH)
        store.wait()
        if held == set(marks[:-1]):
            break
    assert not late, "the update waited for the reads of the next sub-group"
    assert held == set(marks[:-1]), "reads began after the update before them"
