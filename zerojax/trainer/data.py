"""Batches from a dataset: which rows, read by which process, and their conversion to arrays.

A dataset without a length, such as ``datasets.IterableDataset``, is a stream, read in its own
order. A pass over it is split into updates of as many rows as the arguments say; the last of a pass
may have fewer, as an epoch's last update, and then the stream begins anew. The run's length is
``max_steps``. Every process reads the stream and keeps its own rows of each update, so that the
stream must yield the same rows in each. A run that is resumed reads and skips the rows of the
updates before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax.devices.rows import BatchRows, process_rows
from zerojax.trainer.arguments import TrainingArguments
from zerojax.trainer.order import order_of, row_lengths

Batch: TypeAlias = Mapping[str, np.ndarray | jax.Array]


class Dataset(Protocol):
    """A list of rows, Hugging Face's ``datasets.Dataset``, grain's ``MapDataset`` or the like."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


AnyDataset: TypeAlias = Dataset | Iterable[Any]
"""A dataset with rows by number, or a stream."""

Rows: TypeAlias = Sequence[Any] | np.ndarray
"""Rows of a dataset: their numbers; of a stream, the rows themselves."""

Collator: TypeAlias = Callable[[list[Any]], Mapping[str, ArrayLike]]
"""Function from a list of rows to a batch: arrays by name, rows on the first axis."""


def is_stream(dataset: object) -> bool:
    """Returns whether a dataset has rows in order and no length, and can be read more than once."""
    has_length, iterates = hasattr(dataset, "__len__"), hasattr(dataset, "__iter__")
    return iterates and not has_length and not isinstance(dataset, Iterator)


def check(name: str, dataset: Any) -> int:
    """Returns the number of rows; 0 for a stream, whose number is unknown.

    Raises:
      ValueError: The dataset is empty.
      TypeError: The dataset has no length, or no rows by index.
    """
    if dataset is None:
        raise TypeError(f"there is no {name}: pass Trainer({name}=...), a list or a dataset")
    if is_stream(dataset):
        return 0
    is_sequence = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_sequence or isinstance(dataset, Mapping):
        raise TypeError(
            f"{name}: {type(dataset).__name__} has no rows by number and cannot be read again: "
            "pass a list, a datasets.Dataset or IterableDataset, or a grain.MapDataset or "
            "IterDataset"
        )
    if not len(dataset):
        raise ValueError(f"{name} is empty: pass at least one row")
    return len(dataset)


class Epochs(NamedTuple):
    """The division of a dataset into epochs and updates.

    Attributes:
      rows: Rows of the dataset.
      read: Rows read in an epoch.
      batch: Rows of a full update, over all devices and micro-batches; an epoch's last update may
        have fewer.
      updates: Updates of an epoch.
      steps: Updates of the run.
      seed: The seed of the row order.
      order: A function from an epoch to the order of its rows; None for a stream.
    """

    rows: int
    read: int
    batch: int
    updates: int
    steps: int
    seed: int
    order: Callable[[int], np.ndarray] | None = None

    @classmethod
    def of(cls, dataset: Any, args: TrainingArguments, world: int) -> Epochs:
        """Counts updates as transformers does; without a dataset, updates have no rows.

        A stream has one epoch, of ``max_steps`` updates.

        ``dataloader_drop_last`` drops the rows beyond the last full micro-batch over all devices,
        so that an epoch's last update may have fewer micro-batches.

        Raises:
          ValueError: ``dataloader_drop_last`` drops all rows, or a stream has no ``max_steps``.
        """
        micro_batch = world * args.per_device_train_batch_size
        batch = micro_batch * args.gradient_accumulation_steps
        seed = args.seed if args.data_seed is None else args.data_seed
        if dataset is None:  # for evaluations
            return cls(0, 0, batch, 1, max(1, args.max_steps), seed)
        if is_stream(dataset):
            if args.max_steps <= 0:
                raise ValueError(
                    f"train_dataset: {type(dataset).__name__} has no length: set max_steps"
                )
            return cls(0, 0, batch, args.max_steps, args.max_steps, seed)
        rows = check("train_dataset", dataset)
        rows_read = rows - rows % micro_batch if args.dataloader_drop_last else rows
        if not rows_read:
            raise ValueError(
                f"train_dataset has {rows} rows, fewer than the {micro_batch} of a micro-batch "
                f"(per_device_train_batch_size {args.per_device_train_batch_size} x {world} "
                "devices): lower that, or remove dataloader_drop_last"
            )
        updates = math.ceil(rows_read / batch)
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * updates)
        strategy = args.train_sampling_strategy
        is_grouped = strategy == "group_by_length"
        lengths = row_lengths(dataset, args.length_column_name) if is_grouped else None
        order = order_of(strategy, rows=rows, seed=seed, batch=batch, lengths=lengths)
        return cls(rows, rows_read, batch, updates, steps, seed, order)

    def indices(self, step: int) -> np.ndarray:
        """Returns the row indices of an update, a function of the seed and the step only."""
        assert self.order is not None
        epoch, update = divmod(step, self.updates)
        start = update * self.batch
        return self.order(epoch)[start : min(start + self.batch, self.read)]

    @property
    def last(self) -> int | None:
        """Rows of an epoch's last update if the run reaches one that is not full, else None."""
        remainder = self.read % self.batch
        return remainder if remainder and self.steps >= self.updates else None


class Update(NamedTuple):
    """The rows of an update.

    Attributes:
      batch: This process's rows, padded to its share of a full update.
      counts: bool [rows of ``batch``], True for rows that count; None if all rows count.
      rows: The number of rows that count, over all processes.
    """

    batch: Batch
    counts: np.ndarray | None
    rows: int


class Reader:
    """Reads batches of a dataset for a mesh: each process reads its own rows.

    Args:
      dataset: The rows, or a stream; ``set_epoch``, if a stream has that method, gets the number of
        each pass.
      collator: A function from a list of rows to a batch; :func:`stacked` by default.
      mesh: The devices.
      numbers_only: Whether non-numeric columns are dropped from rows.
      check: A function of a batch and the names of the dropped columns; raises if the model cannot
        process the batch.
      multiple: An update at the end of a pass over a stream has a multiple of this number of rows;
        further rows are dropped.
    """

    dataset: Any

    def __init__(
        self,
        dataset: AnyDataset,
        collator: Collator | None,
        mesh: Mesh,
        numbers_only: bool = True,
        check: Callable[
            [Mapping[str, np.ndarray], Sequence[str]], object
        ] = lambda batch, left_out: None,
        multiple: int = 1,
    ) -> None:
        self.dataset, self._collator, self._multiple = dataset, collator or stacked, multiple
        self._mesh, self._numbers_only, self._check = mesh, numbers_only, check
        self._is_stream = is_stream(dataset)
        self._pads_all: bool | None = None  # known once a batch is read

    def updates(self, epochs: Epochs, start: int = 0) -> Iterator[Update]:
        """Yields this process's rows of each update of the run, from one on.

        A stream reads and skips the rows of the updates before.
        """
        each: Iterator[Rows]
        if self._is_stream:
            each = itertools.islice(self._passes(epochs.batch), start, None)
        else:
            each = map(epochs.indices, itertools.count(start))
        for rows in each:
            yield self.update(rows, epochs.batch)

    def _passes(self, size: int) -> Iterator[Rows]:
        """Yields the rows of each update of a stream, pass after pass."""
        for number in itertools.count():
            stream, is_empty = self._pass(number), True
            while rows := [*itertools.islice(stream, size)]:
                if rows := rows[: len(rows) - len(rows) % self._multiple]:
                    is_empty = False
                    yield rows
            if is_empty:
                raise self._too_few()

    def _pass(self, number: int = 0) -> Iterator[Any]:
        """Returns the entries of :data:`Rows` of a pass over the dataset, in order."""
        if not self._is_stream:
            return iter(range(len(self.dataset)))
        if (set_epoch := getattr(self.dataset, "set_epoch", None)) is not None:
            set_epoch(number)
        return iter(self.dataset)

    def _too_few(self) -> ValueError:
        least = f"the {self._multiple} of a micro-batch" if self._multiple > 1 else "one"
        return ValueError(f"the dataset yields fewer rows than {least}: give it more rows")

    def all(self, size: int, limit: int | None = None) -> Iterator[tuple[int, Batch]]:
        """Yields batches of at most ``size`` rows in order, each with its number of rows."""
        entries = itertools.islice(self._pass(), limit)
        while rows := [*itertools.islice(entries, size)]:
            yield len(rows), self.batch(rows)

    def batch(self, rows: Rows) -> Batch:
        """Returns this process's rows of a batch as arrays."""
        if len(rows) % BatchRows(self._mesh).blocks:  # an evaluation's last rows: all processes'
            replicated = NamedSharding(self._mesh, PartitionSpec())
            return {
                k: jax.make_array_from_callback(x.shape, replicated, x.__getitem__)
                for k, x in self._checked(rows).items()
            }
        return self.own(rows, process_rows(len(rows), self._mesh))

    def update(self, rows: Rows, size: int) -> Update:
        """Returns this process's rows of an update; copies that pad to ``size`` do not count."""
        local_rows = process_rows(size, self._mesh)
        batch = self.own([*itertools.islice(itertools.cycle(rows), size)], local_rows)
        counts = np.arange(size) < len(rows)
        return Update(batch, None if counts.all() else counts[local_rows], len(rows))

    def own(self, rows: Rows, part: slice) -> dict[str, np.ndarray]:
        """Returns some rows of a batch, such as this process's, as arrays.

        A collator pads the rows of all processes to one length: it gets the whole batch, if the
        rows of the first one have different shapes. Otherwise only the rows wanted are read.
        """
        is_part = part.indices(len(rows)) != (0, len(rows), 1)
        if self._pads_all is None and is_part:
            self._pads_all = self._collator is not stacked and not _equal(self._values(rows)[0])
        if is_part and self._pads_all:
            return self._checked(rows, part)
        return self._checked(rows[part])

    def sample(self) -> Batch:
        """Returns a batch of the first row, the same in every process."""
        rows = [*itertools.islice(self._pass(), 1)]
        if not rows:
            raise self._too_few()
        return self._read(rows)[0]

    def _checked(self, rows: Rows, part: slice = slice(None)) -> dict[str, np.ndarray]:
        batch, left_out = self._read(rows)
        batch = {name: x[part] for name, x in batch.items()}
        self._check(batch, left_out)
        return batch

    def _values(self, rows: Rows) -> tuple[list[Any], list[str]]:
        """Returns the dataset's rows, and the names of the non-numeric columns."""
        values, left_out = [*rows], list[str]()
        if not self._is_stream:
            numbers = [int(i) for i in rows]
            getitems = getattr(self.dataset, "__getitems__", None)  # one read of many rows
            values = [*getitems(numbers)] if getitems else [self.dataset[i] for i in numbers]
        if self._numbers_only:
            if isinstance(values[0], Mapping):
                left_out = [name for name, value in values[0].items() if _text(value)]
            values = [_numbers(value) for value in values]
        return values, left_out

    def _read(self, rows: Rows) -> tuple[dict[str, np.ndarray], list[str]]:
        """Returns a batch, and the names of the non-numeric columns."""
        values, left_out = self._values(rows)
        batch = self._collator(values)
        if not isinstance(batch, Mapping):
            raise TypeError(f"data_collator gave {type(batch).__name__}: return a dict of arrays")
        arrays = {name: np.asarray(x) for name, x in batch.items()}
        for name, x in arrays.items():
            if x.dtype.kind not in "biufV" or not x.ndim or len(x) != len(rows):
                raise TypeError(
                    f"the batch's {name} is {x.dtype}{list(x.shape)}, not {len(rows)} rows of "
                    "numbers: remove the column, or convert it in data_collator"
                )
        return arrays, left_out


def _numbers(row: object) -> object:
    if not isinstance(row, Mapping):
        return row
    return {k: v for k, v in row.items() if v is not None and not _text(v)}


def _equal(rows: list[Any]) -> bool:
    """Returns whether rows are dicts of numbers with equal shapes."""
    try:
        shapes = [{name: np.shape(x) for name, x in row.items()} for row in rows]
    except (AttributeError, ValueError):  # no dicts; lists of lists of unequal lengths
        return False
    return all(x == shapes[0] for x in shapes) and not any(map(_text, rows[0].values()))


def _text(value: object) -> bool:
    """Returns whether a value is text, or a list whose first element is, at any depth."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, str | bytes)


def stacked(rows: list[Any]) -> dict[str, np.ndarray]:
    """Stacks rows of equal shapes, each a dict, into a batch; renames ``label`` to ``labels``.

    Raises:
      TypeError: A row is not a dict.
      ValueError: The rows differ in their fields or shapes.

    Example:
      >>> stacked([{"x": [1, 2], "label": 0}, {"x": [3, 4], "label": 1}])["labels"]
      array([0, 1])
    """
    first = rows[0]
    if not isinstance(first, Mapping):
        raise TypeError(
            f"a row is {type(first).__name__}, not a dict: pass data_collator(rows) -> dict"
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
                "pass a data_collator that pads to few lengths (each compiles a step)"
            )
        batch["labels" if name in ("label", "label_ids") else name] = np.stack(columns)
    return batch
