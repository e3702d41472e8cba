"""Datasets without a length: their updates, passes, skipped rows, and what is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zerojax
from zerojax import TrainingArguments
from zerojax.trainer.data import Epochs, Reader, check, is_stream


class Numbers:
    """Rows 0 to n - 1; remembers the passes and how many rows were read."""

    def __init__(self, n: int) -> None:
        self.n, self.passes, self.read = n, list[int](), 0

    def set_epoch(self, number: int) -> None:
        self.passes.append(number)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(self.n):
            self.read += 1
            yield {"x": i, "text": "a"}


def reader(stream: Any, multiple: int = 1) -> Reader:
    return Reader(stream, None, zerojax.mesh(), multiple=multiple)


EPOCHS = Epochs.of(Numbers(20), TrainingArguments("out", max_steps=9), 1)


def rows_of(update: Any) -> list[int]:
    counts = slice(None) if update.counts is None else update.counts
    return [int(x) for x in update.batch["x"][counts]]


def test_updates_of_passes() -> None:
    assert (EPOCHS.steps, EPOCHS.batch, EPOCHS.last) == (9, 8, None)
    stream = Numbers(20)
    updates = [next(reader(stream).updates(EPOCHS, n)) for n in (0, 2, 3)]
    assert [*map(rows_of, updates)] == [[*range(8)], [*range(16, 20)], [*range(8)]]
    assert [update.rows for update in updates] == [8, 4, 8]
    stream.passes.clear()
    in_order, read = reader(stream).updates(EPOCHS, 3), stream.read
    assert [rows_of(next(in_order))[0] for _ in range(4)] == [0, 8, 16, 0]
    assert (stream.passes, stream.read - read) == ([0, 1, 2], 48)  # each row once
    assert rows_of(next(reader(stream).updates(EPOCHS, 1))) == [*range(8, 16)]


def test_rows_beyond_the_last_micro_batch_are_dropped() -> None:
    dropping = reader(Numbers(23), multiple=4).updates(EPOCHS)
    assert [len(rows_of(next(dropping))) for _ in range(4)] == [8, 8, 4, 8]
    with pytest.raises(ValueError, match="fewer rows than the 32 of a micro-batch"):
        next(reader(Numbers(23), multiple=32).updates(EPOCHS))
    with pytest.raises(ValueError, match="fewer rows than one"):
        reader(Numbers(0)).sample()


def test_all_rows_and_a_sample() -> None:
    batches = [*reader(Numbers(20)).all(8)]
    assert [rows for rows, _ in batches] == [8, 8, 4]
    assert np.asarray(batches[2][1]["x"]).tolist() == [16, 17, 18, 19]
    assert [rows for rows, _ in reader(Numbers(20)).all(8, limit=10)] == [8, 2]
    assert reader(Numbers(20)).sample()["x"].tolist() == [0]


def test_what_is_a_stream() -> None:
    assert check("train_dataset", Numbers(3)) == 0
    assert not any(map(is_stream, ([1], {"a": 1}, iter([1]), (x for x in ()), 3)))
    with pytest.raises(ValueError, match="Numbers has no length: set max_steps"):
        Epochs.of(Numbers(3), TrainingArguments("out"), 1)


def test_datasets_of_grain() -> None:
    grain = pytest.importorskip("grain")
    numbers = grain.MapDataset.range(20).map(lambda i: {"x": i})
    assert not is_stream(numbers)
    sequential = TrainingArguments("out", train_sampling_strategy="sequential")
    made = reader(numbers)
    assert rows_of(next(made.updates(Epochs.of(numbers, sequential, 1), 2))) == [16, 17, 18, 19]
    assert rows_of(next(reader(numbers.to_iter_dataset()).updates(EPOCHS, 3))) == [*range(8)]
