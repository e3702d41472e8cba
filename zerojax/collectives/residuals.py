"""Residuals of rematerialised blocks that can wait in host memory for the backward pass.

A block under ``jax.checkpoint`` keeps little more than its input, and runs again when its
cotangents exist. In a jaxpr after differentiation the forward pass is inlined, and the second run
is a ``remat_p`` equation with ``differentiated``, called a *backward block* here, which takes the
residuals as operands.

The residuals of blocks in a loop are stacks, which the loop of the forward pass produces and the
loop of the backward pass reads. These can be offloaded: XLA starts a copy in each iteration.
Residuals of blocks outside loops stay on the devices: XLA defers such copies, and the device would
need more memory, not less.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.extend.core import primitives as prims

from zerojax.graph.def_use import graph_of
from zerojax.graph.regions import regions
from zerojax.graph.search import contains, equations, holds, runs_regions
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr

NO_EFFECT = (
    "cpu_checkpointing has no effect: only rematerialised blocks in a scan (nn.scan) without "
    "jax_remat3 leave for host memory, and this step has none. For other blocks use "
    "zerojax.remat_policy('offload:...')."
)


def find_leaving(jaxpr: Jaxpr, smallest: int) -> set[Atom]:
    """Returns the stacks of an open jaxpr that may wait in host memory.

    They are produced by a loop, have at least ``smallest`` elements for each iteration, and are
    read only by loops of backward blocks, entry by entry.
    """
    return {
        v
        for loop in graph_of(jaxpr).named("scan")
        for v in jaxprs.scan_parts(loop).results(loop.outvars)[1]
        if jnp.issubdtype(v.aval.dtype, jnp.floating)
        and v.aval.size >= smallest * jaxprs.param(loop, "length")
        and (uses := _uses(jaxpr, v, direct=False))
        and all(uses)
    }


def names(jaxpr: Jaxpr) -> list[str]:
    """Returns the names, by ``jax.ad_checkpoint.checkpoint_name``, of values that rematerialised
    blocks compute again in a traced step, each once."""
    found = filter(_is_recomputed_name, equations(jaxpr))
    return list(dict.fromkeys(jaxprs.param(named, "name") for named in found))


def _is_recomputed_name(eqn: Equation) -> bool:
    return eqn.primitive is prims.name_p and jaxprs.is_recomputed(eqn)


def some_stay(jaxpr: Jaxpr) -> bool:
    """Returns whether an open jaxpr has backward blocks outside loops, or blocks under
    ``jax_remat3``, whose residuals are also read outside the blocks, where differentiation put the
    rest of the backward pass."""
    outside = holds(jaxpr, jaxprs.runs_backward, _runs_once)
    return outside or holds(jaxpr, jaxprs.is_recomputed, _is_outside_blocks)


def _is_outside_blocks(eqn: Equation) -> bool:
    return runs_regions(eqn) and not jaxprs.runs_backward(eqn)


def _runs_once(eqn: Equation) -> bool:
    return bool(jaxprs.bodies(eqn))


def holds_block(eqn: Equation) -> bool:
    """Returns whether an equation is, or contains, a backward block."""
    return contains(eqn, jaxprs.runs_backward)


def _uses(jaxpr: Jaxpr, v: Atom, *, direct: bool) -> list[bool]:
    """Returns, for each use of a variable, whether it is a loop of backward blocks, which takes one
    entry at a time for a block; if ``direct``, also whether it is such a block."""
    graph = graph_of(jaxpr)
    found = [x for use in graph.users(v) for x in _of_operand(*use, direct=direct)]
    return found + [False] * len(graph.returned(v))


def _of_operand(eqn: Equation, at: int, *, direct: bool) -> list[bool]:
    """Returns, for each use of operand ``at`` within an equation, the answer of :func:`_uses`."""
    if not holds_block(eqn):
        return [False]
    if jaxprs.runs_backward(eqn):
        return [direct]
    if eqn.primitive not in jaxprs.CALLS and eqn.primitive is not prims.scan_p:
        return [False]
    (region,) = regions(eqn)
    if eqn.primitive in jaxprs.CALLS:
        return _uses(region.jaxpr, region.argument(at), direct=direct)
    return [region.is_entry(at) and any(_uses(region.jaxpr, region.argument(at), direct=True))]
