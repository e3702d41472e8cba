"""A step whose state lies partly in host memory or on disk: several programs in turn.

1. The gradients (:mod:`zerojax.step.gradient_program`): the user's step with an optimizer that
   only collects them.
2. The update, sub-group by sub-group (:mod:`zerojax.offload.update`), unless the step overflowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from zerojax.accumulation.run import accumulator
from zerojax.monitor.after_step import Signals
from zerojax.offload.compute_copies import placement_of
from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.offload.groups import ArrayPlacement
from zerojax.offload.update import Update
from zerojax.optim.wrap import ZeroOptState
from zerojax.placement.states import States, abstract
from zerojax.plan.places import DEVICE, DISK
from zerojax.plan.plan import DTYPES, Leaf
from zerojax.step.batch import BatchLayout
from zerojax.step.body import Body
from zerojax.step.call import Rearranged
from zerojax.step.gradient_program import Collect
from zerojax.step.static_arguments import divide
from zerojax.trace.explicit import Explicit, Types
from zerojax.train_state.state_parts import OpenedState, Parts
from zerojax.xla import compat
from zerojax.xla.lowered import LoweredProgram

_ONCE = "streamed to where the optimizer state lies: update once, or train without offload"


class Streamed:
    """The compiled programs for one kind of state; called as :class:`zerojax.step.step.Program`."""

    checked = False

    def __init__(
        self,
        function: Rearranged,
        states: States,
        opened: OpenedState,
        donate: bool,
        signals: Callable[[ZeroOptState, Any], Signals],
        explicit: Explicit | None,
    ) -> None:
        self.function = function
        self.donate, self.config = donate, states.config
        self.tx, self.split, self.close = opened.tx, opened.split, opened.close
        self.write_back = opened.write_back
        self.plan = states.plan(opened)
        if not donate and self.plan.bytes_in(DISK):
            raise ValueError(
                "donate=False keeps the state that a step is given, but what lies on disk is "
                'written over in place: leave it out, or offload to device "cpu".'
            )
        sizes = self.config.batch(states.mesh.shape[states.axis])
        self.accumulation = sizes.accumulation
        self.layout = BatchLayout(self.plan.lowering_mesh, states.axis, sizes)
        self.copies = states.placer.copies(self.plan)
        self.trees: Any = (
            jax.tree.structure(opened.parts.params),
            jax.tree.structure(opened.parts.opt_state),
        )
        self.update = self._update()
        self.collect = Collect(
            Body(function, opened, _ONCE, Types(self.plan, explicit) if explicit else None),
            self.plan,
            self.accumulation,
            [self._grad_dtype(leaf) for leaf in self.plan.compute],
            self.trees,
            self.update.separated,
            signals,
        )

    def _grad_dtype(self, leaf: Leaf) -> Any:
        """In which the gradients of a parameter leave the first program."""
        if self.accumulation == 1:
            return leaf.dtype
        low = self.config.compute_dtype is not None
        return accumulator(jnp.float32 if low else leaf.dtype, DTYPES[self.config.grad_accum_dtype])

    def _update(self) -> Update:
        """The update as a function of gradients, parameters, optimizer state and square sums."""
        params, state = self.plan.leaves["params"], self.plan.leaves["opt_state"]
        n, m = len(params), len(state)
        grads = [
            ArrayPlacement(x.shape, jnp.dtype(self._grad_dtype(x)), x.spec, g.place)
            for x, g in zip(self.plan.compute, self.plan.gradients(), strict=True)
        ]
        sums = [
            ArrayPlacement(x.shape[:1], jnp.dtype(jnp.float32), PartitionSpec(), DEVICE)
            for x in params
        ]

        def function(*leaves: Any) -> list[Any]:
            g, p, s = leaves[:n], leaves[n : 2 * n], leaves[2 * n : 2 * n + m]
            grads, before = (jax.tree.unflatten(self.trees[0], x) for x in (g, p))
            opt = jax.tree.unflatten(self.trees[1], s)
            updates, after = self.tx.update(grads, opt, before, square_sums=leaves[2 * n + m :])
            made = jax.tree.leaves(optax.apply_updates(before, updates))
            copied = self.copies.cast(*(made[i] for i in self.copies.at))
            return [*made, *jax.tree.leaves(after), *copied]

        optimizer = self.config.offload_optimizer
        return Update(
            function,
            [
                *grads,
                *map(placement_of, params),
                *map(placement_of, state),
                *sums,
                *self.copies.placements,
            ],
            [False] * n + [True] * n + self.plan.streamed + [False] * n,
            [*range(n, 2 * n + m), *range(3 * n + m, 3 * n + m + len(self.copies.at))],
            self.plan,
            on_host=optimizer is not None and optimizer.compute_on == "host",
        )

    def __call__(
        self, parts: Parts, batch: Any, args: Any, kwargs: Any
    ) -> tuple[Parts, Any, Signals]:
        arrays, static = divide(args, kwargs)
        params, state = jax.tree.leaves(parts.params), jax.tree.leaves(parts.opt_state)
        light = [x for x, heavy in zip(state, self.plan.streamed, strict=True) if not heavy]
        made = self.collect(
            self.collect.given(self.copies.of(params)),
            light,
            parts.rest,
            parts.step,
            batch,
            arrays,
            static,
        )
        if self.collect.reader.arrays:
            # The update's writes stand in line with the program's reads: after them, please.
            jax.block_until_ready((made.grads, made.out))
            self.collect.reader.check()
        for at, x in zip(self.update.separated.shared, made.shared, strict=True):
            state[at - len(params)] = x
        if not self.config.skips_overflow or bool(made.done):
            params, state = self._updated(params, state, made.grads, made.scalars)
        if self.donate and parts.step is not made.step:
            parts.step.delete()  # it stands for the whole state, which is used up
        after = Parts(
            jax.tree.unflatten(self.trees[0], params),
            jax.tree.unflatten(self.trees[1], state),
            made.step,
            made.rest,
        )
        return after, made.out, made.signals

    def _updated(
        self, params: list[Any], state: list[Any], grads: list[Any], scalars: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        n, m = len(params), len(state)
        if not self.donate:
            params, state = jax.tree.map(jnp.copy, (params, state))
        masters = [_leaf_of(x) for x in (*params, *state)]
        arrays = [*grads, *masters, *[None] * n, *map(_leaf_of, self.copies.take())]
        grads.clear()
        leaves = [x for x in arrays if isinstance(x, DiskLeaf)]
        try:
            self.update.run(arrays, scalars)
        except BaseException:
            for leaf in leaves:
                leaf.torn()
            raise
        made = [x.advance() if isinstance(x, DiskLeaf) else x for x in arrays]
        params, state = made[n : 2 * n], made[2 * n : 2 * n + m]
        self.copies.keep(params, made[3 * n + m :])
        return params, state

    def lower(self, parts: Parts, batch: Any, args: Any, kwargs: Any) -> jax.stages.Lowered:
        """The first program, which makes the gradients."""
        return next(self.lowered(parts, batch, args, kwargs)).lowered

    def lowered(self, parts: Parts, batch: Any, args: Any, kwargs: Any) -> Iterator[LoweredProgram]:
        """All programs, each once."""
        arrays, static = divide(args, kwargs)
        parts = abstract(parts, self.plan)
        state = jax.tree.leaves(parts.opt_state)
        light = [x for x, heavy in zip(state, self.plan.streamed, strict=True) if not heavy]
        yield LoweredProgram(
            "gradients",
            compat.lower_for(
                self.collect.jitted.trace(
                    self.collect.given(self.copies.abstract()),
                    light,
                    parts.rest,
                    parts.step,
                    self.layout.abstract(batch),
                    arrays,
                    static,
                ),
                self.plan.mesh,
            ),
        )
        for name, traced, times in self.update.traced():
            yield LoweredProgram(name, compat.lower_for(traced, self.plan.mesh), times)


def _leaf_of(x: Any) -> Any:
    """What the update replaces: an array itself, or where it lies on disk."""
    return x.leaf if isinstance(x, DiskArray) else x
