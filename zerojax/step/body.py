"""What the user's step sees: its own state, with an optimizer that is zerojax's.

The state's ``params`` are the compute parameters. Its ``opt_state`` is a :class:`View`, and
its ``tx`` takes and returns views, so that what happens in ``apply_gradients`` travels through
the user's code as plain values, whatever that code does with the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zerojax.optim.wrap import ZeroTransformation
from zerojax.placement.states import take_apart
from zerojax.trace.changes import change
from zerojax.trace.explicit import Types, automatic_update, typed_whole
from zerojax.trace.marks import GRADIENT, count
from zerojax.train_state.state_parts import OpenedState, Parts


class View(NamedTuple):
    """The ``opt_state`` that the user's step carries.

    Attributes:
      opt: the optimizer's own state.
      masters: full-precision parameters, where the step computes with a copy; else None.
      compute: the compute parameters after the last update; None where the step makes them, by
        adding the update.
      grads: gradient of the micro-batch, under accumulation; else None.
      updates: what ``apply_gradients`` adds to the parameters, under accumulation; else None.
    """

    opt: Any
    masters: Any = None
    compute: Any = None
    grads: Any = None
    updates: Any = None


class Alone(NamedTuple):
    """The results of a step that returns the state alone."""


Cut = Callable[[Any], Any]
Advance = Callable[..., tuple[Any, View]]


def advancing(tx: ZeroTransformation, one_pass: Callable[..., Any] | None) -> Advance:
    """The update of a view: ``(grads, view, params, **extra) -> (updates, view)``.

    Args:
      tx: the wrapped transformation.
      one_pass: ``(grads, state, params) -> (params, state)``, for one that updates them in one
        pass; else None.
    """

    def advance(grads: Any, view: View, params: Any, **extra: Any) -> tuple[Any, View]:
        whole = view.masters is None
        before = params if whole else view.masters
        if one_pass is not None and params is not None and not extra:
            after, opt = one_pass(grads, view.opt, before)
            # For who looks at them; else XLA drops these.
            compute = jax.tree.map(lambda new, old: new.astype(old.dtype), after, params)
            updates = jax.tree.map(lambda new, old: new.astype(jnp.float32) - old, compute, params)
        else:
            updates, opt = tx.update(grads, view.opt, before, **extra)
            if whole:
                return updates, view._replace(opt=opt)
            after = optax.apply_updates(before, updates)
            updates = jax.tree.map(lambda m, p: m - p.astype(m.dtype), after, view.compute)
            compute = optax.apply_updates(view.compute, updates)
        return updates, view._replace(opt=opt, masters=None if whole else after, compute=compute)

    return advance


def updating(advance: Advance, cut: Cut) -> Any:
    """An optimizer that updates at once.

    Args:
      advance: see :func:`advancing`.
      cut: constrains a gradient tree to its shards.
    """

    def update(grads: Any, view: View, params: Any = None, **extra: Any) -> tuple[Any, View]:
        updates, after = advance(cut(as_gradients(grads)), view, params, **extra)
        updates = _noted(updates, params, after.compute)
        return updates, after if view.compute is not None else after._replace(compute=None)

    return optax.GradientTransformationExtraArgs(_no_init, update)


def collecting(cut: Cut) -> Any:
    """An optimizer that only keeps the gradient; see :class:`View` for what it returns."""

    def update(grads: Any, view: View, params: Any = None, **extra: Any) -> tuple[Any, View]:
        if extra:
            raise TypeError(
                f"apply_gradients passes {sorted(extra)} to the optimizer, which cannot be "
                "accumulated over micro-batches: set gradient_accumulation_steps to 1."
            )
        kept = jax.tree.map(lambda a, g: g.astype(a.dtype), view.grads, cut(as_gradients(grads)))
        return _noted(view.updates, params, view.compute), view._replace(grads=cut(kept))

    return optax.GradientTransformationExtraArgs(_no_init, update)


def _noted(updates: Any, params: Any, compute: Any) -> Any:
    """The updates, and the note of what they make of the parameters, where it is there already."""
    none = compute is None or params is None
    return updates if none else jax.tree.map(change, compute, params, updates)


def _no_init(params: Any) -> Any:
    raise TypeError("a decorated step updates its optimizer; it cannot start a new one")


class Body:
    """The user's function on a state taken apart.

    Args:
      function: the user's step.
      opened: how to put the state together again.
      once: why the step may update no more than once, with the remedy; empty where it may.
      types: what the types of its arrays say, for a step under explicit mesh axes; else None.
    """

    def __init__(
        self, function: Callable[..., Any], opened: OpenedState, once: str, types: Types | None
    ) -> None:
        self.function, self.once, self.types = function, once, types
        self.split, self.close = opened.split, opened.close

    def __call__(
        self, parts: Parts, tx: Any, batch: Any, args: Any, kwargs: Any
    ) -> tuple[Parts, Any]:
        """Runs the step; ``parts.opt_state`` is a :class:`View`, and ``tx`` takes one.

        Raises:
          TypeError: the step returns something else, or changes the structure of the state.
          ValueError: it updates never, or twice where it may only once.
        """
        if self.types is not None:
            tx, (args, kwargs) = automatic_update(tx), typed_whole((args, kwargs))
        state = self.close(parts, tx)
        if isinstance(state, tuple):  # NNX: updated in place
            out = self.function(*state, batch, *args, **kwargs)
            made = self.split(*state)
            pairs = zip(*map(jax.tree.leaves, (made.params, parts.params)), strict=False)
            if len(state) > 2 and all(new is old for new, old in pairs):
                raise ValueError(
                    f"{self.name} never calls optimizer.update for the model, perhaps for another "
                    "object of the same form: pass the model that is trained before it."
                )
        else:
            new, out = self._state_and_rest(state, self.function(state, batch, *args, **kwargs))
            made = take_apart((new,)).parts
        before: Any = jax.tree.structure(parts)
        after: Any = jax.tree.structure(made)
        if before != after:
            raise TypeError(
                f"{self.name} changed the structure of the state from {before} to {after}: "
                "a training state keeps its fields and their trees from step to step."
            )
        return made, out

    def trace(self, run: Callable[..., Any], parts: Parts, batch: Any) -> tuple[Any, Any]:
        """The jaxpr of ``run(parts, batch)``, which calls this body, and the shapes it returns."""
        if self.types is not None:
            return self.types.trace(run, parts, batch)
        return jax.make_jaxpr(run, return_shape=True)(parts, batch)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "the step")

    def _state_and_rest(self, state: Any, returned: Any) -> tuple[Any, Any]:
        if (
            isinstance(returned, tuple)
            and len(returned) == 2
            and isinstance(returned[0], type(state))
        ):
            return returned
        if isinstance(returned, type(state)):
            return returned, Alone()
        raise TypeError(
            f"{self.name} returned {_kind(returned)}: a decorated step returns the pair "
            f"(state, metrics), with a {type(state).__name__} first, or the state alone."
        )

    def check(self, jaxpr: Any, leaves: int) -> None:
        """Looks for the updates in the traced step, on a state of so many parameters.

        Raises:
          ValueError: it updates never, or more often than it may.
        """
        straight, branched, looped = count(jaxpr, GRADIENT)
        n = (straight + branched) // leaves
        if not n + looped:
            raise ValueError(
                f"{self.name} never updates (state.apply_gradients, or optimizer.update in NNX): "
                "nothing would be trained. Call it with the gradients; put a step that does not "
                "train under jax.jit instead."
            )
        if self.once and (n > 1 or looped):
            times = "in a loop" if looped else f"{n} times"
            raise ValueError(f"{self.name} updates {times}, which cannot be {self.once}.")


def _kind(x: Any) -> str:
    if isinstance(x, tuple):
        return f"a tuple of {', '.join(type(y).__name__ for y in x)}"
    return f"a {type(x).__name__}"


def params_after(view: View, returned: Any, before: Any, done: jax.Array | None) -> Any:
    """The parameters to keep.

    Where the step returned what ``apply_gradients`` made, the masters. Where it changed a
    parameter afterwards (clipped a weight, say), its own value, and that of before if the step
    was skipped; the update itself holds the masters then.

    Args:
      view: after the update.
      returned, before: parameters that the step returned, and the masters that it began with.
      done: bool [], False for a skipped step; None where none is.
    """

    def held(x: jax.Array, old: jax.Array) -> jax.Array:
        return x if done is None else jnp.where(done, x, old)

    def kept(its: jax.Array, old: jax.Array, mine: jax.Array, seen: jax.Array) -> jax.Array:
        if its is seen:
            return mine
        return held(jnp.where(its == seen, mine, its.astype(mine.dtype)), old)

    if view.masters is None:
        return jax.tree.map(held, returned, before)
    return jax.tree.map(kept, returned, before, view.masters, view.compute)


def cast(tree: Any, dtype: Any) -> Any:
    """The floating leaves of a tree in another dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def constrainer(shardings: Any) -> Cut:
    """Constrains a tree to ``shardings``."""
    return lambda tree: jax.tree.map(lax.with_sharding_constraint, tree, shardings)


def as_gradients(tree: Any) -> Any:
    """Marks a tree as what :mod:`zerojax.collectives.wanted` looks for."""
    return jax.tree.map(lambda g: checkpoint_name(g, GRADIENT), tree)
