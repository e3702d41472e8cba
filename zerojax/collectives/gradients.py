"""Equations that compute gradients, and the reduction of each gradient to its shard.

Each product of a matrix has a gradient of its own. At stages 2 and 3 each would be reduced where it
is produced, because no unsharded array may wait for a later use. Gradients of adjacent products are
added up first, as the other use follows at once. For uneven shards the operands of a sum are padded
before it.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as prims
from jax.sharding import Mesh

from zerojax.collectives import decisions, partial_sums, propagate, reduction, sharded_products
from zerojax.collectives.gathering import Gatherer, is_sharded
from zerojax.collectives.lookups import divides_tokens
from zerojax.collectives.partial_sums import RowSum, row_sum_of
from zerojax.collectives.reduction import add_up, is_quantized
from zerojax.collectives.sharded_products import Product
from zerojax.devices.mesh import REPLICA
from zerojax.graph.contractions import RESULT, Contraction
from zerojax.graph.def_use import Graph, graph_of
from zerojax.graph.lookups import Lookup
from zerojax.graph.primitives import CONTRACTIONS, LINEAR, PRODUCTS
from zerojax.graph.rows import RowDimensions
from zerojax.graph.search import contains
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.stored import pad
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr


class Terms(enum.Enum):
    """Partial sums of a gradient, to be added up over the devices.

    Attributes:
      WHOLE: XLA's, of the whole gradient.
      ROWS: The rows that the gradient of a lookup adds to its table, fewer than the table has; the
        rows are sent.
      TABLE: XLA's, of such a gradient with more rows: it sums them over all devices at once.
      BY_GROUP: The sum of each replica group, of such a gradient.
      BY_DEVICE: The sum of each device, of such a gradient, sent quantized.
      ROW_SUMS: The sum of each device over its own rows, sent quantized.
      NONE: Each device computes its own shard.
    """

    WHOLE = enum.auto()
    ROWS = enum.auto()
    TABLE = enum.auto()
    BY_GROUP = enum.auto()
    BY_DEVICE = enum.auto()
    ROW_SUMS = enum.auto()
    NONE = enum.auto()


class Reduction(NamedTuple):
    """The reduction of a gradient to its shard, at the equation that produces the gradient.

    Attributes:
      spec: The spec of the shard.
      terms: What is added up over the devices.
      product: The product of which each device computes its shard, for ``NONE``.
      row_sum: The sum over rows, for ``ROW_SUMS``.
      padded: The shapes to which the operands are padded, so that the gradient splits evenly; None
        if nothing is padded.
      unquantized: Whether the gradient is sent unquantized despite the config.
    """

    spec: Spec
    terms: Terms = Terms.WHOLE
    product: Product | None = None
    row_sum: RowSum | None = None
    padded: Sequence[Sequence[int]] | None = None
    unquantized: bool = False


def decide_reduction(
    eqn: Equation, spec: Spec, gatherer: Gatherer, rows: RowDimensions
) -> Reduction:
    """Decides how a result of an equation is reduced to its shard.

    Args:
      eqn: The equation.
      spec: The spec of the shard.
      gatherer: Reduces gradients.
      rows: The dimensions along which rows of the batch lie.
    """
    if len(eqn.outvars) > 1:
        return Reduction(spec)
    if (product := sharded_products.find_product(eqn, RESULT, spec, gatherer, rows)) is not None:
        return Reduction(spec, Terms.NONE, product)
    shape, is_lookup = eqn.outvars[0].aval.shape, eqn.primitive is prims.scatter_add_p
    sends_rows = is_lookup and _few_rows(eqn)
    quantized = gatherer.sent.gradients is not None and is_quantized(shape, spec, gatherer)
    if quantized and (row_sum := row_sum_of(eqn, rows, spec, gatherer)) is not None:
        return Reduction(spec, Terms.ROW_SUMS, row_sum=row_sum)
    quantized = quantized and not sends_rows  # rows have fewer bytes
    if quantized and gatherer.sums_own_rows and can_split(eqn, rows, gatherer.mesh.size):
        return Reduction(spec, Terms.BY_DEVICE)
    groups = gatherer.replicas
    if groups > 1 and is_sharded(spec, gatherer.axis) and can_split(eqn, rows, groups):
        return Reduction(spec, Terms.BY_GROUP, unquantized=quantized)
    even_shape = layout.padded_shape(shape, spec, gatherer.mesh)
    return Reduction(
        spec,
        Terms.ROWS if sends_rows else Terms.TABLE if is_lookup else Terms.WHOLE,
        padded=None if even_shape == shape else padded_operands(eqn, even_shape),
        unquantized=quantized,
    )


def bind_reduced(
    eqn: Equation,
    values: Sequence[jax.Array],
    reductions: Sequence[Reduction | None],
    gatherer: Gatherer,
) -> list[jax.Array]:
    """Runs an equation, and reduces those of its results that are gradients."""
    for each in reductions:
        if each is not None and each.unquantized:
            named = ", ".join(getattr(each.spec, "leaves", ())) or eqn.primitive.name
            gatherer.sent_unquantized.append(f"{named} {eqn.outvars[0].aval.shape}")
    match reductions:
        case [Reduction(row_sum=RowSum() as row_sum)]:
            return [partial_sums.total(row_sum.partial(values, gatherer), gatherer)]
        case [Reduction(spec, Terms.BY_DEVICE)]:
            parts = by_group(eqn, values, gatherer.mesh.size)
            # Each part starts from zeros: devices that all added to the table would count it once
            # each.
            return [values[0] + reduction.of_all(parts, spec, gatherer)]
        case [Reduction(spec, Terms.BY_GROUP)]:
            return [values[0] + _of_groups(eqn, values, spec, gatherer)]
        case [Reduction(padded=shapes) as only] if shapes is not None:
            # XLA reduce-scatters only into equal shards. Padded after the sum, gradients are
            # all-reduced: 10.6 MB for 5.3 of three matrices of about 1000 x 1000 on 8 devices.
            sum_of_padded = _scatter(bind_padded(eqn, values, shapes), only, gatherer)
            own = sum_of_padded[tuple(map(slice, eqn.outvars[0].aval.shape))]
            return [gatherer.constrain(own, only.spec)]
    with _sent_instead(eqn, values, reductions, gatherer):
        pairs = zip(jaxprs.bind(eqn, values), reductions, strict=True)
        return [o if how is None else _scatter(o, how, gatherer) for o, how in pairs]


def _scatter(gradient: jax.Array, how: Reduction, gatherer: Gatherer) -> jax.Array:
    """Constrains a gradient to its shard."""
    if how.terms is Terms.ROWS:
        # Constrained in full first, such gradients are reduce-scattered as tables: 91 MB for 1.8 of
        # four tables of 100,000 rows, 1,024 of them looked up.
        return gatherer.scatter_parts(gradient, how.spec)
    if how.terms is Terms.TABLE:
        return gatherer.scatter_table(gradient, how.spec)
    return gatherer.scatter(gradient, how.spec)


def _of_groups(
    eqn: Equation, values: Sequence[jax.Array], spec: Spec, gatherer: Gatherer
) -> jax.Array:
    """Returns what a lookup's gradient adds to its table: summed within each replica group, and
    then over the groups."""
    groups, table, unsharded = gatherer.replicas, values[0], (None,) * len(spec)
    # XLA's partitioner sums a scatter over all devices at once, but a product within each group
    # first.
    parts = by_group(eqn, values, groups)
    with gatherer.ledger.of(spec):
        gatherer.ledger.reduces(table, unsharded, spec, over=gatherer.mesh.size // groups)
        gatherer.ledger.reduces(table, spec, spec, over=groups)
    return add_up(gatherer.constrain(parts, (REPLICA, *spec)), 0)


def _sent_instead(
    eqn: Equation,
    values: Sequence[jax.Array],
    reductions: Sequence[Reduction | None],
    gatherer: Gatherer,
) -> contextlib.ExitStack[bool | None]:
    """Records the collectives that XLA emits for an equation instead of a reduce-scatter of its
    result; returns their contexts."""
    ledger, how = gatherer.ledger, reductions[0] if len(reductions) == 1 else None
    stack = contextlib.ExitStack()
    if not ledger.asked or how is None or not is_sharded(how.spec, gatherer.axis):
        return stack
    spec = how.spec
    stack.enter_context(ledger.of(spec))
    # Indices that are the same on all devices leave a sum of the table's size to reduce.
    if how.terms is Terms.ROWS and ledger.by_rows(eqn.invars[1]):
        _, indices, rows = values
        picked = Lookup.of(eqn).picked
        to_rows = any(d in picked for d in layout.dimensions(spec, gatherer.axis))
        stack.enter_context(
            ledger.place(decisions.PRODUCED, "fewer rows than the table's are sent")
        )
        leading = [-(-n // gatherer.mesh.size) for n in rows.shape[:1]]  # none of a single element
        own_rows = jax.ShapeDtypeStruct((*leading, *rows.shape[1:]), rows.dtype)
        sent = (decisions.GATHER, rows) if to_rows else (decisions.EXCHANGE, own_rows)
        stack.enter_context(ledger.instead((decisions.GATHER, indices), sent))
    elif eqn.primitive is prims.reduce_sum_p and len(layout.parts_of(spec, gatherer.axis)) > 1:
        stack.enter_context(ledger.place(decisions.PRODUCED, "the sum is all-reduced, then split"))
        stack.enter_context(ledger.instead((decisions.REDUCE, eqn.outvars[0].aval)))
    return stack


def at_one_index(eqn: Equation) -> bool:
    """Returns whether an equation is a scatter at one index, or a jitted function that contains
    one.

    The array that it changes needs a barrier. Otherwise XLA merges the slice that shards a gradient
    with the slice of its one row, without clamping: on CPU devices without that row another row is
    wrong, and GPUs all-reduce the full gradient.
    """
    return contains(eqn, _scatters_once, enters=_is_jitted)


def _scatters_once(eqn: Equation) -> bool:
    scatters = eqn.primitive.name.startswith("scatter")
    # The last dimension of the indices has the numbers of one index.
    return scatters and math.prod(eqn.invars[1].aval.shape[:-1]) == 1


def _is_jitted(eqn: Equation) -> bool:
    return eqn.primitive is prims.jit_p


def _few_rows(eqn: Equation) -> bool:
    table, _, rows = eqn.invars
    return rows.aval.size <= table.aval.size


def can_split(eqn: Equation, rows: RowDimensions, groups: int) -> bool:
    """Returns whether an equation is the gradient of a lookup of all tokens in one table, whose
    rows divide among the groups."""
    is_gradient = eqn.primitive is prims.scatter_add_p and not Lookup.of(eqn).batched
    return is_gradient and divides_tokens(eqn, rows, groups)


def by_group(eqn: Equation, values: Sequence[jax.Array], groups: int) -> jax.Array:
    """Returns the sum that each of ``groups`` adds to a table: [groups, *table]."""
    table, indices, updates = values
    row = Lookup.of(eqn).by_index[0]

    def split(x: jax.Array, d: int) -> jax.Array:
        return x.reshape(*x.shape[:d], groups, x.shape[d] // groups, *x.shape[d + 1 :])

    def added(indices: jax.Array, updates: jax.Array) -> jax.Array:
        return jaxprs.bind(eqn, [jnp.zeros_like(table), indices, updates])[0]

    return jax.vmap(added, in_axes=(0, row))(split(indices, 0), split(updates, row))


NEAR = 16
"""The most equations between adjacent products."""

_PASSES = LINEAR | {"add_any"}


class AddedGradients(NamedTuple):
    """Gradients that are added up unreduced, and then reduced once.

    Attributes:
      reduced: The sums.
      added: The values from which they are computed, back to products, which are not reduced.
    """

    reduced: set[Atom]
    added: set[Atom]


def find_sums(
    jaxpr: Jaxpr,
    wants: Mapping[Atom, Spec],
    mesh: Mesh,
    rows: RowDimensions,
    *,
    of_layer: bool = False,
    in_place: Container[Atom] = (),
) -> AddedGradients:
    """Finds sums of adjacent products. Those of products farther from each other are included if
    together they have no more elements than the largest gradient, or if ``of_layer``: their terms
    stay unsharded until the last term exists.

    Args:
      jaxpr: An open jaxpr.
      wants: See :func:`zerojax.collectives.target_specs.trace_back`.
      mesh: The mesh of all specs. A gradient that its spec pads is padded where it is computed, so
        that it is left out here.
      rows: The dimensions along which rows of the batch lie.
      of_layer: Whether the jaxpr is one layer, in a loop over layers.
      in_place: Gradients that need no reduction, see :mod:`zerojax.collectives.sharded_products`.
    """
    graph = graph_of(jaxpr)
    near, far = AddedGradients(set(), set()), AddedGradients(set(), set())
    for out in reversed(graph.in_order(wants)):
        eqn, shape = graph.producer(out), out.aval.shape
        is_sum = eqn.primitive.name == "add_any"
        if not is_sum or layout.padded_shape(shape, wants[out], mesh) != shape:
            continue
        if out in near.added | far.added or (terms := _terms(eqn, graph, rows, in_place)) is None:
            continue
        first = min(graph.place(graph.producer(v)) for v in terms)
        chosen = near if graph.place(eqn) - first <= NEAR else far
        chosen.reduced.add(out)
        chosen.added.update(terms)
    largest = max((v.aval.size for v in wants), default=0)
    if not of_layer and sum(v.aval.size for v in far.reduced) > largest:
        return near
    return AddedGradients(near.reduced | far.reduced, near.added | far.added)


def _terms(
    eqn: Equation, graph: Graph, rows: RowDimensions, in_place: Container[Atom]
) -> set[Atom] | None:
    """Returns the variables from which a sum is computed, back to products. None if one of them is
    computed otherwise, has another use or is among ``in_place``, or if some of the products add up
    rows and others do not."""
    part = graph.backward_slice(eqn.invars, through=_passes)
    terms, ends = {*part.results, *part.ends}, [*map(graph.producer, part.ends)]
    if len(jaxprs.variables(eqn.invars)) != len(eqn.invars):
        return None
    if any(graph.times_used(v) != 1 or v in in_place for v in terms):
        return None
    if any(end is None or end.primitive.name not in PRODUCTS for end in ends):
        return None
    # XLA does not reduce-scatter a sum that needs reduction only in part.
    products = [product for product in map(Contraction.of, ends) if product is not None]
    return terms if len({_sums_rows(product, rows) for product in products}) <= 1 else None


def _passes(eqn: Equation) -> bool:
    return eqn.primitive.name in _PASSES or propagate.reversible(eqn)


def _sums_rows(product: Contraction, rows: RowDimensions) -> bool:
    summed = zip(product.eqn.invars, product.contracted, strict=True)
    return any(d in rows.dims(x) for x, dims in summed for d in dims)


def bind_padded(
    eqn: Equation, values: Sequence[jax.Array], shapes: Sequence[Sequence[int]]
) -> jax.Array:
    """Returns the result of an equation on its operands padded to ``shapes``."""
    return jaxprs.bind(eqn, list(map(pad, values, shapes)))[0]


def padded_operands(eqn: Equation, shape: Sequence[int]) -> list[Sequence[int]] | None:
    """Returns the shapes of an equation's operands with which its result has a larger ``shape``,
    and no other elements but zeros; None for an equation without a rule."""
    rule = _RULES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn, shape)


def _product(eqn: Equation, shape: Sequence[int]) -> list[Sequence[int]]:
    product = Contraction.of(eqn)
    operands: list[Sequence[int]] = []
    for i, v in enumerate(eqn.invars):
        places = product.places(i)
        operands.append([shape[places[d]] if d in places else n for d, n in _sizes(v)])
    return operands


def _sum(eqn: Equation, shape: Sequence[int]) -> list[Sequence[int]]:
    sizes, axes = iter(shape), jaxprs.param(eqn, "axes")
    return [[n if d in axes else next(sizes) for d, n in _sizes(eqn.invars[0])]]


def _lookup(eqn: Equation, shape: Sequence[int]) -> list[Sequence[int]] | None:
    """Pads the operands of an equation that adds windows of rows to a table. None if padding could
    receive a window that the unpadded table drops or moves, or if a batch of tables would be
    padded, as each has its own indices."""
    # CLIP moves an index beyond the table to its last row, which would be one of padding.
    if jaxprs.param(eqn, "mode") == lax.GatherScatterMode.CLIP:
        return None
    table, indices, rows = (v.aval.shape for v in eqn.invars)
    lookup, padded_rows = Lookup.of(eqn), list(rows)
    padded = {*lookup.picked, *lookup.complete}  # an index beyond the table then adds to padding
    for d in lookup.complete:
        padded_rows[lookup.window[d]] = shape[d]
    if any(shape[d] != table[d] for d in range(len(table)) if d not in padded):
        return None
    return [shape, indices, padded_rows]


def _sizes(v: Atom) -> Iterable[tuple[int, int]]:
    """Returns the dimensions of an array with their sizes."""
    return enumerate(v.aval.shape)


_RULES = dict.fromkeys(CONTRACTIONS, _product) | {"reduce_sum": _sum, "scatter-add": _lookup}
