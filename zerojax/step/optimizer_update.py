"""The optimizer's update of a state that is stored partly in host memory or on disk."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from zerojax.accumulation.run import accumulator
from zerojax.collectives.host import fetch_to_device
from zerojax.offload.compute_copies import ComputeCopies, placement_of
from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.offload.groups import ArrayPlacement
from zerojax.offload.update import Update
from zerojax.optim.norm import square_sums
from zerojax.optim.wrap import full_precision
from zerojax.placement.placer import StateArray
from zerojax.plan.places import DEVICE, HOST
from zerojax.plan.state_sharding import DTYPES
from zerojax.step.program import StepSetting
from zerojax.step.view import FULL_TREE_ONLY


class UpdateArrays(NamedTuple):
    """The arrays of an update, or one item per array; lists in the order of the leaves.

    Attributes:
      grads: Gradients, one per parameter.
      params: The parameters at rest.
      opt_state: The optimizer state.
      square_sums: Square sums of each gradient, see :func:`zerojax.optim.norm.square_sums`.
      copies: Compute parameters that are stored beside the state, which the update only writes.
    """

    grads: Sequence[Any]
    params: Sequence[Any]
    opt_state: Sequence[Any]
    square_sums: Sequence[Any]
    copies: Sequence[Any] = ()

    def flat(self) -> list[Any]:
        """Returns all items in one list."""
        return [x for part in self for x in part]

    def like(self, flat: Sequence[Any]) -> UpdateArrays:
        """Splits another flat list like these fields; the list may end before the copies."""
        remaining = iter(flat)
        return UpdateArrays(*([*itertools.islice(remaining, len(part))] for part in self))


class OptimizerUpdate:
    """The update, sub-group by sub-group (:mod:`zerojax.offload.update`).

    Values that depend only on gradients and scalars (a norm, a schedule) form the prelude, which
    the program of the gradients runs; see :class:`zerojax.offload.separate.SeparatedUpdate`.

    Args:
      setting: The step.
      copies: Compute parameters that are stored beside the state.

    Attributes:
      by_groups: The update as a function of flat arrays.
      gradients: Shapes and dtypes of the gradients that the update takes, one per parameter.
      uses: Whether the update uses a parameter's gradient, one per parameter.
    """

    def __init__(self, setting: StepSetting, copies: ComputeCopies) -> None:
        self._setting, self._copies, plan = setting, copies, setting.plan
        params, state = plan.leaves["params"], plan.leaves["opt_state"]
        config, dtypes = setting.config, [leaf.dtype for leaf in plan.compute]
        if setting.layout.accumulation > 1:
            wide = [x if config.compute_dtype is None else jnp.float32 for x in dtypes]
            dtypes = [accumulator(x, DTYPES[config.grad_accum_dtype]) for x in wide]
        shapes = [leaf.shape for leaf in plan.compute]
        self.gradients = [*map(jax.ShapeDtypeStruct, shapes, dtypes)]
        sums = jax.eval_shape(
            lambda grads: [square_sums(full_precision(g)) for g in grads], self.gradients
        )
        self._placements = UpdateArrays(
            grads=[
                ArrayPlacement(x.shape, x.dtype, leaf.spec, gradient.place, leaf.padded)
                for x, leaf, gradient in zip(
                    self.gradients, plan.compute, plan.gradients(), strict=True
                )
            ],
            params=[placement_of(leaf) for leaf in params],
            opt_state=[placement_of(leaf) for leaf in state],
            square_sums=[
                ArrayPlacement(x.shape, x.dtype, PartitionSpec(), DEVICE, x.shape) for x in sums
            ],
            copies=copies.placements,
        )
        heavy = UpdateArrays(
            grads=[False] * len(params),
            params=[True] * len(params),
            opt_state=plan.streamed,
            square_sums=[False] * len(params),
        )
        numbers = self._placements.like(range(len(self._placements.flat())))
        try:
            self.by_groups = Update(
                self._function,
                self._placements.flat(),
                heavy.flat(),
                [*numbers.params, *numbers.opt_state, *numbers.copies],
                plan,
            )
        except (TypeError, ValueError) as error:  # of unequal trees
            raise NotImplementedError(
                f"the optimizer raises {type(error).__name__} for gradients like state.params: "
                f"{error}. {FULL_TREE_ONLY}"
            ) from error
        separated = self.by_groups.separated
        read = {i for cluster in separated.clusters for i in cluster.inputs}
        read |= separated.read_by_prelude
        self.uses = [i in read for i in range(len(params))]
        # Results begin with the parameters.
        self._shared = [at - len(params) for at in separated.shared]

    def _function(self, *flat: jax.Array) -> list[jax.Array]:
        """Computes the update of the entire state."""
        arrays, trees = self._placements.like(flat), self._setting.structure
        grads, params = (jax.tree.unflatten(trees.params, x) for x in (arrays.grads, arrays.params))
        opt_state = jax.tree.unflatten(trees.opt_state, arrays.opt_state)
        updates, after = self._setting.tx.update(
            grads, opt_state, params, square_sums=arrays.square_sums
        )
        new = jax.tree.leaves(optax.apply_updates(params, updates))
        copied = self._copies.cast(*(new[i] for i in self._copies.at))
        return [*new, *jax.tree.leaves(after), *copied]

    def prelude(
        self,
        grads: Sequence[jax.Array],
        numbers: Sequence[jax.Array | None],
        square_sums: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the prelude. Returns the scalars that the sub-groups need, and new scalars of the
        optimizer state, for :meth:`with_shared`. Gradients come without padding; in host memory
        they may be :class:`zerojax.collectives.host.Unpadded`."""
        separated, placements = self.by_groups.separated, self._placements
        gradients = [
            (fetch_to_device(g) if x.place == HOST else g)
            if i in separated.read_by_prelude
            else None
            for i, (g, x) in enumerate(zip(grads, placements.grads, strict=True))
        ]
        # The step may have passed gradients of another dtype to its optimizer.
        sums = [s.astype(x.dtype) for s, x in zip(square_sums, placements.square_sums, strict=True)]
        arrays = UpdateArrays(gradients, [None] * len(grads), numbers, sums)
        return separated.prelude(arrays.flat())

    def with_shared(
        self, opt_state: Sequence[jax.Array], shared: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns the leaves of an optimizer state with the new scalars of the prelude."""
        new = dict(zip(self._shared, shared, strict=True))
        return [new.get(i, x) for i, x in enumerate(opt_state)]

    def run(
        self,
        grads: list[jax.Array | None],
        params: Sequence[StateArray],
        opt_state: Sequence[StateArray],
        scalars: Sequence[jax.Array],
    ) -> tuple[list[StateArray], list[StateArray]]:
        """Returns the parameters and the optimizer state after the update, and reuses their memory.

        Args:
          grads: The gradients; the list is emptied, so that each is freed as soon as it is used.
          scalars: The scalars of the prelude.
        """
        inputs = UpdateArrays(grads, params, opt_state, [None] * len(grads), self._copies.take())
        # The update replaces arrays in memory, and leaves on the disk.
        arrays = [x.leaf if isinstance(x, DiskArray) else x for x in inputs.flat()]
        del inputs
        grads.clear()
        on_disk = [x for x in arrays if isinstance(x, DiskLeaf)]
        try:
            self.by_groups.run(arrays, scalars)
        # A KeyboardInterrupt too leaves files that hold neither the old state nor the new one.
        except BaseException:
            for leaf in on_disk:
                leaf.torn()
            raise
        arrays = [x.advance() if isinstance(x, DiskLeaf) else x for x in arrays]
        after = self._placements.like(arrays)
        self._copies.keep(after.params, after.copies)
        return [*after.params], [*after.opt_state]
