"""The compiled programs of a generation: the prompts' start, and the loop over tokens.

Shapes: B rows, S tokens of the longest row with its new tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.devices.mesh import batch_axes, batch_devices
from zerojax.generation import weights
from zerojax.generation.beam_search import Ends, Search, beam_search, begun, only, repeated
from zerojax.generation.decoders import Cache, Decoder, Source, traced
from zerojax.generation.layers import Layered, run, shapes, unstacked
from zerojax.generation.sampling import Sampling
from zerojax.generation.weights import Storage
from zerojax.graph.rows import RowDimensions
from zerojax.trace.single_rows import SmallProducts, with_repeated_rows
from zerojax.xla.compiler import (
    DISABLED_PASSES,
    MERGED_PRODUCTS,
    JitOnceDecided,
    Options,
    options,
    streaming,
)

MULTIPLE = 64
"""Prompts and rows have room for a multiple of so many tokens, so that near lengths share programs:
each has programs of its own to compile. What lies beyond a row's tokens changes none of them."""

KEPT = 16
"""The number of generations whose compiled programs are kept; those of the oldest call go first."""


def rounded(tokens: int, limit: int | None) -> int:
    """Returns the next multiple of `MULTIPLE`, or the model's limit if that is less.

    >>> rounded(65, None), rounded(65, 100), rounded(130, 100)
    (128, 100, 130)
    """
    room = -(-tokens // MULTIPLE) * MULTIPLE
    return room if limit is None else max(tokens, min(room, limit))


class Lengths(NamedTuple):
    """Tokens of each row.

    Attributes:
      prompt: int32 [B], of the prompt.
      complete: int32 [B], of the prompt and the most new tokens. They are values, not shapes, so
        that calls for more or fewer new tokens run one program.
    """

    prompt: Any
    complete: Any


class Progress(NamedTuple):
    """The state of a generation between two tokens.

    Attributes:
      tokens: int32 [B, S], prompts and new tokens.
      new: int32 [B], the tokens of the last step.
      at: int32 [B], the position of each row's last token.
      done: bool [B], the rows that have ended.
      invalid: bool [B], the rows whose logits contain NaN.
      step: int32 [], the number of steps.
      cache: The arrays that the decoder keeps of the tokens before `at`.
    """

    tokens: jax.Array
    new: jax.Array
    at: jax.Array
    done: jax.Array
    invalid: jax.Array
    step: jax.Array
    cache: Layered


@dataclasses.dataclass(frozen=True)
class Generation:
    """Everything that decides the programs of a generation, but shapes.

    Attributes:
      decoder: The model.
      cache: The arrays of its cache.
      sampling: The choice of tokens.
      common: The number of tokens that are read of each prompt at once: of the longest if the
        decoder takes positions, rounded up; else of the shortest.
      ends: The tokens at the end of a row.
      storage: The places of parameters and cache.
      search: The beam search, if there is more than one beam.
      small_products: The products of one row that compute two; None for none.
    """

    decoder: Decoder
    cache: Cache
    sampling: Sampling
    common: int
    ends: Ends
    storage: Storage
    search: Search
    small_products: SmallProducts | None = None

    def run(self, function: Callable[..., Progress], arrays: Layered, *args: Any) -> Progress:
        """Runs one of the methods below on the parameters at rest, gathered where they are used."""
        mesh, shards = self.storage.mesh, self.storage.shards
        if mesh is None or not any(shards):
            return function(arrays, *args)
        closed, out = jax.make_jaxpr(function, return_shape=True)(shapes(arrays), *args)
        inserter = weights.inserter_of(mesh)
        values = weights.entered(arrays, shards, inserter)
        given = jax.tree.leaves(args)
        cache = {id(x) for arg in args if isinstance(arg, Progress) for x in arg.cache}
        dims = [0 if jnp.ndim(x) and id(x) not in cache else None for x in given]
        rows = RowDimensions.of_program(closed, [*[None] * len(values), *dims])
        outs = inserter(closed, [*values, *given], rows=rows)
        progress: Progress = jax.tree.unflatten(jax.tree.structure(out), outs)
        return progress

    def _read(
        self, arrays: Layered, cache: Layered | Source, tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Layered]:
        """Calls the decoder; unstacked layers run one after another."""
        before: Any = cache if isinstance(cache, Source) else shapes(cache)
        structures = self.storage.structure, self.cache.structure
        closed = traced(self.decoder, structures, shapes(arrays), before, tokens, positions)
        given = [*arrays, *(cache if isinstance(cache, list) else jax.tree.leaves(cache))]
        if self.small_products:
            closed = with_repeated_rows(closed, self.small_products)
        logits, *after = run(closed, [*given, tokens, positions])
        if isinstance(cache, Source):
            return logits, unstacked(after, self.storage.cache_layers)
        # An array that does not change keeps its layers, so that a beam search sees that.
        layers = zip(cache, after, self.storage.cache_layers, strict=True)
        return logits, [old if old is x else unstacked([x], [n])[0] for old, x, n in layers]

    def start(
        self,
        arrays: Layered,
        tokens: jax.Array,
        lengths: Lengths,
        source: Source | None,
    ) -> Progress:
        """Reads the prompts but their last tokens, and the sources.

        Args:
          arrays: The parameters.
          tokens: int32 [B, S].
          lengths: Those of the rows.
          source: The sources of an encoder-decoder.
        """
        rows, common = len(tokens), self.common
        empty = [*map(self._empty, self.cache.shapes, self.cache.rows)]
        cache = unstacked(empty, self.storage.cache_layers)
        at = lengths.prompt - 1
        if source is not None:
            _, start = self._read(arrays, source, tokens[:, :1], jnp.zeros((rows, 1), jnp.int32))
            cache = begun(cache, start)
        if self.decoder.takes_positions:
            if common > 1:
                # Tokens after a prompt's end have the position of its last: positions beyond it may
                # change the rotation of all.
                columns = jnp.minimum(jnp.arange(common), at[:, None])
                _, cache = self._read(arrays, cache, tokens[:, :common], columns)
        else:
            at = jnp.full_like(at, common - 1)

            def read(cache: Layered, column: jax.Array) -> tuple[Layered, None]:
                token = lax.dynamic_slice_in_dim(tokens, column, 1, axis=1)
                positions = jnp.broadcast_to(column, (rows, 1))
                return self._read(arrays, cache, token, positions)[1], None

            cache, _ = lax.scan(read, cache, jnp.arange(common - 1))
        no = jnp.zeros(rows, bool)
        return Progress(tokens, jnp.zeros_like(at), at, no, no, jnp.int32(0), cache)

    def _empty(self, x: jax.ShapeDtypeStruct, rows: int) -> jax.Array:
        """Returns zeros for an array of the cache, sharded over the rows' devices."""
        empty, mesh = jnp.zeros(x.shape, x.dtype), self.storage.mesh
        if mesh is None or rows < 0 or x.shape[rows] % batch_devices(mesh):
            return empty
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        spec[rows] = batch_axes(mesh)
        return lax.with_sharding_constraint(empty, NamedSharding(mesh, PartitionSpec(*spec)))

    def advance(
        self, arrays: Layered, progress: Progress, lengths: Lengths, key: jax.Array | None
    ) -> Progress:
        """Adds one token to each row that has not ended."""
        tokens, at, done = progress.tokens, progress.at, progress.done
        rows = jnp.arange(len(at))
        logits, cache = self._read(arrays, progress.cache, tokens[rows, at][:, None], at[:, None])
        logits = logits[:, -1]
        invalid = progress.invalid | (~done & jnp.isnan(logits).any(-1))
        if self.ends.forced:
            is_last = (at + 2 == lengths.complete)[:, None]
            logits = jnp.where(is_last, only(self.ends.forced, logits.shape[-1]), logits)
        step_key = None if key is None else jax.random.fold_in(key, progress.step)
        drawn = self.sampling.choose(logits, step_key)
        following = jnp.minimum(at + 1, tokens.shape[1] - 1)
        is_prompt = at + 1 < lengths.prompt
        new = jnp.where(is_prompt, tokens[rows, following], drawn)
        new = jnp.where(done, self.ends.pad, new)
        tokens = tokens.at[rows, following].set(jnp.where(done, tokens[rows, following], new))
        at = jnp.where(done, at, following)
        matches = [new == eos for eos in self.ends.eos]
        ended = functools.reduce(jnp.logical_or, matches, jnp.array(False))
        done |= (~is_prompt & ended) | (at + 1 >= lengths.complete)
        return Progress(tokens, new, at, done, invalid, progress.step + 1, cache)

    def finish(
        self, arrays: Layered, progress: Progress, lengths: Lengths, key: jax.Array | None
    ) -> Progress:
        """Adds tokens until all rows have ended, or the logits of one are NaN."""

        def goes_on(progress: Progress) -> jax.Array:
            return ~progress.done.all() & ~progress.invalid.any()

        return lax.while_loop(
            goes_on, lambda progress: self.advance(arrays, progress, lengths, key), progress
        )

    def search_beams(self, arrays: Layered, progress: Progress, lengths: Lengths) -> Progress:
        """Adds the tokens of the best beam of each row."""
        count, (rows, longest) = self.search.num_beams, progress.tokens.shape
        layers = zip(self.cache.rows, self.storage.cache_layers, strict=True)
        axes = [(axis - 1,) * n if n else axis for axis, n in layers]
        start = lengths.prompt - 1
        first = jnp.repeat(start, count)

        def step(tokens: jax.Array, position: jax.Array, cache: Layered) -> Any:
            at = (first + position)[:, None]
            logits, cache = self._read(arrays, cache, tokens[:, None], at)
            return logits[:, -1], cache

        targets, scores = beam_search(
            step,
            repeated(progress.cache, axes, count),
            progress.tokens[jnp.arange(rows), start],
            self.ends,
            dataclasses.replace(self.search, max_length=longest),
            stop=(lengths.complete - start).max(),
            cache_axes=axes,
        )
        columns = jnp.arange(longest) - start[:, None]
        new = jnp.take_along_axis(targets, jnp.maximum(columns, 0), axis=1)
        tokens = jnp.where(columns < 0, progress.tokens, new)
        return progress._replace(tokens=tokens, invalid=jnp.isnan(scores))


class Programs:
    """The compiled programs of a generation.

    Args:
      generation: The computation.
      devices: The devices for which they are compiled; None for the default device.

    Attributes:
      on_host: Whether the parameters are in host memory. XLA would then copy all of them to the
        device before a loop over tokens.
    """

    def __init__(self, generation: Generation, devices: Mesh | None) -> None:
        self.on_host = generation.storage.on_host
        if devices is not None and not any(generation.storage.shards):
            small = SmallProducts.on(devices)
            generation = dataclasses.replace(generation, small_products=small)

        def chosen() -> Options | None:
            if devices is None:
                return None
            left_out: Options = {DISABLED_PASSES: MERGED_PRODUCTS}
            if self.on_host:
                return streaming(devices, left_out)
            return options(devices, left_out, overlap=True)

        def program(function: Callable[..., Progress], **donated: int) -> JitOnceDecided:
            gathered = functools.partial(generation.run, function)
            return JitOnceDecided(gathered, chosen, **donated)

        self.start = program(generation.start)
        self.advance = program(generation.advance, donate_argnums=1)
        self.finish = program(generation.finish, donate_argnums=1)
        self.search_beams = program(generation.search_beams, donate_argnums=1)


@functools.lru_cache(maxsize=KEPT)
def programs_of(generation: Generation, devices: Any) -> Programs:
    """Returns the programs of a generation, those of an earlier call if they are kept."""
    return Programs(generation, devices)
