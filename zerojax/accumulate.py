"""Gradient accumulation: the body once for each micro-batch, one update at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from zerojax import compat
from zerojax.body import Advance, Cut, View
from zerojax.late import reached
from zerojax.parts import Parts

# evaluate(parts, micro_batch) runs the body; parts.opt_state is a View. The third result is the
# weight that the loss reports, None where it reports none.
Evaluate = Callable[[Parts, Any], tuple[Parts, Any, jax.Array | None]]


def accumulate(
    evaluate: Evaluate,
    parts: Parts,
    batch: Any,
    advance: Advance,
    *,
    sharded: Cut,
    kept: Cut,
    dtype: Any,
) -> tuple[Parts, Any]:
    """One step of ``k`` micro-batches.

    The gradient is the mean, :math:`g = \\sum_i w_i g_i / \\sum_i w_i`, summed in ``dtype``. The
    weights are 1 unless the loss reports them (:func:`zerojax.weighted_mean`). Other state (batch
    statistics, PRNG keys) passes from one micro-batch to the next; the step counter is the same
    for all of them.

    Args:
      evaluate: runs the user's step on one micro-batch with an optimizer that only collects.
      parts: the state; its ``opt_state`` a :class:`View` of the optimizer's own state.
      batch: leaves [k, rows, ...]; scalars go to every micro-batch.
      advance: the update, see :func:`zerojax.body.advancing`.
      sharded, kept: constrain gradients to their shards, and to how they are accumulated.
      dtype: of the accumulator; None for the parameter's, float32 at least.

    Returns:
      The state after one update, and the step's results: numbers averaged, arrays stacked
      along a new first dimension.
    """
    view: View = parts.opt_state
    params = parts.params if view.masters is None else view.masters
    zeros = kept(jax.tree.map(lambda p: jnp.zeros(p.shape, accumulator(p.dtype, dtype)), params))
    summed = summed_up(evaluate, parts, batch, zeros, kept=kept)
    rest, grads = summed.rest, sharded(summed.grads)
    updates, after = advance(grads, view, parts.params)
    cut, scalars = _separate(batch)

    def last(made: tuple[Any, Any], rest: Any) -> tuple[Parts, Any]:
        """The body on the last micro-batch, with these as the updates of ``apply_gradients``, and
        the parameters after them."""
        opt_state = view._replace(grads=zeros, updates=made[0], compute=made[1])
        here = parts._replace(opt_state=opt_state, rest=rest)
        return evaluate(here, scalars([x[-1] for x in cut]))[:2]

    # What follows from the new parameters (their average, say) is made once, by the real update;
    # XLA drops the rest of this run of the body.
    (final, out), (late, late_out) = _with_dependence(last, (updates, after.compute), parts.rest)
    made = Parts(
        params=final.params,
        opt_state=after,
        step=summed.step,
        rest=_choose(late.rest, final.rest, rest),
    )
    return made, _choose(late_out, out, summed.out)


class Summed(NamedTuple):
    """What the micro-batches of a step have made: the mean of their gradients, the other state
    after the last of them, the step's counter and its results."""

    grads: Any
    rest: Any
    step: Any
    out: Any


def summed_up(evaluate: Evaluate, parts: Parts, batch: Any, zeros: Any, *, kept: Cut) -> Summed:
    """The gradients of ``k`` micro-batches, as :func:`accumulate` takes their mean.

    Args:
      evaluate, parts, batch, kept: see :func:`accumulate`.
      zeros: the accumulator at first.
    """
    view: View = parts.opt_state
    still = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), parts.params)
    cut, scalars = _separate(batch)
    k = cut[0].shape[0] if cut else 1

    def micro(carry: Any, rows: list[Any]) -> tuple[Any, Any]:
        rest, grads, seen = carry[0], kept(carry[1]), carry[2]
        here = parts._replace(opt_state=view._replace(grads=zeros, updates=still), rest=rest)
        made, out, weight = evaluate(here, scalars(rows))
        mine = made.opt_state.grads
        if weight is None:
            grads = jax.tree.map(lambda a, g: a + g / k, grads, mine)
        else:
            # A mean all along: a sum of weighted gradients may be more than fp16 holds.
            seen = seen + weight
            share = weight / _or_one(seen)
            grads = jax.tree.map(lambda a, g: a + (g - a) * share.astype(a.dtype), grads, mine)
        return (made.rest, kept(grads), seen), (out, made.step, weight)

    start = parts.rest, zeros, jnp.zeros((), jnp.float32)
    (rest, grads, _), (outs, steps, weights) = lax.scan(micro, start, cut)
    # Kept as they are on both sides of the loop, else XLA cuts what the loop carries as well.
    out = jax.tree.map(lambda x: _combine(x, weights), outs)
    return Summed(kept(grads), rest, steps[-1], out)


def accumulator(param: Any, dtype: Any) -> Any:
    """The dtype in which gradients of a parameter of dtype ``param`` are summed."""
    return jnp.promote_types(param, jnp.float32) if dtype is None else dtype


def _separate(batch: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves that are cut into micro-batches, and the way back from one cut of each."""
    leaves, tree = jax.tree.flatten(batch)
    cut = [x for x in leaves if jnp.ndim(x)]

    def back(rows: list[Any]) -> Any:
        left = iter(rows)
        return jax.tree.unflatten(tree, [next(left) if jnp.ndim(x) else x for x in leaves])

    return cut, back


def _combine(x: jax.Array, weights: jax.Array | None) -> jax.Array:
    if x.ndim > 1 or not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        return x
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.float32
    if weights is None:
        return jnp.mean(x, dtype=dtype)
    # A micro-batch without weight may have NaN for its mean.
    part = jnp.where(weights == 0, 0, x) * weights
    return (jnp.sum(part) / _or_one(jnp.sum(weights))).astype(dtype)


def _or_one(total: jax.Array) -> jax.Array:
    return jnp.where(total == 0, 1, total)


def _with_dependence(function: Callable[..., Any], first: Any, *others: Any) -> tuple[Any, Any]:
    """The result of ``function``, and which of its leaves depend on the first argument."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(first, *others)
    jaxpr, _ = compat.open_jaxpr(closed)
    marks = reached(jaxpr, jaxpr.invars[: len(jax.tree.leaves(first))])
    outs = core.jaxpr_as_fun(closed)(*jax.tree.leaves((first, *others)))
    tree = jax.tree.structure(shape)
    return jax.tree.unflatten(tree, outs), jax.tree.unflatten(tree, marks)


def _choose(marks: Any, marked: Any, unmarked: Any) -> Any:
    return jax.tree.map(lambda m, a, b: a if m else b, marks, marked, unmarked)
