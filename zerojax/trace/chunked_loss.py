"""The loss over a large vocabulary, computed for some tokens at a time.

The logits of a language model, and their cotangents, are often the largest arrays of a step: 8192
tokens and a vocabulary of 128256 take 2.1 GB in bfloat16, three times. A traced step contains the
loss and its gradient. Where the cotangent of each token depends on this token alone, as in a mean
of the tokens' losses, one loop computes both: an iteration multiplies some tokens with the head,
computes their losses and their cotangents, and adds to the gradient of the head, in float32. No
product runs twice, as it would in a rematerialised loss.

A loss of the logits of all tokens but the last (``logits[:, :-1]``) is divided as if it had all:
the last chunk computes a token more, of which nothing is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as prims

from zerojax.graph.contractions import RESULT, Contraction
from zerojax.graph.def_use import Graph, Slice, graph_of
from zerojax.graph.dimensions import Names, names_of, same_dimensions
from zerojax.graph.lookups import Lookup
from zerojax.graph.primitives import CONTRACTIONS
from zerojax.graph.rows import RowDimensions
from zerojax.graph.search import holds, runs_regions
from zerojax.xla import jaxprs
from zerojax.xla.rewriter import Rewriter, renamed, replaced, traced
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr

LEAST = 1 << 28
"""The fewest logits of a device that are computed in chunks, and the most of a chunk: 512 MB in
bfloat16."""

TIMES = 8
"""The fewest logits of a device, as a multiple of the elements of the head. Each chunk reads and
writes the sum of the head's gradient: with fewer logits this takes longer than a tenth of the
products, unless each device sums its own shard."""


class Sizes(NamedTuple):
    """The sizes on which it depends whether a loss is computed in chunks.

    Attributes:
      devices: The number of devices that share the rows.
      sharded: Whether a head that is larger than the hidden states may stay sharded.
      least: See :data:`LEAST`.
      times: See :data:`TIMES`.
    """

    devices: int
    sharded: bool
    least: int = LEAST
    times: int = TIMES


def with_chunked_losses(
    closed: AnyJaxpr, rows: Callable[[AnyJaxpr], RowDimensions], sizes: Sizes
) -> AnyJaxpr:
    """Returns a traced step that computes the loss over a large vocabulary for some tokens at a
    time; the step itself if it has none, or if its loss cannot be divided.

    The numbers are those of the step, except that the gradient of the head is summed over the
    chunks in float32 or wider, and rounded once.

    Args:
      closed: The step.
      rows: Returns the dimensions along which rows of the batch lie, of a form of the step.
      sizes: The sizes on which it depends whether there is such a loss.
    """
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    least = sizes.least * sizes.devices

    def is_large(eqn: Equation) -> bool:
        return eqn.primitive.name in CONTRACTIONS and eqn.outvars[0].aval.size >= least

    if not holds(jaxpr, is_large, runs_regions):
        return closed
    opened = new = _Inliner().body(jaxpr)
    while (found := _Loss.of(new, rows(new), sizes)) is not None:
        new = found.in_chunks(new)
    return closed if new is opened else jaxprs.with_body(closed, new)


class _Inliner(Rewriter):
    """Inlines the calls of a program, such as that of ``jnp.take_along_axis``."""

    def equation(self, eqn: Equation, jaxpr: Jaxpr) -> Sequence[Equation]:
        if not jaxprs.is_plain_call(eqn):
            return [eqn]
        body = jaxprs.called_jaxpr(eqn)
        inner, _ = jaxprs.open_jaxpr(body)
        computed = {*graph_of(inner).results(lambda each: True)}
        if len(computed.intersection(jaxprs.variables(inner.outvars))) < len(eqn.outvars):
            return [eqn]  # it returns an operand
        run = functools.partial(jaxprs.evaluate, body, opens=jaxprs.is_plain_call)
        return replaced(eqn, lambda *operands: run(operands), eqn.invars)


class _Loss(NamedTuple):
    """The equations that compute a loss and its gradient from hidden states and a head.

    Attributes:
      part: The equations.
      head: The product that computes the logits.
      tokens: By value, the dimension of its tokens.
      sums: The values that sum over tokens, in order.
      length: The number of tokens of a row.
      chunks: The number of chunks.
    """

    part: Slice
    head: Equation
    tokens: Mapping[Atom, int]
    sums: Sequence[Atom]
    length: int
    chunks: int

    @property
    def size(self) -> int:
        """The number of tokens of a chunk."""
        return self.length // self.chunks

    @classmethod
    def of(cls, jaxpr: Jaxpr, rows: RowDimensions, sizes: Sizes) -> _Loss | None:
        """Returns the first loss of a program that can be divided; None if there is none."""
        graph = graph_of(jaxpr)
        for head in graph.named(*CONTRACTIONS):
            if (at := _tokens_of_head(head, rows, sizes)) is None:
                continue
            if (loss := cls._divided(graph, head, at, sizes.least * sizes.devices)) is not None:
                return loss
        return None

    @classmethod
    def _divided(cls, graph: Graph, head: Equation, at: int, most: int) -> _Loss | None:
        """Returns the loss of the logits that a product computes, with tokens along ``at``; None if
        it cannot be divided."""
        (logits,) = head.outvars
        size, length = logits.aval.size, logits.aval.shape[at]
        # The arrays of all tokens, or of all but the last; the head is smaller.
        part = graph.connected(logits, lambda v: 4 * v.aval.size >= 3 * size)
        tokens = same_dimensions(part.equations, (logits, at), _names)
        if tokens is None or (chunks := _chunks(size, length, most)) is None:
            return None
        sums = [v for v in part.results if v not in tokens]
        needs_sum = not {*sums}.isdisjoint(jaxprs.operands(part.equations))
        divides = all(map(functools.partial(_divides, tokens, length), part.equations))
        return cls(part, head, tokens, sums, length, chunks) if divides and not needs_sum else None

    def in_chunks(self, jaxpr: Jaxpr) -> Jaxpr:
        """Returns the program with a loop in place of the loss."""
        graph, inputs = graph_of(jaxpr), self.part.ends
        outs, (before, after) = graph.used_outside(self.part), graph.around(self.part)
        program = jaxpr.replace(eqns=[*self.part.equations], outvars=[*self.sums, *outs])
        with jaxprs.traced_where(self.head):
            loop, results = traced(lambda *xs: self._loop(program, outs, xs), inputs)
        loop = renamed(loop, dict(zip(results, outs, strict=True)))
        return jaxpr.replace(eqns=[*before, *loop, *after])

    def _loop(
        self, program: Jaxpr, outs: Sequence[Atom], values: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """Returns the loss's results ``outs`` for the values of its inputs.

        Args:
          program: The loss, which returns ``sums`` and ``outs``.
        """
        given = dict(zip(self.part.ends, values, strict=True))
        by_token = [v for v in given if v in self.tokens]

        def chunk(
            totals: list[jax.Array], entries: tuple[jax.Array, list[jax.Array]]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            index, parts = entries
            env = given | dict(zip(by_token, parts, strict=True))
            results = jaxprs.interpret(program, env, functools.partial(self._equation, index))
            added = [x.astype(t.dtype) for x, t in zip(results, totals, strict=False)]
            # The way in which differentiation sums the gradients of a loop's constants.
            totals = [*map(prims.add_jaxvals_p.bind, totals, added)]
            pairs = zip(outs, results[len(totals) :], strict=True)
            return totals, [x for v, x in pairs if v in self.tokens]

        zeros = [jnp.zeros(v.aval.shape, _wide(v)) for v in self.sums]
        stacks = [self._split(given[v], self.tokens[v]) for v in by_token]
        totals, results = lax.scan(chunk, zeros, (jnp.arange(self.chunks), stacks))
        sums, joined = dict(zip(self.sums, totals, strict=True)), iter(results)
        return [
            self._joined(v, next(joined)) if v in self.tokens else sums[v].astype(v.aval.dtype)
            for v in outs
        ]

    def _equation(
        self, index: jax.Array, eqn: Equation, values: list[jax.Array]
    ) -> Sequence[jax.Array]:
        """Returns the results of an equation for the tokens of chunk ``index``."""
        params, out = dict(eqn.params), eqn.outvars[0]
        if eqn.primitive.name in CONTRACTIONS and out in self.sums:
            params["preferred_element_type"] = _wide(out)
        # Of a broadcast, a reshape and a slice.
        for name in params.keys() & {"shape", "new_sizes", "limit_indices"}:
            params[name] = self._sizes(out, jaxprs.param(eqn, name))
        if "slice_sizes" in params:  # of a gather
            params["slice_sizes"] = self._sizes(eqn.invars[0], jaxprs.param(eqn, "slice_sizes"))
        at = self.tokens.get(out) if eqn.primitive is prims.pad_p else None
        if at is not None:
            padding = enumerate(jaxprs.param(eqn, "padding_config"))
            params["padding_config"] = tuple((0, 0, 0) if d == at else x for d, x in padding)
        with jaxprs.traced_where(eqn):
            results = jaxprs.bind(eqn, values, params)
            if at is None:
                return results
            token = index * self.size + lax.broadcasted_iota(jnp.int32, results[0].shape, at)
            return [jnp.where(token < eqn.invars[0].aval.shape[at], results[0], values[1])]

    def _sizes(self, v: Atom, sizes: Sequence[int]) -> tuple[int, ...]:
        at = self.tokens.get(v)
        return tuple(self.size if d == at and n > 1 else n for d, n in enumerate(sizes))

    def _split(self, x: jax.Array, at: int) -> jax.Array:
        """Splits dimension ``at`` into chunks, along a new first dimension."""
        if missing := self.length - x.shape[at]:
            # Of tokens that no result uses: zeros might be no valid numbers.
            x = jnp.pad(x, [(0, missing if d == at else 0) for d in range(x.ndim)], mode="edge")
        shape = (*x.shape[:at], self.chunks, self.size, *x.shape[at + 1 :])
        return jnp.moveaxis(x.reshape(shape), at, 0)

    def _joined(self, v: Atom, x: jax.Array) -> jax.Array:
        """Joins the chunks of a value."""
        at = self.tokens[v]
        x = jnp.moveaxis(x, 0, at)
        x = x.reshape(*x.shape[:at], self.length, *x.shape[at + 2 :])
        return lax.slice_in_dim(x, 0, v.aval.shape[at], axis=at)


def _tokens_of_head(eqn: Equation, rows: RowDimensions, sizes: Sizes) -> int | None:
    """Returns the dimension of the tokens of each row in a product's result; None if the product is
    not one of hidden states with a head to as many logits as ``sizes`` says."""
    product, (logits,), devices = Contraction.of(eqn), eqn.outvars, sizes.devices
    if logits.aval.size < sizes.least * devices or any(product.batched):
        return None
    inputs, of_rows = [i for i, v in enumerate(eqn.invars) if rows.dims(v)], rows.dims(logits)
    if len(inputs) != 1 or len(of_rows) != 1:
        return None
    (x,), names = inputs, product.names
    hidden, head = eqn.invars[x].aval.size, eqn.invars[1 - x].aval
    stays = hidden <= head.size and all(head.shape[d] % devices == 0 for d in product.free(1 - x))
    times = 1 if sizes.sharded and stays else sizes.times
    if logits.aval.size < max(4 * hidden, 2 * head.size, times * head.size * devices):
        return None
    free = [d for d, name in enumerate(names[RESULT]) if name in names[x] and d not in of_rows]
    return max(free, key=lambda d: logits.aval.shape[d], default=None)


def _names(eqn: Equation) -> Names | None:
    """Returns the names of an equation's dimensions, also of one that leaves out the last entries
    of a dimension, or pads it after the last one."""
    if eqn.primitive is prims.slice_p:
        starts, strides = jaxprs.param(eqn, "start_indices"), jaxprs.param(eqn, "strides")
        steps = strides or [1] * len(starts)
        pairs = enumerate(zip(starts, steps, strict=True))
        names = [d if pair == (0, 1) else None for d, pair in pairs]
        return [names, names]
    if eqn.primitive is prims.pad_p:
        padding = enumerate(jaxprs.param(eqn, "padding_config"))
        names = [d if low == between == 0 <= high else None for d, (low, high, between) in padding]
        return [names, (), names]
    return names_of(eqn)


def _divides(tokens: Mapping[Atom, int], length: int, eqn: Equation) -> bool:
    """Returns whether an equation computes each token from the same one of its operands, or sums
    over all tokens."""
    (out, *others), lookup = eqn.outvars, Lookup.of(eqn)
    named = zip((*eqn.invars, *eqn.outvars), _names(eqn) or (), strict=True)
    of_tokens = {of[tokens[v]] for v, of in named if jaxprs.variables([v]) and v in tokens}
    if len(of_tokens) != 1 or None in of_tokens or others:
        return False
    if lookup is not None and tokens.get(eqn.invars[0]) in lookup.picked:
        return False
    taken = {v.aval.shape[tokens[v]] for v in jaxprs.variables(eqn.invars) if v in tokens}
    is_sum = taken == {length} and eqn.primitive.name in CONTRACTIONS | {"reduce_sum"}
    return out in tokens or is_sum


def _chunks(logits: int, tokens: int, most: int) -> int | None:
    """Returns the number of chunks of ``tokens`` tokens, so that a chunk has at most ``most``
    logits; None if no divisor is near."""
    wanted = max(2, -(-logits // most))
    return next((k for k in range(wanted, 8 * wanted) if tokens % k == 0), None)


def _wide(v: Atom) -> jnp.dtype:
    dtype = v.aval.dtype
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype
