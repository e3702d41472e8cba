"""One call of :func:`zerojax.generate`: its arguments are checked and placed, and programs run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax.devices.mesh import batch_axes, batch_devices
from zerojax.distributed.equality import require_same_values
from zerojax.distributed.lockstep import lockstep
from zerojax.generation import weights as at_rest
from zerojax.generation.beam_search import Ends
from zerojax.generation.checks import check_dtype, check_key, check_values, integers, require
from zerojax.generation.decoders import Cache, EncoderDecoder, Source, decoder_of
from zerojax.generation.options import Options
from zerojax.generation.program import (
    Generation,
    Lengths,
    Programs,
    Progress,
    programs_of,
    rounded,
)
from zerojax.generation.prompts import Prompts, Tokens
from zerojax.xla.types import PyTree

SAME_PROMPTS = (
    "Pass all prompts in every process (jax.experimental.multihost_utils.process_allgather), "
    "and a key of one seed"
)


class Run(NamedTuple):
    """One call of :func:`generate`.

    Attributes:
      generation: What the programs compute.
      programs: The compiled programs.
      arrays: The parameters.
      tokens: int32 [B, S], the prompts with room for the new tokens or more.
      lengths: Those of the rows.
      source: The sources of an encoder-decoder.
      total: The tokens of the longest row.
      key: The key of the draws.
    """

    generation: Generation
    programs: Programs
    arrays: list[Any]
    tokens: Any
    lengths: Lengths
    source: Source | None
    total: int
    key: jax.Array | None

    @classmethod
    def of(
        cls,
        model: object,
        params: PyTree,
        tokens: Tokens,
        options: Options,
        *,
        mask: ArrayLike | None = None,
        key: jax.Array | None = None,
    ) -> Run:
        check_values(params=params, tokens=tokens, mask=mask, key=key)
        _check_options(options, key)
        check_dtype(options.dtype)
        decoder, params = decoder_of(model, params)
        check_values(params=params)
        given, source, eos, pad = Prompts.of(tokens, mask), None, options.eos, options.pad
        limit, prompts = decoder.limit(), given
        if isinstance(decoder, EncoderDecoder):
            eos = integers("eos", decoder.config.eos_token_id) if eos is None else eos
            pad = decoder.config.pad_token_id if pad is None else pad
            source = given.source(rounded(given.tokens.shape[1], limit))
            prompts = Prompts.of([[decoder.start]] * len(given.tokens), None)
        rows, longest = prompts.tokens.shape
        total = longest + options.max_new_tokens
        _check_room(longest, options.max_new_tokens, limit)
        shapes, room = at_rest.shapes(params, options.dtype), rounded(total, limit)
        cache = Cache.of(decoder, shapes, rows, room, source)
        given.check(cache.vocabulary)
        pad = next(iter(eos or ()), 0) if pad is None else pad
        ends = Ends(eos or (), pad, options.forced_eos)
        for name, each in zip(
            ("eos", "pad", "forced_eos"), (ends[0], (pad,), ends[2]), strict=True
        ):
            for token in each:
                is_known, of_model = 0 <= token < cache.vocabulary, f"{cache.vocabulary} tokens"
                require(is_known, name, token, f"one of the model's {of_model}")
        mesh = at_rest.mesh_of(jax.tree.leaves(params))
        if (beams := options.search.num_beams) > cache.vocabulary:
            raise ValueError(
                f"num_beams = {beams}: the model has only {cache.vocabulary} tokens; pass fewer"
            )
        if mesh is not None and (calls := lockstep(mesh)):
            calls.note("zerojax.generate")
            how = np.array(repr((options, ends)))
            values = {"options": how, "key": key, **given._asdict()}
            require_same_values("zerojax.generate", values, SAME_PROMPTS)
        placed, storage = at_rest.place(
            params, options.weights, options.dtype, beams * cache.bytes, cache.stacks
        )
        lengths = prompts.lengths
        common = int(lengths.min())
        if decoder.takes_positions:
            common = min(rounded(longest, limit), room) if longest > 1 else 1
        generation = Generation(
            decoder, cache, options.sampling, common, ends, storage, options.search
        )
        padded = np.full((rows, room), pad, np.int32)
        padded[:, :longest] = np.where(prompts.mask, prompts.tokens, pad)
        arrays: tuple[Any, Any, Any] = (
            padded, Lengths(lengths, lengths + np.int32(options.max_new_tokens)), source
        )  # fmt: skip
        if isinstance(storage.mesh, Mesh):
            divides = rows % batch_devices(storage.mesh) == 0
            spec = PartitionSpec(batch_axes(storage.mesh) if divides else None)
            arrays = _on(storage.mesh, spec, arrays)
            key = _on(storage.mesh, PartitionSpec(), key)
        compiled = programs_of(generation, storage.mesh)
        run = cls(generation, compiled, placed, *arrays, total, key)
        if beams > 1:
            run.check_lengths("num_beams")
        return run

    def start(self) -> Progress:
        progress: Progress = self.programs.start(
            self.arrays, self.tokens, self.lengths, self.source
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
        lengths = np.asarray(readable(self.lengths.prompt))
        if self.generation.decoder.takes_positions or len({*lengths}) == 1:
            return
        raise ValueError(
            f"{what}: the model reads one token of all rows at a time: pass prompts of one length"
        )

    def written(self, progress: Progress) -> jax.Array:
        """Returns the rows, int32 [B, total]."""
        tokens = readable(progress.tokens)
        # On the host: JAX would compile a slice for each length.
        host = np.asarray(tokens)[:, : self.total]
        is_placed = isinstance(self.tokens, jax.Array) and self.tokens.is_fully_addressable
        sharding = (self.tokens if is_placed else tokens).sharding
        return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)

    def check(self, progress: Progress) -> None:
        """Raises an error if the logits of a row contain NaN."""
        invalid = np.asarray(readable(progress.invalid))
        if invalid.any():
            row = int(np.argmax(invalid))
            at = int(np.asarray(readable(progress.at))[row])
            raise FloatingPointError(
                f"the logits of row {row} after its first {at} tokens contain NaN: check the "
                "parameters (jax.debug_nans names the operation)"
            )

    def steps(self, progress: Progress) -> Iterator[Progress]:
        """Yields the progress after each token."""
        while not np.asarray(readable(progress.done)).all():
            progress = self.programs.advance(self.arrays, progress, self.lengths, self.key)
            self.check(progress)
            yield progress


def _check_options(options: Options, key: object) -> None:
    """Rejects options that are out of range, or that exclude each other."""
    sampling, beams = options.sampling, options.search.num_beams
    require(options.max_new_tokens >= 1, "max_new_tokens", options.max_new_tokens, "1 or more")
    if not sampling.is_greedy:
        if key is None:
            raise ValueError(
                f"temperature = {sampling.temperature} draws tokens: pass key=jax.random.key(seed)"
            )
        check_key(key)
        if beams > 1:
            raise ValueError(
                f"num_beams = {beams} beside temperature = {sampling.temperature}: set one of them "
                "to its default"
            )
    is_known = options.weights in (None, "gathered", "by_layer")
    require(is_known, "weights", options.weights, '"gathered", "by_layer" or None')


def _check_room(longest: int, max_new_tokens: int, limit: int | None) -> None:
    """Rejects rows that are longer than the model's longest."""
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"the longest prompt has {longest} tokens, padding included, and the model has "
            f"positions for {limit}: shorten it, or pass max_new_tokens = "
            f"{max(limit - longest, 0)} or less, not {max_new_tokens}"
        )


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
    mesh = at_rest.mesh_of([x])
    assert mesh is not None
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
