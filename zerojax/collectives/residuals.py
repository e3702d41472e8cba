"""What rematerialised blocks keep for their backward passes, so that it can wait on the host.

A block under ``jax.checkpoint`` keeps little but its input, and runs again when its cotangents
exist. In a jaxpr after differentiation the forward pass is inlined, and what runs again is a
``remat_p`` equation with ``differentiated``, here a *backward block*, that takes what was kept.

Blocks in a loop keep stacks, which the loop of the forward pass makes and that of the backward
pass reads. Those can leave: XLA starts a copy in each iteration. Of blocks one after the other
nothing leaves: XLA puts such copies off, and the device would need more memory, not less.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.xla import jaxprs

NO_EFFECT = (
    "cpu_checkpointing has no effect: this step's rematerialised blocks are not in a loop, and "
    "only blocks in a scan (nn.scan) leave for host memory; for blocks of your own use "
    "zerojax.remat_policy('offload:...')."
)


def find(jaxpr: Any, smallest: int) -> set[Any]:
    """The stacks of an open jaxpr that may lie in host memory.

    They are made by a loop, have at least ``smallest`` elements for each iteration, and are read
    by loops of backward blocks alone, entry by entry.
    """
    uses = _uses(jaxpr, direct=False)
    return {
        v
        for eqn in jaxpr.eqns
        if eqn.primitive is prims.scan_p
        for v in eqn.outvars[jaxprs.scan_counts(eqn)[1] :]
        if jnp.issubdtype(v.aval.dtype, jnp.floating)
        and v.aval.size >= smallest * jaxprs.param(eqn, "length")
        and uses[v]
        and all(uses[v])
    }


def outside_loops(jaxpr: Any) -> bool:
    """Whether there are backward blocks that are in no loop."""
    return any(
        jaxprs.runs_backward(eqn) or any(outside_loops(body) for body in jaxprs.bodies(eqn))
        for eqn in jaxpr.eqns
    )


def holds_block(eqn: Any) -> bool:
    """Whether a call or a loop is, or has in it, a backward block."""
    return jaxprs.runs_backward(eqn) or any(
        holds_block(e) for body in jaxprs.inner(eqn) for e in body.eqns
    )


def _uses(jaxpr: Any, *, direct: bool) -> dict[Any, list[bool]]:
    """For each use of a variable, whether it is by a loop of backward blocks, which takes one
    entry at a time for a block; with ``direct``, or by a block."""
    by_loop: dict[Any, list[bool]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for v, uses in zip(eqn.invars, _of_operands(eqn, direct), strict=True):
            if not isinstance(v, core.Literal):
                by_loop[v] += uses
    for v in jaxpr.outvars:
        if not isinstance(v, core.Literal):
            by_loop[v].append(False)
    return by_loop


def _of_operands(eqn: Any, direct: bool) -> list[list[bool]]:
    """The uses of each operand within an equation."""
    plain = [[False] for _ in eqn.invars]
    if not holds_block(eqn):
        return plain
    if jaxprs.runs_backward(eqn):
        return [[direct] for _ in eqn.invars]
    if eqn.primitive in jaxprs.CALLS:
        (body,) = jaxprs.bodies(eqn)
        inner = _uses(body, direct=direct)
        return [inner[v] for v in body.invars]
    if eqn.primitive is prims.scan_p:
        (body,) = jaxprs.inner(eqn)
        inner, first = _uses(body, direct=True), sum(jaxprs.scan_counts(eqn))
        return plain[:first] + [[any(inner[v])] for v in body.invars[first:]]
    return plain
