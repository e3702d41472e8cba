"""One call of :func:`zerojax.generate`: its arguments are checked and placed, and programs run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from zerojax.devices.mesh import batch_axes, batch_devices
from zerojax.distributed.equality import require_same_values
from zerojax.distributed.lockstep import lockstep
from zerojax.generation import weights
from zerojax.generation.beam_search import Search
from zerojax.generation.checks import check_dtype, check_key, check_values, integer, integers
from zerojax.generation.decoders import Cache, EncoderDecoder, Source, decoder_of
from zerojax.generation.program import Generation, Programs, Progress, programs
from zerojax.generation.prompts import Prompts, Tokens
from zerojax.generation.sampling import Sampling
from zerojax.generation.weights import Weights
from zerojax.xla.types import PyTree

SAME_PROMPTS = (
    "generate takes the prompts of all processes, equal in each, and returns all rows in each: "
    "combine them by jax.experimental.multihost_utils.process_allgather, and derive keys from one "
    "seed"
)


class Run(NamedTuple):
    """One call of :func:`generate`.

    Attributes:
      generation: What the programs compute.
      programs: The compiled programs.
      arrays: The parameters.
      tokens: int32 [B, S], the prompts with room for the new tokens.
      lengths: int32 [B], of the prompts.
      source: The sources of an encoder-decoder.
      common: The number of tokens that are read of each prompt, see :meth:`Generation.start`.
      key: The key of the draws.
    """

    generation: Generation
    programs: Programs
    arrays: list[Any]
    tokens: Any
    lengths: Any
    source: Source | None
    common: int
    key: jax.Array | None

    @classmethod
    def of(
        cls,
        model: object,
        params: PyTree,
        tokens: Tokens,
        mask: ArrayLike | None,
        max_new_tokens: int,
        sampling: Sampling,
        search: Search,
        key: jax.Array | None,
        eos: int | Sequence[int] | None,
        pad: int | None,
        how: Weights | None,
        dtype: DTypeLike | None,
    ) -> Run:
        check_values(params=params, tokens=tokens, mask=mask, key=key)
        max_new_tokens = integer("max_new_tokens", max_new_tokens)
        _check_options(max_new_tokens, sampling, search, key, how)
        check_dtype(dtype)
        decoder, params = decoder_of(model, params)
        check_values(params=params)
        given, source = Prompts.of(tokens, mask), None
        prompts = given
        if isinstance(decoder, EncoderDecoder):
            eos = decoder.config.eos_token_id if eos is None else eos
            pad = decoder.config.pad_token_id if pad is None else pad
            source = Source(given.tokens, given.mask)
            prompts = Prompts.of([[decoder.start]] * len(given.tokens), None)
        rows, longest = prompts.tokens.shape
        total = longest + max_new_tokens
        _check_room(longest, max_new_tokens, decoder.limit())
        shapes = weights.shapes(params, dtype)
        cache = Cache.of(decoder, shapes, rows, total, source)
        given.check(cache.vocabulary)
        ends, pad = _end_tokens(eos, pad, cache.vocabulary)
        stacks = cache.stacks(decoder, shapes)
        kept = search.num_beams * cache.bytes
        mesh = weights.mesh_of(jax.tree.leaves(params))
        if mesh is not None and (calls := lockstep(mesh)):
            calls.note("zerojax.generate")
            options = (sampling, search, max_new_tokens, ends, pad, how, dtype)
            values = {"options": np.array(repr(options)), "key": key, **given._asdict()}
            require_same_values("zerojax.generate", values, SAME_PROMPTS)
        placed = weights.place(jax.tree.leaves(params), how, dtype, kept, stacks.params)
        generation = Generation(
            decoder, cache, sampling, max_new_tokens, ends, pad, jax.tree.structure(params),
            placed.cache_layers(stacks), placed.mesh, placed.shards, search,
        )  # fmt: skip
        padded = np.full((rows, total), pad, np.int32)
        padded[:, :longest] = np.where(prompts.mask, prompts.tokens, pad)
        lengths = prompts.lengths
        common = longest if decoder.takes_positions else int(lengths.min())
        arrays: tuple[Any, Any, Any] = (padded, lengths, source)
        if isinstance(placed.mesh, Mesh):
            divides = rows % batch_devices(placed.mesh) == 0
            spec = PartitionSpec(batch_axes(placed.mesh) if divides else None)
            arrays = _on(placed.mesh, spec, arrays)
            key = _on(placed.mesh, PartitionSpec(), key)
        compiled = programs(generation, placed.mesh)
        run = cls(generation, compiled, placed.arrays, *arrays, common, key)
        if search.num_beams > 1:
            run.check_lengths("num_beams")
        return run

    def start(self) -> Progress:
        progress: Progress = self.programs.start(
            self.arrays, self.tokens, self.lengths, self.source, self.common
        )
        return progress

    def finish(self) -> Progress:
        progress, programs = self.start(), self.programs
        if self.generation.search.num_beams > 1:
            progress = programs.search_beams(self.arrays, progress, self.lengths)
        elif programs.on_host:
            for latest in self.steps(progress):
                progress = latest
        else:
            progress = programs.finish(self.arrays, progress, self.lengths, self.key)
        return progress

    def check_lengths(self, what: str) -> None:
        """Rejects prompts of different lengths for a model that takes one token at a time."""
        lengths = np.asarray(readable(self.lengths))
        if self.generation.decoder.takes_positions or len({*lengths}) == 1:
            return
        raise ValueError(
            f"{what}: the model takes one token of all rows at a time, so that new tokens of "
            "shorter prompts come before longer prompts are read: pass prompts of one length, or "
            "call zerojax.generate without beams"
        )

    def check(self, progress: Progress) -> None:
        """Raises an error if the logits of a row contain NaN."""
        invalid = np.asarray(readable(progress.invalid))
        if invalid.any():
            row = int(np.argmax(invalid))
            at = int(np.asarray(readable(progress.at))[row])
            raise FloatingPointError(
                f"the logits of row {row} after its first {at} tokens contain NaN, so that no "
                "token follows: check the parameters (jax.debug_nans names the operation)"
            )

    def steps(self, progress: Progress) -> Iterator[Progress]:
        """Yields the progress after each token."""
        while not np.asarray(readable(progress.done)).all():
            progress = self.programs.advance(self.arrays, progress, self.lengths, self.key)
            self.check(progress)
            yield progress


def _check_options(
    max_new_tokens: int, sampling: Sampling, search: Search, key: object, how: Weights | None
) -> None:
    """Rejects options that are out of range, or that exclude each other."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens} must be 1 or more")
    if not sampling.is_greedy:
        if key is None:
            raise ValueError(
                f"temperature = {sampling.temperature} draws tokens: pass key=jax.random.key(seed)"
            )
        check_key(key)
        if search.num_beams > 1:
            raise ValueError(
                f"num_beams = {search.num_beams} beside temperature = {sampling.temperature}: a "
                "beam search draws no tokens; leave one of the two out"
            )
    if how not in (None, "gathered", "by_layer"):
        raise ValueError(f'weights = {how!r} must be "gathered", "by_layer" or None')


def _check_room(longest: int, max_new_tokens: int, limit: int | None) -> None:
    """Rejects rows that are longer than the model's longest."""
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"the longest row starts with {longest} tokens, padding included, and "
            f"max_new_tokens = {max_new_tokens}: the model has positions for {limit}. Shorten "
            f"the prompt, or pass max_new_tokens = {max(limit - longest, 0)} or less"
        )


def _end_tokens(
    eos: int | Sequence[int] | None, pad: int | None, vocabulary: int
) -> tuple[tuple[int, ...], int]:
    """Returns the tokens that end a row, and the one after the end.

    Raises:
      ValueError: A token is not in the vocabulary.
    """
    ends = integers("eos", eos)
    pad = integer("pad", next(iter(ends), 0) if pad is None else pad)
    for name, token in (*(("eos", end) for end in ends), ("pad", pad)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"{name} = {token} is not among the model's {vocabulary} tokens")
    return ends, pad


def _on(mesh: Mesh, spec: PartitionSpec, values: PyTree) -> PyTree:
    """Returns arrays, equal in all processes, on the devices of a mesh."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), values
    )


def readable(x: jax.Array) -> jax.Array:
    """Returns an array that every process can read: replicated if processes share it."""
    if getattr(x, "is_fully_addressable", True):
        return x
    mesh = weights.mesh_of([x])
    assert mesh is not None
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
