"""Event files, read back by TensorBoard's own reader."""

import sys
import types

import pytest

from zerojax.monitor import tensorboard_file
from zerojax.monitor.tensorboard_file import TensorBoardFile

EVENTS = [
    ("Train/Samples/train_loss", 0.5, 8),
    ("Train/Samples/lr", 0.001, 8),
    ("Train/Samples/train_loss", float("inf"), 16),
]


def test_read_back(tmp_path):
    reason = "reads the files with tensorboard: pip install 'zerojax[monitor]'"
    module = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(module, reason=reason)
    folder = str(tmp_path / "run" / "job")
    for part in (EVENTS[:2], EVENTS[2:]):  # a run that was resumed: two files
        writer = TensorBoardFile(folder)
        writer.write(part)
        writer.close()
    found = reader.EventAccumulator(folder)
    found.Reload()
    read = {
        tag: [(e.step, e.tensor_proto.float_val[0]) for e in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
    }
    assert read == {
        "Train/Samples/train_loss": [(8, 0.5), (16, float("inf"))],
        "Train/Samples/lr": [(8, pytest.approx(0.001))],
    }


def test_flushes_once_a_second_at_most(tmp_path, monkeypatch):
    calls = []

    class Writer:
        def __init__(self, folder):
            calls.append(folder)

        def add_scalar(self, *event):
            calls.append(event)

        def flush(self):
            calls.append("flush")

        def close(self):
            calls.append("close")

    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", types.SimpleNamespace(Writer=Writer))
    now = [100.0]
    monkeypatch.setattr(tensorboard_file.time, "monotonic", lambda: now[0])
    writer = TensorBoardFile("folder")
    for event in EVENTS:
        now[0] += 0.6
        writer.write([event])
    writer.close()
    assert calls == ["folder", EVENTS[0], EVENTS[1], "flush", EVENTS[2], "close"]
