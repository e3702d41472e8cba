"""What rematerialised blocks keep for their backward passes, so that it can wait on the host.

A block under ``jax.checkpoint`` keeps little but its input, and runs again when its cotangents
exist. In a jaxpr after differentiation the forward pass is inlined, and what runs again is a
``remat_p`` equation with ``differentiated``, here a *backward block*, that takes what was kept.

Blocks in a loop keep stacks, which the loop of the forward pass makes and that of the backward
pass reads. Those can leave: XLA starts a copy in each iteration. Of blocks one after the other
nothing leaves: XLA puts such copies off, and the device would need more memory, not less.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import primitives as prims

from zerojax.graph.graph import graph_of
from zerojax.graph.regions import regions
from zerojax.graph.search import contains, holds, runs_regions
from zerojax.xla import jaxprs

NO_EFFECT = (
    "cpu_checkpointing has no effect: only rematerialised blocks in a scan (nn.scan) without "
    "jax_remat3 leave for host memory, and this step has none. For other blocks use "
    "zerojax.remat_policy('offload:...')."
)


def find(jaxpr: Any, smallest: int) -> set[Any]:
    """The stacks of an open jaxpr that may lie in host memory.

    They are made by a loop, have at least ``smallest`` elements for each iteration, and are read
    by loops of backward blocks alone, entry by entry.
    """
    return {
        v
        for eqn in graph_of(jaxpr).named("scan")
        for v in eqn.outvars[jaxprs.scan_counts(eqn).carry :]
        if jnp.issubdtype(v.aval.dtype, jnp.floating)
        and v.aval.size >= smallest * jaxprs.param(eqn, "length")
        and (uses := _uses(jaxpr, v, direct=False))
        and all(uses)
    }


def some_stay(jaxpr: Any) -> bool:
    """Whether there are backward blocks in no loop, or blocks made under ``jax_remat3``: what these
    keep is read beside them as well, where differentiation put the rest of the backward pass."""
    outside = holds(jaxpr, jaxprs.runs_backward, _runs_once)
    return outside or holds(jaxpr, jaxprs.is_recomputed, _is_outside_blocks)


def _is_outside_blocks(eqn: Any) -> bool:
    return runs_regions(eqn) and not jaxprs.runs_backward(eqn)


def _runs_once(eqn: Any) -> bool:
    return bool(jaxprs.bodies(eqn))


def holds_block(eqn: Any) -> bool:
    """Whether a call or a loop is, or has in it, a backward block."""
    return contains(eqn, jaxprs.runs_backward)


def _uses(jaxpr: Any, v: Any, *, direct: bool) -> list[bool]:
    """For each use of a variable, whether it is by a loop of backward blocks, which takes one
    entry at a time for a block; with ``direct``, or by a block."""
    graph = graph_of(jaxpr)
    found = [x for use in graph.users(v) for x in _of_operand(*use, direct=direct)]
    return found + [False] * len(graph.returned(v))


def _of_operand(eqn: Any, at: int, *, direct: bool) -> list[bool]:
    """The uses of one operand within an equation."""
    if not holds_block(eqn):
        return [False]
    if jaxprs.runs_backward(eqn):
        return [direct]
    if eqn.primitive not in jaxprs.CALLS and eqn.primitive is not prims.scan_p:
        return [False]
    (region,) = regions(eqn)
    if eqn.primitive in jaxprs.CALLS:
        return _uses(region.jaxpr, region.argument(at), direct=direct)
    entry = region.is_entry(at)
    return [entry and any(_uses(region.jaxpr, region.argument(at), direct=True))]
