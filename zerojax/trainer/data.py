"""Rows of a dataset as batches: which rows, read by which process, and how they become arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.devices.rows import BatchRows, process_rows
from zerojax.trainer.arguments import TrainingArguments

Batch: TypeAlias = dict[str, Any]


class Dataset(Protocol):
    """A list of rows, Hugging Face's ``datasets.Dataset``, grain's ``MapDataset``, ..."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Collator: TypeAlias = Callable[[list[Any]], Mapping[str, Any]]
"""From rows to a batch: arrays by name, the rows first."""


def check(name: str, dataset: Any) -> int:
    """The number of rows.

    Raises:
      ValueError, TypeError: The dataset is empty, or has no length or no rows by number.
    """
    has = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not has or isinstance(dataset, Mapping):
        raise TypeError(
            f"{name}: {type(dataset).__name__} has no rows by number and no length, which a run "
            "needs to go on where it stopped: pass a list, a datasets.Dataset or a grain.MapDataset"
        )
    if not len(dataset):
        raise ValueError(f"{name} is empty: pass at least one row")
    return len(dataset)


class Epochs(NamedTuple):
    """How a dataset becomes updates.

    Attributes:
      rows: Of the dataset.
      batch: Rows of an update, over all devices and micro-batches.
      updates: Of an epoch.
      steps: Of the run.
      seed: Of the order.
    """

    rows: int
    batch: int
    updates: int
    steps: int
    seed: int

    @classmethod
    def of(cls, dataset: Any, args: TrainingArguments, world: int) -> Epochs:
        """Updates as transformers counts them; of no rows where there is no dataset.

        Raises:
          ValueError: There are fewer rows than an update has.
        """
        batch = world * args.per_device_train_batch_size * args.gradient_accumulation_steps
        seed = args.seed if args.data_seed is None else args.data_seed
        if dataset is None:  # for evaluations
            return cls(0, batch, 1, max(1, args.max_steps), seed)
        if (rows := check("train_dataset", dataset)) < batch:
            raise ValueError(
                f"train_dataset has {rows} rows, fewer than the {batch} of an update "
                f"(per_device_train_batch_size {args.per_device_train_batch_size} x "
                f"gradient_accumulation_steps {args.gradient_accumulation_steps} x {world} "
                "devices): lower one of them"
            )
        updates = rows // batch if args.dataloader_drop_last else math.ceil(rows / batch)
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * updates)
        return cls(rows, batch, updates, steps, seed)

    def indices(self, step: int) -> np.ndarray:
        """The rows of an update, a function of the seed and of the updates made before."""
        epoch, at = divmod(step, self.updates)
        order = np.random.default_rng((self.seed, epoch)).permutation(self.rows)
        places = np.arange(at * self.batch, (at + 1) * self.batch)
        return order[places % self.rows]  # beyond the end, the epoch's first rows again


class Reader:
    """Batches of a dataset on a mesh: each process reads its own rows.

    Args:
      dataset: The rows.
      collator: Makes a batch of rows; :func:`stacked` by default.
      mesh: The devices.
      numbers_only: Whether columns that are not numbers are left out of rows.
      check: Raises for a batch that the model has no numbers for.
    """

    def __init__(
        self,
        dataset: Dataset,
        collator: Collator | None,
        mesh: Mesh,
        numbers_only: bool = True,
        check: Callable[[Batch], object] = len,
    ) -> None:
        self.dataset, self._collator = dataset, collator or stacked
        self._mesh, self._numbers_only, self._check = mesh, numbers_only, check

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """The process's own rows of a batch, as arrays."""
        blocks = BatchRows(self._mesh).blocks
        if len(indices) % blocks:  # the last ones of an evaluation: every process reads them all
            whole = NamedSharding(self._mesh, PartitionSpec())
            rows = self._checked(indices)
            return {
                k: jax.make_array_from_callback(x.shape, whole, x.__getitem__)
                for k, x in rows.items()
            }
        return self._checked(indices[process_rows(len(indices), self._mesh)])

    def sample(self) -> Batch:
        """A batch of the first row, the same in every process."""
        return self._read([0])

    def _checked(self, indices: Sequence[int] | np.ndarray) -> Batch:
        batch = self._read(indices)
        self._check(batch)
        return batch

    def _read(self, indices: Sequence[int] | np.ndarray) -> Batch:
        places = [int(i) for i in indices]
        many = getattr(self.dataset, "__getitems__", None)  # of datasets: one read for all
        rows = list(many(places)) if many else [self.dataset[i] for i in places]
        if self._numbers_only:
            rows = [_numbers(row) for row in rows]
        batch = self._collator(rows)
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"data_collator gave {type(batch).__name__}: return a dict of arrays, rows first"
            )
        arrays = {name: np.asarray(x) for name, x in batch.items()}
        for name, x in arrays.items():
            if x.dtype.kind not in "biufV" or not x.ndim or len(x) != len(places):
                raise TypeError(
                    f"the batch's {name} is {x.dtype}{list(x.shape)}, and numbers with "
                    f"{len(places)} rows are needed: take the column out, or pad and convert it in "
                    "data_collator"
                )
        return arrays

    def all(self, size: int, limit: int | None = None) -> Iterator[tuple[int, Batch]]:
        """Every row in order, in batches of at most ``size``, with the number of rows of each."""
        n = len(self.dataset) if limit is None else limit
        for start in range(0, n, size):
            places = np.arange(start, min(start + size, n))
            yield len(places), self.batch(places)


def _numbers(row: Any) -> Any:
    if not isinstance(row, Mapping):
        return row
    return {k: v for k, v in row.items() if v is not None and not _text(v)}


def _text(value: Any) -> bool:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, str | bytes)


def stacked(rows: list[Any]) -> Batch:
    """A batch of rows of equal shapes, each a dict; ``label`` becomes ``labels``.

    Raises:
      TypeError, ValueError: A row is no dict, or the rows differ in their fields or shapes.

    Example:
      >>> stacked([{"x": [1, 2], "label": 0}, {"x": [3, 4], "label": 1}])["labels"]
      array([0, 1])
    """
    first = rows[0]
    if not isinstance(first, Mapping):
        raise TypeError(
            f"a row is {type(first).__name__}, not a dict: pass data_collator, which makes a dict "
            "of arrays of a list of rows"
        )
    batch = {}
    for name in first:
        try:
            columns = [np.asarray(row[name]) for row in rows]
        except KeyError:
            raise ValueError(f"some rows have no {name}: give all rows the same fields") from None
        shapes = sorted({x.shape for x in columns})
        if len(shapes) > 1:
            raise ValueError(
                f"{name}: rows of shapes {shapes[0]} and {shapes[1]}: pad them to one length, or "
                "pass a data_collator that pads to few lengths, as each one compiles"
            )
        batch["labels" if name in ("label", "label_ids") else name] = np.stack(columns)
    return batch
