"""Rows: their order, their reading, their forms."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import zerojax
from zerojax import TrainingArguments
from zerojax.trainer.data import Epochs, Reader, check, stacked


def epochs(rows: int, world: int = 2, **more: Any) -> Epochs:
    args = TrainingArguments("out", per_device_train_batch_size=4, **more)
    return Epochs.of([0] * rows, args, world)


def test_an_epoch_sees_every_row_once() -> None:
    made = epochs(20, num_train_epochs=2.5)
    assert (made.updates, made.steps, made.last) == (3, 8, 4)
    assert [len(made.indices(step)) for step in range(6)] == [8, 8, 4] * 2
    first = np.concatenate([made.indices(step) for step in range(3)])
    assert sorted(first) == [*range(20)]
    second = np.concatenate([made.indices(step) for step in range(3, 6)])
    assert list(second) != list(first)
    assert list(made.indices(4)) == list(epochs(20).indices(4))  # of seed and step alone


def test_drop_last_and_max_steps() -> None:
    assert epochs(20, dataloader_drop_last=True).updates == 2
    assert epochs(20, max_steps=2).last is None
    # As transformers counts: 12 batches of 8, five of them an update.
    made = epochs(100, dataloader_drop_last=True, gradient_accumulation_steps=5)
    assert (made.updates, made.read, made.last) == (3, 96, 16)
    assert [len(made.indices(step)) for step in range(3)] == [40, 40, 16]
    assert epochs(100, gradient_accumulation_steps=5).updates == 3
    assert epochs(20, max_steps=7).steps == 7
    assert list(epochs(20, data_seed=1).indices(0)) != list(epochs(20).indices(0))


def test_the_rows_of_an_update_that_count() -> None:
    reader = Reader([{"x": i} for i in range(20)], None, zerojax.mesh())
    full = reader.update(np.arange(8), 8)
    assert full.counts is None
    update = reader.update(np.array([5, 6, 7]), 8)
    assert update.batch["x"].tolist() == [5, 6, 7, 5, 6, 7, 5, 6]
    assert update.counts is not None
    assert update.counts.tolist() == [True] * 3 + [False] * 5
    assert (update.rows, full.rows) == (3, 8)


def padded(rows: list[Any]) -> dict[str, np.ndarray]:
    """Rows to the length of the longest."""
    longest = max(len(row["x"]) for row in rows)
    return {"x": np.stack([np.pad(row["x"], (0, longest - len(row["x"]))) for row in rows])}


def test_the_parts_of_a_batch_are_padded_to_one_length() -> None:
    lengths = [3, 4, 9, 2, 5, 5, 5, 5]
    reader = Reader([{"x": [1] * n} for n in lengths], padded, zerojax.mesh())
    parts = [reader.own(np.arange(4), slice(i, i + 2))["x"] for i in (0, 2)]
    np.testing.assert_array_equal(np.concatenate(parts), reader.batch(np.arange(4))["x"])
    assert {part.shape for part in parts} == {(2, 9)}


def test_a_part_of_a_batch_of_equal_rows_is_read_alone() -> None:
    read = []

    class Counted(list[Any]):
        def __getitem__(self, i: Any) -> Any:
            read.append(i)
            return super().__getitem__(i)

    reader = Reader(Counted([{"x": [i, i]} for i in range(8)]), padded, zerojax.mesh())
    reader.own(np.arange(4), slice(2, 4))  # the first batch shows that its rows are equal
    read.clear()
    assert reader.own(np.arange(4, 8), slice(0, 2))["x"].tolist() == [[4, 4], [5, 5]]
    assert read == [4, 5]


class Listed:
    """As ``datasets.Dataset``: many rows at once."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[Mapping[str, Any]]:
        return [{"x": [i, i], "text": "a", "words": ["b"], "none": None} for i in indices]


def test_a_dataset_that_gives_many_rows_is_asked_for_many() -> None:
    batches = [*Reader(Listed(), None, zerojax.mesh()).all(2)]
    assert [rows for rows, _ in batches] == [2, 2, 1]
    assert {name: x.tolist() for name, x in batches[1][1].items()} == {"x": [[2, 2], [3, 3]]}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"x": [1]}, {"x": [1, 2]}], r"x: rows of shapes \(1,\) and \(2,\): pad"),
        ([{"x": 1}, {"y": 1}], "some rows have no x"),
        ([(1, 2)], "a row is tuple, not a dict: pass data_collator"),
    ],
)
def test_rows_that_make_no_batch(rows: list[Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        stacked(rows)


def test_what_is_no_dataset() -> None:
    with pytest.raises(ValueError, match="eval_dataset is empty"):
        check("eval_dataset", [])
    with pytest.raises(TypeError, match="generator has no rows by number"):
        check("train_dataset", (x for x in ()))
    with pytest.raises(TypeError, match="dict has no rows by number"):
        check("eval_dataset", {"a": [1]})
    assert epochs(7).last == 7
    says = r"has 7 rows, fewer than the 8 .* 4 x 2 .* remove dataloader_drop_last"
    with pytest.raises(ValueError, match=says):
        epochs(7, dataloader_drop_last=True)
    text = Reader([{"x": "a"}], None, zerojax.mesh(), numbers_only=False)
    with pytest.raises(TypeError, match="the batch's x is <U1"):
        text.sample()
    with pytest.raises(TypeError, match="data_collator gave list"):
        Reader([{"x": 1}], lambda rows: rows, zerojax.mesh()).sample()  # type: ignore[arg-type]
