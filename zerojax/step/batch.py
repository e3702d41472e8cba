"""The batch of a step, checked against the devices and the config."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from zerojax.config import BatchSizes
from zerojax.devices.mesh import stage_size
from zerojax.devices.rows import dimension
from zerojax.pipeline.schedule import Schedule
from zerojax.step.batch_placer import BatchPlacer
from zerojax.step.call import Call, Frozen, is_array
from zerojax.step.jitted import Slot
from zerojax.train_state.pytree import is_part
from zerojax.xla.types import PyTree

_SHOWN = 6
_NOT_NUMBERS = "OSU"
"""The kinds of NumPy's dtypes of objects and text."""


class BatchLayout(BatchPlacer):
    """The placement of a step's batch, which fits the devices and the config.

    Without accumulation, leaves may differ in their numbers of rows (nodes and edges of graphs).
    Pipeline stages split the batch themselves, so that it is placed as one.

    Args:
      mesh: The devices.
      sizes: Batch sizes of the config.
      axis: The dimension of rows; 0 under accumulation.

    Attributes:
      sizes: The argument of this name.
      schedule: The pipeline of the layers; None without pipeline stages.
    """

    def __init__(self, mesh: Mesh, sizes: BatchSizes, axis: int = 0) -> None:
        self._stages, self.schedule = stage_size(mesh), Schedule.of(mesh, sizes.accumulation)
        _check_batch_axis(sizes.accumulation, self.schedule, axis)
        super().__init__(mesh, sizes.accumulation if self._stages == 1 else 1, axis)
        self.sizes = sizes

    def abstract(self, batch: PyTree) -> PyTree:
        """Checks a batch and returns its shapes, dtypes and shardings on the devices."""
        self.check(batch)
        return super().abstract(batch)

    def check(self, batch: PyTree) -> None:
        """Raises ValueError if the batch, or a missing one, does not fit devices or config."""
        # In a step without a batch, the tuple of its arguments is empty.
        if isinstance(batch, tuple) and not batch:
            return self._check_absent()
        self._check_dimensions(batch)
        self.check_tokens(batch)
        own, k, blocks = self.leaves.own_rows(batch), self.sizes.accumulation, self.leaves.blocks
        rows = {self.leaves.shape(x)[self.axis] for x in jax.tree.leaves(batch) if np.ndim(x)}
        if not rows or (len(rows) > 1 and max(k, self._stages) > 1):
            self._explain(batch)
        if 0 in rows and len(rows) == 1:
            raise ValueError(f"the batch is empty: its {dimension(self.axis)} is 0.")
        n, train, stages = max(rows), self.sizes.train, self._stages
        # Rows are placed over all devices, those of a micro-batch over the devices of one stage.
        each = math.lcm(k, stages) * (self.world // stages)
        of = "" if own is None else f" ({own} in each of {blocks} processes)"
        if train is not None and train not in rows and len(rows) == 1:
            remedy = "Pass the global batch, or change or remove train_batch_size."
            if own == train:
                index = f"{':, ' * self.axis}zerojax.process_rows({train})"
                remedy = f"Pass only the process's own rows: batch[{index}]."
            raise ValueError(
                f"the batch has {n} rows{of}, but train_batch_size is {train}. {remedy}"
                f"{self._stacked(batch, train)}"
            )
        if n % each and len(rows) == 1:
            by = f"{self.world} devices" + (f" in {stages} pipeline stages" if stages > 1 else "")
            by += f"{' x' if stages == 1 else ','} {k} micro-batches" if k > 1 else ""
            m = n - n % each
            fits = " or ".join(str(x // (blocks if of else 1)) for x in (m, m + each) if x)
            raise ValueError(
                f"the batch's {dimension(self.axis)} {n}{of} is not divisible by {each} ({by}). "
                f"Use {fits} rows{' in each process' if of else ''}, or fewer devices."
                + self._stacked(batch, each)
            )

    def _check_absent(self) -> None:
        """Refuses a step without a batch if the config divides one."""
        sizes = {
            "train_batch_size": self.sizes.train or 1,
            "gradient_accumulation_steps": self.sizes.accumulation,
            "pipeline stages": self._stages,
        }
        if dividing := [f"{name} ({n})" for name, n in sizes.items() if n > 1]:
            raise ValueError(
                f"the step takes no batch, which {' and '.join(dividing)} would divide. Remove "
                "that from the config, or pass the arrays with the rows after the state."
            )

    def _check_dimensions(self, batch: PyTree) -> None:
        """Refuses text, and arrays without the dimension of rows; scalars are allowed."""
        for path, x in jax.tree_util.tree_leaves_with_path(batch):
            dtype = getattr(x, "dtype", None)
            if hasattr(x, "numpy"):  # a tensor of torch or TensorFlow, whose dtype JAX rejects
                raise TypeError(
                    f"the batch{jax.tree_util.keystr(path)} is a {type(x).__module__}."
                    f"{type(x).__name__}: pass its NumPy array, x.numpy()."
                )
            is_number = isinstance(x, bool) or is_array(x)
            if not is_number or getattr(dtype, "kind", "f") in _NOT_NUMBERS:
                kind = f"{type(x).__name__}" + (f" of dtype {dtype}" if dtype else "")
                raise TypeError(
                    f"the batch{jax.tree_util.keystr(path)} is a {kind}, not an array of numbers. "
                    "Remove it from the batch, or encode it; pass a loader's batches one by one."
                )
            if 0 < np.ndim(x) <= self.axis:
                raise ValueError(
                    f"the batch's array {jax.tree_util.keystr(path)} {np.shape(x)} has no "
                    f"dimension {self.axis} (batch_axis={self.axis}). Pass it as a further "
                    "argument after the batch, or give it the rows."
                )

    def _stacked(self, batch: PyTree, rows: int) -> str:
        """Returns advice if the next dimension of all arrays has a suitable number of rows."""
        shapes = {self.leaves.shape(x)[:2] for x in jax.tree.leaves(batch) if np.ndim(x)}
        first, n = (*shapes.pop(), 0)[:2]
        if self.axis or shapes or not n:
            return ""
        if self.sizes.accumulation == 1:
            remedy = "" if n % rows else "write zero(step, batch_axis=1)"
        else:
            is_stacked = first in (self.sizes.accumulation, self.world)
            remedy = "pass x.reshape(-1, *x.shape[2:])" if is_stacked else ""
        return f" If dimension 1 ({n}) has the rows, {remedy}." if remedy else ""

    def check_more(self, call: Call) -> None:
        """Checks a step's further arguments, which every micro-batch receives in full.

        Raises:
          ValueError: An argument has as many rows as the batch, and is no part of the state.
        """
        if self.sizes.accumulation == 1:
            return
        rows = {self.rows(call.batch), self.leaves.own_rows(call.batch)} - {None}
        given = dict(zip(call.signature.further, call.further, strict=True))
        alike = {
            slot: [x for x in jax.tree.leaves(value) if _rows(x) in rows]
            for slot, value in given.items()
            if not isinstance(value, Frozen) and not is_part(value, call.objects)
        }
        if slots := [slot for slot, leaves in alike.items() if leaves]:
            shape = np.shape(alike[slots[0]][0])
            raise ValueError(
                f"the further argument {slots[0]} has the shape {shape}, with the {shape[0]} rows "
                f"of the batch, which has {self.sizes.accumulation} micro-batches. Make it part of "
                f"the batch: zero(step, {_options((*call.signature.batch, *slots))}). If every "
                "micro-batch needs all of it, pass x[None]."
            )

    def rows(self, batch: PyTree) -> int:
        """Returns the number of rows of a checked batch, or of its first leaf if leaves differ; 1
        for a step without a batch."""
        rows = (self.leaves.shape(x)[self.axis] for x in jax.tree.leaves(batch) if np.ndim(x))
        return next(rows, 1)

    def _explain(self, batch: PyTree) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        shapes = {jax.tree_util.keystr(path) or "batch": np.shape(x) for path, x in leaves}
        if not any(shapes.values()):
            only = f" (only scalars: {_some(shapes)})" if shapes else ""
            raise ValueError(
                f"the batch has no array with rows{only}. Pass a list of numbers as "
                "np.asarray(numbers); name a batch that is not the first argument after the state "
                "with batch_argnums."
            )
        listing = _some([f"{name!r}: {shape}" for name, shape in shapes.items() if shape])
        without = "" if self._stages == 1 else ', without the axis "stage"'
        raise ValueError(
            f"the batch's arrays differ in their leading dimension: {{{listing}}}. For "
            f"{self.sizes.accumulation} micro-batches, every array needs one row an example. Pass "
            "arrays without rows as further arguments of the step, or set "
            f"gradient_accumulation_steps to 1{without} (for graphs)."
        )


def _rows(x: PyTree) -> int | None:
    """Returns the size of an array's first dimension; None for what has none."""
    return np.shape(x)[0] if is_array(x) and np.ndim(x) else None


def _options(slots: Sequence[Slot]) -> str:
    """Returns the options by which arguments are the batch."""
    nums = tuple(slot for slot in slots if isinstance(slot, int))
    names = tuple(slot for slot in slots if isinstance(slot, str))
    both = {"batch_argnums": nums, "batch_argnames": names}
    return ", ".join(f"{option}={given}" for option, given in both.items() if given)


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join([*names][:_SHOWN]) + more


def _check_batch_axis(accumulation: int, schedule: Schedule | None, batch_axis: int) -> None:
    """Refuses rows in a later dimension if the step runs micro-batch by micro-batch."""
    if batch_axis and (accumulation > 1 or schedule is not None):
        key = 'the mesh axis "stage"'
        if schedule is None:
            key = f"gradient_accumulation_steps = {accumulation}"
        raise ValueError(
            f"batch_axis={batch_axis} with {key}: micro-batches are cut along dimension 0. Remove "
            f"one of them, or pass jnp.moveaxis(x, {batch_axis}, 0)."
        )
