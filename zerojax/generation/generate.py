"""`zerojax.generate`: tokens from a decoder, with its parameters where training left them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from zerojax.devices.mesh import batch_axes, batch_devices
from zerojax.generation import weights
from zerojax.generation.beam_search import EarlyStopping, Search
from zerojax.generation.decoders import Cache, EncoderDecoder, Source, decoder_of
from zerojax.generation.program import Generation, Programs, Progress, programs
from zerojax.generation.prompts import Prompts, Tokens
from zerojax.generation.sampling import Sampling
from zerojax.generation.weights import Weights
from zerojax.xla.types import PyTree


def generate(
    model: object,
    params: PyTree,
    tokens: Tokens,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: jax.Array | None = None,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    eos: int | Sequence[int] | None = None,
    pad: int | None = None,
    mask: ArrayLike | None = None,
    weights: Weights | None = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    r"""Generates tokens after prompts, or the targets of an encoder-decoder.

    Each new token is the largest logit after the tokens before it, or is drawn from

    .. math::

        p = \operatorname{softmax}(\text{logits} / \text{temperature})

    restricted to the ``top_k`` most probable tokens, and then to the smallest set that has the
    probability ``top_p``; or a beam search looks for the most probable new tokens. The prompts are
    read by one compiled program, which fills the cache of keys and values; another one loops over
    the new tokens. The cache is sharded over rows, and over heads if the model is sharded over
    "model".

    Args:
      model: A decoder or encoder-decoder of :mod:`zerojax.models`, or a flax linen or NNX module
        with a cache (:mod:`zerojax.generation.decoders`).
      params: The parameters: a tree of arrays, ``{"params": ...}`` with further collections, or a
        state with ``params``, at any stage, on the mesh, in host memory or on disk. For an NNX
        model None, or an ``nnx.State`` in place of its variables.
      tokens: The prompts, or the sources of an encoder-decoder: int [B, T], or a sequence of tokens
        for each row.
      max_new_tokens: The most new tokens of each row.
      temperature: 0 takes the largest logit.
      top_k: The number of tokens from which one is drawn; None for all.
      top_p: The probability of the tokens from which one is drawn; None for 1.
      key: The key of the draws, needed if ``temperature`` is above 0.
      num_beams: The hypotheses of each row that a beam search extends, see
        :func:`zerojax.generation.beam_search.beam_search`. 1 searches none.
      length_penalty: The exponent of length in the scores of the search.
      early_stopping: The condition for the search to end, as in transformers.
      eos: The token, or the tokens, that end a row; by default that of an encoder-decoder's config.
      pad: The token after the end of a row; by default that of an encoder-decoder's config, the
        first of ``eos``, or 0.
      mask: [B, T], 0 or False on padding of ``tokens``, on either side of a row.
      weights: ``"gathered"`` gathers the parameters once, for all tokens; ``"by_layer"`` leaves
        them at rest, and gathers each layer, or copies it from host memory, in every token. By
        default they are gathered if they fit into the devices' free memory.
      dtype: The dtype to which floating parameters are cast first; None for their own.

    Returns:
      int32 [B, T + max_new_tokens]: each row's prompt, directly followed by its new tokens, and
      then by ``pad``. For an encoder-decoder int32 [B, 1 + max_new_tokens]: the targets, from the
      config's ``decoder_start_token_id`` on.

    Raises:
      ValueError: An option or a token is out of range, a prompt is empty, or the rows are longer
        than the model's longest.
      TypeError: The model has no cache.
      FloatingPointError: The logits of a row contain NaN.

    Example:
      >>> import jax, zerojax
      >>> from zerojax.models.gpt import GPT, SIZES, GPTConfig
      >>> model = GPT(GPTConfig(**SIZES["tiny"]))
      >>> params = jax.jit(model.init)(jax.random.key(0), jax.numpy.ones((1, 8), "int32"))
      >>> zerojax.generate(model, params, [[1, 2, 3], [4]], max_new_tokens=5).shape
      (2, 8)
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    search = Search(
        num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping
    )
    run = _Run.of(
        model, params, tokens, mask, max_new_tokens, sampling, search, key, eos, pad, weights, dtype
    )
    progress = run.finish()
    run.check(progress)
    return progress.tokens


def generate_stream(
    model: object, params: PyTree, tokens: Tokens, *, max_new_tokens: int, **how: Any
) -> Iterator[np.ndarray]:
    """Generates tokens after prompts, and yields those of each step as soon as they exist.

    Args:
      model, params, tokens, max_new_tokens: As for :func:`generate`.
      how: Further arguments of :func:`generate`.

    Yields:
      int32 [B], the next token of each row; ``pad`` for rows that have ended.

    Raises:
      ValueError: As for :func:`generate`; or the model takes one token at a time, and the prompts
        have different lengths.
    """
    options = {"temperature": 0.0, "top_k": None, "top_p": None}
    sampling = Sampling(**{name: how.pop(name, value) for name, value in options.items()})
    names = ("key", "eos", "pad", "weights", "dtype")
    mask, others = how.pop("mask", None), [how.pop(name, None) for name in names]
    if how.pop("num_beams", 1) != 1:
        raise ValueError(
            "generate_stream: num_beams: a beam search has its tokens only at its end; leave "
            "num_beams out, or call zerojax.generate"
        )
    if how:
        raise TypeError(
            f"generate_stream: unknown arguments {', '.join(how)}; see zerojax.generate"
        )
    run = _Run.of(model, params, tokens, mask, max_new_tokens, sampling, Search(), *others)
    run.check_lengths("generate_stream")
    return (np.asarray(progress.new) for progress in run.steps(run.start()))


class _Run(NamedTuple):
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
    ) -> _Run:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {max_new_tokens} must be 1 or more")
        if not sampling.is_greedy and key is None:
            raise ValueError(
                f"temperature = {sampling.temperature} draws tokens: pass key=jax.random.key(seed)"
            )
        if search.num_beams > 1 and not sampling.is_greedy:
            raise ValueError(
                f"num_beams = {search.num_beams} beside temperature = {sampling.temperature}: a "
                "beam search draws no tokens; leave one of the two out"
            )
        if how not in (None, "gathered", "by_layer"):
            raise ValueError(f'weights = {how!r} must be "gathered", "by_layer" or None')
        decoder, params = decoder_of(model, params)
        given, source = Prompts.of(tokens, mask), None
        prompts = given
        if isinstance(decoder, EncoderDecoder):
            eos = decoder.config.eos_token_id if eos is None else eos
            pad = decoder.config.pad_token_id if pad is None else pad
            source = Source(given.tokens, given.mask)
            prompts = Prompts.of([[decoder.start]] * len(given.tokens), None)
        rows, longest = prompts.tokens.shape
        total, limit = longest + max_new_tokens, decoder.limit()
        if limit is not None and total > limit:
            raise ValueError(
                f"the longest row starts with {longest} tokens, and max_new_tokens = "
                f"{max_new_tokens}: the model has positions for {limit}. Shorten the prompt, or "
                f"pass max_new_tokens = {max(limit - longest, 0)} or less"
            )
        shapes = weights.shapes(params, dtype)
        cache = Cache.of(decoder, shapes, rows, total, source)
        given.check(vocabulary := cache.vocabulary)
        ends = () if eos is None else tuple(np.atleast_1d(eos).tolist())
        for name, token in (*(("eos", end) for end in ends), ("pad", pad or 0)):
            if not 0 <= token < vocabulary:
                raise ValueError(f"{name} = {token} is not among the model's {vocabulary} tokens")
        if pad is None:
            pad = ends[0] if ends else 0
        stacks = cache.stacks(decoder, shapes)
        kept = search.num_beams * cache.bytes
        placed = weights.place(jax.tree.leaves(params), how, dtype, kept, stacks.params)
        generation = Generation(
            decoder, cache, sampling, max_new_tokens, ends, pad, jax.tree.structure(params),
            placed.stacks(stacks), placed.mesh, placed.shards, search,
        )  # fmt: skip
        padded = np.full((rows, total), pad, np.int32)
        padded[:, :longest] = np.where(prompts.mask, prompts.tokens, pad)
        lengths = prompts.lengths
        common = int(lengths.max() if decoder.takes_positions else lengths.min())
        arrays: tuple[Any, Any, Any] = (padded, lengths, source)
        if placed.mesh is not None:
            divides = rows % batch_devices(placed.mesh) == 0
            spec = PartitionSpec(batch_axes(placed.mesh) if divides else None)
            sharding = NamedSharding(placed.mesh, spec)
            arrays = jax.device_put(arrays, sharding)
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
        if self.generation.decoder.takes_positions or len(set(np.asarray(self.lengths))) == 1:
            return
        raise ValueError(
            f"{what}: the model takes one token of all rows at a time, so that new tokens of "
            "shorter prompts come before longer prompts are read: pass prompts of one length, or "
            "call zerojax.generate without beams"
        )

    def check(self, progress: Progress) -> None:
        """Raises an error if the logits of a row contain NaN."""
        invalid = np.asarray(progress.invalid)
        if invalid.any():
            row = int(np.argmax(invalid))
            at = int(np.asarray(progress.at)[row])
            raise FloatingPointError(
                f"the logits of row {row} after its first {at} tokens contain NaN, so that no "
                "token follows: check the parameters (jax.debug_nans names the operation)"
            )

    def steps(self, progress: Progress) -> Iterator[Progress]:
        """Yields the progress after each token."""
        while not np.asarray(progress.done).all():
            progress = self.programs.advance(self.arrays, progress, self.lengths, self.key)
            self.check(progress)
            yield progress
