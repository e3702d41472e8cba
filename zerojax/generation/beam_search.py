"""Beam search that can be jitted, with the results of Hugging Face's `generate(num_beams=...)`.

>>> from zerojax.models.bart import SIZES, Bart, BartConfig
>>> model = Bart(BartConfig(**SIZES["blenderbot-tiny"]))
>>> source = jnp.ones((2, 5), jnp.int32)
>>> variables = jax.eval_shape(model.init, jax.random.key(0), source, source)     # or jax.jit(...)
>>> write = functools.partial(generate, model, num_beams=3, max_length=7)
>>> targets, scores = jax.eval_shape(write, variables, source, source > 0)
>>> targets.shape, scores.shape
((2, 7), (2,))

Each step extends a row's K hypotheses by every token and keeps the 2 K best extensions (3 K with
two tokens that end a row, and so on). Those among
the first K that end compete with the row's finished hypotheses, by log-probability divided by
length to the power of `length_penalty`; the K best of the others continue. Semantics: transformers
5.23.

Shapes: B rows, K num_beams, L max_length, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.generation.checks import integers, require
from zerojax.generation.decoders import Cache, EncoderDecoder, Source
from zerojax.models.bart import Bart
from zerojax.models.loss import widen
from zerojax.models.t5 import T5
from zerojax.xla.types import PyTree

NEVER = -1e9  # added to the score of a hypothesis that must not be chosen

EarlyStopping = bool | Literal["never"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Options of a search.

    Attributes:
      num_beams: K. With 1 the search is greedy, and stops at the first token that ends a target.
      max_length: L, the maximum length of targets, including the start token.
      min_length: The minimum number of tokens before the end, including the start token.
      length_penalty: The exponent of length; above 0 it favors longer targets.
      early_stopping: The condition for a row with K finished hypotheses to be done. True: at once;
        False: as soon as the best running hypothesis would score below the worst finished one if it
        ended now; "never": only if it could not reach that score at any length up to L.

    Raises:
      ValueError: An option is out of range.
    """

    num_beams: int = 1
    max_length: int = 20
    min_length: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        most = f"between 0 and max_length = {self.max_length}"
        require(self.num_beams >= 1, "num_beams", self.num_beams, "1 or more")
        least = "2 or more, as it counts the start token"
        require(self.max_length >= 2, "max_length", self.max_length, least)
        require(0 <= self.min_length <= self.max_length, "min_length", self.min_length, most)
        is_known = self.early_stopping in (True, False, "never")
        require(is_known, "early_stopping", self.early_stopping, "True, False or 'never'")


class Ends(NamedTuple):
    """The tokens at the end of a row.

    Attributes:
      eos: The tokens that end it.
      pad: The token after its end.
      forced: The tokens of which one is the last of a row that has not ended; none forces none.
    """

    eos: tuple[int, ...]
    pad: int
    forced: tuple[int, ...] = ()


class Beams(NamedTuple):
    """Hypotheses of each row, the best first."""

    tokens: jax.Array  # int32 [B, K, L]
    scores: jax.Array  # fp32 [B, K]


class State(NamedTuple):
    """State of the search between two steps."""

    length: jax.Array  # int32 [], tokens of a running hypothesis, including the start token
    running: Beams  # scores: the sum of log-probabilities
    finished: Beams  # scores: the sum over length ** length_penalty
    complete: jax.Array  # bool [B, K], True for each finished hypothesis that exists
    improvable: jax.Array  # bool [B], a running hypothesis may still beat a finished one
    stuck: jax.Array  # bool [], no hypothesis can be extended
    cache: PyTree


def beam_search(
    step: Callable[[jax.Array, jax.Array, PyTree], tuple[jax.Array, PyTree]],
    cache: PyTree,
    start: jax.Array,
    ends: Ends,
    search: Search,
    *,
    stop: int | jax.Array | None = None,
    cache_axes: PyTree = 0,
) -> tuple[jax.Array, jax.Array]:
    """Returns each row's best target, int32 [B, L] padded after its end, and its score, fp32 [B].

    Args:
      step: A function; `step(tokens, position, cache)` returns logits [B K, V] after the tokens
        int32 [B K] at this position of the targets, and the updated cache.
      cache: Arrays with a dimension of B K; the beams of a row are adjacent. An array that `step`
        returns as it is has equal values in all beams of a row.
      start: The tokens before the first, int32 [B]; every length includes them.
      ends: The tokens at the end of a target.
      search: The options.
      stop: The length at which targets end, up to L; None for L. It may be traced, so that searches
        of different lengths run one program.
      cache_axes: The axis of the dimension B K, or that of each array; negative for an array that
        does not have it.
    """
    rows, num_beams, length_penalty = len(start), search.num_beams, search.length_penalty
    early_stopping = num_beams == 1 or search.early_stopping
    stop = search.max_length if stop is None else stop
    eos, axes = np.asarray(ends.eos, np.int32), jax.tree.broadcast(cache_axes, cache)
    flat = functools.partial(jax.tree.map, lambda x: x.reshape(rows * num_beams, *x.shape[2:]))

    # One extension of each beam may end in each of these tokens.
    candidates = max(2, 1 + len(ends.eos)) * num_beams

    def next_scores(state: State) -> tuple[jax.Array, PyTree]:
        """Returns log-probabilities [B, K V] of each hypothesis with each token, and the cache."""
        last = jax.lax.dynamic_index_in_dim(state.running.tokens, state.length - 1, 2, False)
        logits, cache = step(flat(last), state.length - 1, state.cache)
        scores = jax.nn.log_softmax(widen(logits))
        is_end = jnp.isin(jnp.arange(scores.shape[-1]), eos)
        scores = jnp.where(is_end & (state.length < search.min_length), -jnp.inf, scores)
        if ends.forced:
            last = only(ends.forced, scores.shape[-1])
            scores = jnp.where(state.length == stop - 1, last, scores)
        scores = scores.reshape(rows, num_beams, -1) + state.running.scores[..., None]
        return scores.reshape(rows, -1), cache

    def body(state: State) -> State:
        scores, cache = next_scores(state)
        vocabulary = scores.shape[-1] // num_beams
        scores, chosen = jax.lax.top_k(scores, candidates)
        beams, tokens = jnp.divmod(chosen, vocabulary)
        extended = _select_beams(state.running.tokens, beams).at[:, :, state.length].set(tokens)
        length = state.length + 1
        ended = jnp.isin(tokens, eos) | (length >= stop)

        order = jax.lax.top_k(scores + NEVER * ended, num_beams)[1]
        running = Beams(
            _select_beams(extended, order), _select_beams(scores + NEVER * ended, order)
        )
        beams = flat(_select_beams(beams, order) + num_beams * jnp.arange(rows)[:, None])
        cache = jax.tree.map(
            lambda old, x, axis: x if x is old or axis < 0 else jnp.take(x, beams, axis=axis),
            *(state.cache, cache, axes),
        )

        is_top = jnp.arange(candidates) < num_beams
        full = state.complete.all(-1) & (early_stopping is True)
        is_excluded = (full | ~state.improvable)[:, None] | ~(ended & is_top)
        normalized = scores / (length - 1.0) ** length_penalty + NEVER * is_excluded
        normalized = jnp.concatenate([state.finished.scores, normalized], axis=1)
        best, order = jax.lax.top_k(normalized, num_beams)
        all_tokens = jnp.concatenate([state.finished.tokens, extended], axis=1)
        complete = jnp.concatenate([state.complete, ended & is_top], axis=1)
        complete = _select_beams(complete, order)

        final_length = stop if early_stopping == "never" and length_penalty > 0 else length
        reachable = running.scores[:, 0] / (final_length - 1.0) ** length_penalty
        worst = jnp.where(complete, best.min(-1, keepdims=True), NEVER)
        return State(
            length=length,
            running=running,
            finished=Beams(_select_beams(all_tokens, order), best),
            complete=complete,
            improvable=state.improvable & (reachable[:, None] > worst).any(-1),
            stuck=ended.all(),
            cache=cache,
        )

    def unfinished(state: State) -> jax.Array:
        done = state.complete.all() & (early_stopping is True)
        return state.improvable.any() & ~done & ~state.stuck

    empty = jnp.full((rows, num_beams, search.max_length), ends.pad, jnp.int32)
    empty = empty.at[:, :, 0].set(jnp.reshape(start, (-1, 1)))
    # All beams of a row are equal at the start, so only the first may be extended.
    first_scores = jnp.where(jnp.arange(num_beams) == 0, 0.0, NEVER)
    state = State(
        length=jnp.int32(1),
        running=Beams(empty, jnp.broadcast_to(first_scores, (rows, num_beams))),
        finished=Beams(empty, jnp.full((rows, num_beams), NEVER)),
        complete=jnp.zeros((rows, num_beams), bool),
        improvable=jnp.ones(rows, bool),
        stuck=jnp.array(False),
        cache=cache,
    )
    finished = jax.lax.while_loop(unfinished, body, state).finished
    return finished.tokens[:, 0], finished.scores[:, 0]


def only(tokens: Sequence[int] | np.ndarray, vocabulary: int) -> jax.Array:
    """Returns scores fp32 [V] that leave no other tokens.

    >>> only([2], 4).tolist()
    [-inf, -inf, 0.0, -inf]
    """
    return jnp.full(vocabulary, -jnp.inf).at[np.asarray(tokens)].set(0.0)


def begun(empty: PyTree, start: PyTree) -> PyTree:
    """Returns an empty cache with that of fewer positions written to its start."""
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_slice(x, new.astype(x.dtype), [0] * x.ndim),
        *(empty, start),
    )


def repeated(cache: PyTree, axes: PyTree, count: int) -> PyTree:
    """Returns a cache with `count` copies of each row next to each other.

    `axes` has the axis of the rows of each array; it is negative for an array without rows.
    """
    return jax.tree.map(
        lambda x, axis: x if axis < 0 else jnp.repeat(x, count, axis=axis), cache, axes
    )


def _select_beams(x: jax.Array, beams: jax.Array) -> jax.Array:
    """Selects K of each row's J beams: x [B, J, ...] at beams int [B, K] -> [B, K, ...]."""
    return jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1)


def generate(
    model: Bart | T5,
    variables: Mapping[str, PyTree],
    input_ids: jax.Array,
    attention_mask: jax.Array | None = None,
    *,
    forced_eos: int | Sequence[int] | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns the best target int32 [B, max_length] of sources int [B, S], and scores fp32 [B].

    Args:
      model: An encoder-decoder.
      variables: The variables of `model.apply`: `{"params": params}`.
      input_ids: Sources int [B, S], padded.
      attention_mask: Mask [B, S], 0 or False on padding.
      forced_eos: The token, or the tokens, with one of which a target of `max_length` always ends.
      options: The other fields of `Search`, such as `num_beams` and `max_length`.

    Raises:
      ValueError: The model has no positions for `max_length` tokens, or an option is out of range.
    """
    decoder, rows = EncoderDecoder(model), len(input_ids)
    c: Any = decoder.config
    search = Search(**options)
    max_length, num_beams, limit = search.max_length, search.num_beams, decoder.limit()
    most = f"at most {limit}, the model's positions"
    require(limit is None or max_length <= limit, "max_length", max_length, most)
    source = Source(input_ids, attention_mask)
    arrays = Cache.of(decoder, variables, rows, max_length, source)
    first = jnp.full((rows, 1), c.decoder_start_token_id, jnp.int32)
    _, start = decoder(variables, source, first, jnp.zeros_like(first))
    cache = begun(arrays.empty(), start)

    def step(tokens: jax.Array, position: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        positions = jnp.broadcast_to(position, (len(tokens), 1))
        logits, cache = decoder(variables, cache, tokens[:, None], positions)
        return logits[:, -1], cache

    eos, forced = integers("eos", c.eos_token_id), integers("forced_eos", forced_eos)
    return beam_search(
        step,
        repeated(cache, arrays.axes, num_beams),
        first[:, 0],
        Ends(eos, c.pad_token_id, forced),
        search,
        cache_axes=arrays.axes,
    )
