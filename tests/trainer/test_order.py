"""Order of rows: its strategies, and lengths that are read from a dataset."""

from typing import Any

import numpy as np
import pytest

from zerojax import TrainingArguments
from zerojax.trainer.data import Epochs
from zerojax.trainer.order import grouped, order_of, row_lengths


def group_as_transformers(permutation: Any, lengths: Any, batch: int) -> list[int]:
    """``get_length_grouped_indices`` of transformers 5.24, with the permutation as an argument."""
    times = min(len(lengths) // (batch * 4), 50) or 1
    size = times * batch
    groups = [permutation[i : i + size].tolist() for i in range(0, len(lengths), size)]
    groups = [sorted(group, key=lambda i: lengths[i], reverse=True) for group in groups]
    longest = int(np.argmax([lengths[group[0]] for group in groups]))
    groups[0][0], groups[longest][0] = groups[longest][0], groups[0][0]
    return [i for group in groups for i in group]


@pytest.mark.parametrize(("rows", "batch"), [(7, 2), (100, 3), (100, 30), (1000, 2)])
def test_groups_are_those_of_transformers(rows: int, batch: int) -> None:
    rng = np.random.default_rng(rows)
    lengths, permutation = rng.integers(1, 9, rows), rng.permutation(rows)
    order = grouped(permutation, lengths, batch)
    assert order.tolist() == group_as_transformers(permutation, lengths, batch)
    assert sorted(order) == [*range(rows)]


def test_an_epoch_groups_rows_of_similar_length() -> None:
    rng = np.random.default_rng(0)
    dataset = [{"input_ids": [0] * int(n)} for n in rng.integers(1, 100, 90)]
    args = TrainingArguments("out", per_device_train_batch_size=2, group_by_length=True)
    assert args.train_sampling_strategy == "group_by_length"
    epochs = Epochs.of(dataset, args, 4)
    order = [[len(dataset[i]["input_ids"]) for i in epochs.indices(n)] for n in range(12)]
    assert sorted(len(lengths) for lengths in order) == [2] + [8] * 11
    assert order[0][0] == max(map(max, order))
    spread = [max(lengths) - min(lengths) for lengths in order[1:]]
    assert np.median(spread) < 60  # of 99 lengths; a mega-batch has two updates
    assert [*epochs.indices(12)] != [*epochs.indices(0)]


def test_the_order_of_the_dataset() -> None:
    args = TrainingArguments("out", train_sampling_strategy="sequential")
    epochs = Epochs.of([0] * 20, args, 1)
    assert [epochs.indices(n).tolist() for n in (0, 2, 3)] == [
        [*range(8)], [*range(16, 20)], [*range(8)],
    ]  # fmt: skip
    order = order_of("random", rows=5, seed=1, batch=2)
    assert [*order(0)] != [*order(1)]
    assert [*order(0)] == [*order_of("random", rows=5, seed=1, batch=2)(0)]


class Columns:
    """A dataset of columns, as ``datasets.Dataset``; no row is read."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self.column_names = columns, [*columns]

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def test_lengths_of_rows() -> None:
    ids = {"input_ids": [[1], [1, 2]]}
    assert row_lengths(Columns(**ids, n=[5, 6]), "n").tolist() == [5, 6]
    assert row_lengths(Columns(**ids), "n").tolist() == [1, 2]
    assert row_lengths([{"n": 3}, {"n": 4}], "n").tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"field n \(length_column_name\) or input_ids"):
        row_lengths([{"x": 1}], "n")
