"""The conversion of a state's arrays into shards at the start of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.collectives import Inserter, Shard, decisions, gather_once
from zerojax.collectives.gather_once import KeptGather
from zerojax.collectives.host import unpadded
from zerojax.collectives.quantization import scale_of
from zerojax.collectives.shard import Gathering
from zerojax.offload.disk_params import DiskParam, ParamReader
from zerojax.plan.layout import Spec
from zerojax.plan.places import DEVICE, DISK
from zerojax.plan.quantized import E4M3
from zerojax.plan.state_sharding import Leaf, Plan
from zerojax.xla.types import PyTree


class BodyArrays(NamedTuple):
    """Arrays in the form that the body takes.

    Attributes:
      values: The arrays; a :class:`Shard` for each that is sharded or stored off the device; None
        for one that the body does not use.
      kept: The way in which each array is gathered once a step, as far as the plan decides.
    """

    values: list[jax.Array | Shard | None]
    kept: list[KeptGather | None]


def enter(
    inserter: Inserter,
    plan: Plan,
    leaves: Sequence[Leaf],
    values: Sequence[Any],
    reader: ParamReader | None = None,
    *,
    by_partition: bool = True,
    field: str = "params",
) -> BodyArrays:
    """Returns a field of the state in the form that the inserter takes, each array from its place.

    This function gathers secondary shards (hpZ);
    :func:`zerojax.collectives.gather_once.gather` gathers the other arrays that are gathered once a
    step.

    Args:
      inserter: Runs the body.
      plan: PartitionSpec and place of every leaf.
      leaves: The arrays' leaves in the plan.
      values: The arrays; None for an array on disk, and for one that the body does not use.
      reader: Reads arrays from the disk, by their position in ``leaves``.
      by_partition: Whether the arrays have secondary shards (hpZ).
      field: The field's name. The small arrays of a field are gathered together.
    """
    entered: list[jax.Array | Shard | None] = []
    quantized = plan.quantized.paths
    for i, (x, leaf) in enumerate(zip(values, leaves, strict=True)):
        spec, is_offloaded = leaf.full_spec, leaf.place != DEVICE
        if leaf.place == DISK:
            assert reader is not None
            x = DiskParam(reader, i, leaf.padded, leaf.dtype, plan.sharding(leaf))
        if is_offloaded and x is not None:
            x = unpadded(x, leaf.shape)
        is_quantized = leaf.path in quantized
        becomes_shard = is_offloaded or (leaf.sharded and x is not None)
        secondary = None
        if by_partition and not is_offloaded and not inserter.share:
            secondary = plan.secondary_spec(leaf)
        if secondary is not None and x is not None:
            x = inserter.secondary(x, spec, secondary, quantized=is_quantized)
            spec = secondary
        gathering = Gathering(host=is_offloaded, quantized=is_quantized)
        entered.append(Shard(x, spec, gathering=gathering) if becomes_shard else x)
    _set_scales(entered, inserter)
    # With `share` one gather serves all uses.
    live_paths = plan.live.paths if not inserter.share else ()
    live_indices = [i for i, leaf in enumerate(leaves) if leaf.path in live_paths]
    return BodyArrays(entered, gather_once.by_plan(entered, inserter, live_indices, field))


def _set_scales(entered: list[jax.Array | Shard | None], inserter: Inserter) -> None:
    """Sets the scales of the parameters that products multiply in fp8, from the largest element of
    each matrix. XLA combines the all-reduces of all of them."""
    specs: list[Spec] = []
    n, ledger = 0, inserter.ledger
    for i, x in enumerate(entered):
        if isinstance(x, Shard) and inserter.sent.in_fp8(x.spec):
            largest = jnp.max(jnp.abs(x.value), axis=(-2, -1))
            field = "scales" if largest.ndim else "scale"
            entered[i] = x.with_gathering(**{field: scale_of(largest, E4M3)})
            specs.append(x.spec)
            n += largest.size
    reason = "the largest elements, for the scales of fp8"
    if specs:
        with ledger.place(decisions.ENTRY, reason), ledger.of(*specs):
            ledger.maxima(jax.ShapeDtypeStruct((n,), jnp.bfloat16))


def with_masters(entered: BodyArrays, masters: Sequence[jax.Array]) -> BodyArrays:
    """Returns arrays of which some are copies in the compute dtype, with the arrays at rest that
    they are copies of."""
    pairs = zip(entered.values, masters, strict=True)
    return entered._replace(
        values=[replace(x, master=master) if isinstance(x, Shard) else x for x, master in pairs]
    )


def enter_rest(inserter: Inserter, plan: Plan, rest: Mapping[str, PyTree]) -> BodyArrays:
    """Returns the state other than parameters, optimizer state and step, in its order.

    Small arrays are gathered field by field: a field of which the step needs only shards, such as
    an average of the parameters, is not gathered.
    """
    entered = BodyArrays([], [])
    # JAX flattens a dict in the order of its keys, and so the plan lists the leaves.
    for name, values in sorted(rest.items()):
        arrays, first = jax.tree.leaves(values), len(entered.values)
        leaves = plan.leaves["rest"][first : first + len(arrays)]
        entered_field = enter(inserter, plan, leaves, arrays, by_partition=False, field=name)
        entered = BodyArrays(
            entered.values + entered_field.values, entered.kept + entered_field.kept
        )
    return entered
