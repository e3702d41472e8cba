"""A function of positions run over a sequence chunk by chunk, each chunk rematerialised."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import LazyRng
from flax.errors import ScopeCollectionNotFound, ScopeParamNotFoundError, TraceContextError

from zerojax.graph.primitives import DRAWS
from zerojax.graph.search import everything, holds
from zerojax.xla import hijax
from zerojax.xla.jaxprs import open_jaxpr
from zerojax.xla.types import Equation, PyTree


def tiled(fn: Callable[..., PyTree], *, chunks: int, shards: int = 1) -> Callable[..., PyTree]:
    """Wraps ``fn`` of arrays [B, T, ...] to run on chunks of the sequence, one after another.

    The backward pass recomputes each chunk, so that the intermediate values of ``fn`` exist for one
    chunk at a time, in both passes. Results and gradients are those of ``fn``. In a decorated step
    the weights that ``fn`` closes over are gathered once in each pass, and their gradients
    reduce-scattered once, not once per chunk. These gradients are summed over the chunks in the
    dtype of the weights, as in any loop of JAX: in bfloat16 each chunk rounds the sum once more.
    If T is not a multiple of ``chunks``, the last chunk is padded with copies of the last position,
    which are dropped again.

    Args:
      fn: A function from arrays, or trees of arrays, [B, T, ...] to such arrays; its result at a
        position must not depend on other positions. A linen module that is bound, or is part of
        another module, is such a function too.
      chunks: Number of chunks, at most T / shards.
      shards: Equal stretches into which the sequence is sharded over the devices: the size of the
        mesh's axis "seq". Each chunk has a part of every stretch, so that no device waits for
        another.

    Raises:
      ValueError: ``chunks`` is not a positive int or exceeds T / shards; T is not a multiple of
        ``shards``; an argument or a result does not have T as its second dimension; ``fn`` draws
        random numbers (each chunk would draw the same), or is a module that changes its variables,
        or reads those of others.

    Example:
      >>> import jax.numpy as jnp
      >>> w = jnp.ones((4, 16))
      >>> tiled(lambda x: jnp.tanh(x @ w) @ w.T, chunks=4)(jnp.ones((2, 32, 4))).shape
      (2, 32, 4)
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"tiled({name}): chunks must be a positive int, not {chunks!r}")

    def by_chunks(*args: PyTree) -> PyTree:
        if isinstance(fn, nn.Module) and fn.is_initializing():
            # linen creates parameters at this call; those of a loop's trace could not leave it.
            return fn(*args)
        length = _length(name, args)
        stretch = length // shards
        if length % shards or chunks > stretch:
            raise ValueError(
                f"tiled({name}): {length} positions do not divide into {shards} equal shards of at "
                f"least {chunks} chunks: pad them, or lower chunks"
            )
        chunk_size = -(-stretch // chunks)
        # As chunks are rounded up, fewer of them may do.
        count, size = -(-stretch // chunk_size), chunk_size * shards
        stacks = jax.tree.map(lambda x: _stack(x, shards, count, chunk_size), args)
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacks)
        run = _function(name, fn)
        _check(name, run, first, size)
        # Forward and backward pass are two loops, between which XLA eliminates no common values.
        recomputed = jax.checkpoint(lambda chunk: run(*chunk), prevent_cse=False)
        results = jax.lax.map(recomputed, stacks)
        return jax.tree.map(lambda x: _unstack(x, shards, stretch), results)

    return functools.wraps(fn)(by_chunks) if not isinstance(fn, nn.Module) else by_chunks


def _length(name: str, args: PyTree) -> int:
    lengths = {}
    for path, x in jax.tree_util.tree_leaves_with_path(args):
        if jnp.ndim(x) < 2:
            raise ValueError(
                f"tiled({name}): argument {jax.tree_util.keystr(path)} has shape {jnp.shape(x)}, "
                "not [B, T, ...]; let the function close over other arrays"
            )
        lengths[jnp.shape(x)[1]] = jax.tree_util.keystr(path)
    if len(lengths) != 1:
        found = ", ".join(f"{length} in {path}" for length, path in lengths.items())
        raise ValueError(f"tiled({name}): arguments [B, T, ...] need one T, got {found or 'none'}")
    return next(iter(lengths))


def _stack(x: jax.Array, shards: int, count: int, size: int) -> jax.Array:
    """Splits [B, T, ...] into [count, B, shards * size, ...]; the last position of each stretch is
    repeated to fill the stretch's last chunk."""
    rest, stretch = x.shape[2:], x.shape[1] // shards
    x = x.reshape(x.shape[0], shards, stretch, *rest)
    if missing := count * size - stretch:
        widths = [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * len(rest)
        # Zeros could become NaN where positions do not: in a division by their norm, say.
        x = jnp.pad(x, widths, mode="edge")
    x = jnp.moveaxis(x.reshape(x.shape[0], shards, count, size, *rest), 2, 0)
    return x.reshape(count, x.shape[1], shards * size, *rest)


def _unstack(x: jax.Array, shards: int, stretch: int) -> jax.Array:
    count, rows, size, *rest = x.shape
    x = jnp.moveaxis(x.reshape(count, rows, shards, size // shards, *rest), 0, 2)
    x = x.reshape(rows, shards, -1, *rest)[:, :, :stretch]
    return x.reshape(rows, shards * stretch, *rest)


def _function(name: str, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns ``fn``; for a bound module, a pure function that closes over its variables."""
    if not isinstance(fn, nn.Module) or fn.scope is None:
        return fn
    mutable = fn.scope.mutable or []
    # Calls that ask for keys (has_rng) find those of the bound module.
    rngs = {key: LazyRng.as_jax_rng(rng) for key, rng in fn.scope.rngs.items()}
    module, variables = fn.unbind()
    # linen returns every mutable collection; an array that it has not replaced is the same object.
    read = {id(x) for x in jax.tree.leaves(variables)}

    def apply(*args: PyTree) -> PyTree:
        try:
            out, changed = module.apply(variables, *args, rngs=rngs, mutable=mutable)
        except (ScopeCollectionNotFound, ScopeParamNotFoundError) as error:
            raise ValueError(
                f"tiled({name}): the module reads variables of one created outside: create it "
                "inside"
            ) from error
        if names := [
            key
            for key, tree in changed.items()
            if any(id(x) not in read for x in jax.tree.leaves(tree))
        ]:
            raise ValueError(
                f"tiled({name}): the module changes {', '.join(names)}: call it without tiled"
            )
        return out

    return apply


def _draws(eqn: Equation) -> bool:
    return eqn.primitive.name in DRAWS


def _check(name: str, run: Callable[..., PyTree], first: PyTree, size: int) -> None:
    try:
        traced, results = hijax.trace(run, *first)
    except TraceContextError as error:
        raise ValueError(
            f"tiled({name}): the function changes an NNX module ({error.args[0].split(' (')[0]}), "
            "such as keys of dropout or running means, which chunks cannot; call it without tiled"
        ) from error
    # A loop runs one program on all chunks, with one key.
    if holds(open_jaxpr(traced)[0], _draws, everything):
        raise ValueError(
            f"tiled({name}): the function draws random numbers (dropout, or parameters of a linen "
            "module), the same in each chunk; draw them outside, pass a linen module itself, or "
            "call it without tiled"
        )
    for path, x in jax.tree_util.tree_leaves_with_path(results):
        if x.ndim < 2 or x.shape[1] != size:
            raise ValueError(
                f"tiled({name}): of {size} positions result {jax.tree_util.keystr(path)} has shape "
                f"{x.shape}, not [B, {size}, ...]"
            )
