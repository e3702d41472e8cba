"""Beam search that can be jitted, with the results of Hugging Face's `generate(num_beams=...)`.

>>> from zerojax.models.bart import SIZES, Bart, BartConfig
>>> model = Bart(BartConfig(**SIZES["blenderbot-tiny"]))
>>> source = jnp.ones((2, 5), jnp.int32)
>>> variables = jax.eval_shape(model.init, jax.random.key(0), source, source)     # or jax.jit(...)
>>> write = functools.partial(generate, model, num_beams=3, max_length=7)
>>> targets, scores = jax.eval_shape(write, variables, source, source > 0)
>>> targets.shape, scores.shape
((2, 7), (2,))

Each step extends a row's K hypotheses by every token and keeps the 2 K best extensions. Those among
the first K that end compete with the row's finished hypotheses, by log-probability divided by
length to the power of `length_penalty`; the K best of the others continue. Semantics: transformers
5.23.

Shapes: B rows, K num_beams, L max_length, V vocabulary.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.models.bart import Bart
from zerojax.models.loss import widen
from zerojax.xla.types import PyTree

NEVER = -1e9  # added to the score of a hypothesis that must not be chosen

EarlyStopping = bool | Literal["never"]


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
    *,
    rows: int,
    start: int,
    end: int,
    pad: int,
    num_beams: int,
    max_length: int,
    min_length: int = 0,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    forced_end: bool = False,
    forbid: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    cache_axis: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Returns each row's best target, int32 [B, L] padded with `pad`, and its score, fp32 [B].

    Args:
      step: A function; `step(tokens, position, cache)` returns logits [B K, V] after the tokens
        int32 [B K] at this position of the targets, and the updated cache.
      cache: Arrays with a dimension of B K; the beams of a row are adjacent.
      rows: B.
      start: The token before the first; every length includes it.
      end: The token that finishes a target.
      pad: The token that pads targets after their end.
      num_beams: K. With 1 the search is greedy, and stops at the first `end`.
      max_length: L, the maximum length of targets, including the start token.
      min_length: The minimum number of tokens before `end`, including the start token.
      length_penalty: The exponent of length; above 0 it favors longer targets.
      early_stopping: The condition for a row with K finished hypotheses to be done. True: at once;
        False: as soon as the best running hypothesis would score below the worst finished one if it
        ended now; "never": only if it could not reach that score at any length up to L.
      forced_end: Whether a target of length L always ends with `end` (`forced_eos_token_id`).
      forbid: A function; `forbid(tokens, length)` returns bool [B K, V], True for tokens that must
        not follow the first `length` of tokens int32 [B K, L].
      cache_axis: The axis of the dimension B K: 1 for stacked blocks.

    Raises:
      ValueError: An option is out of range.
    """
    check_options(num_beams, max_length, min_length, early_stopping)
    if num_beams == 1:
        early_stopping = True
    flat = functools.partial(jax.tree.map, lambda x: x.reshape(rows * num_beams, *x.shape[2:]))

    def next_scores(state: State) -> tuple[jax.Array, PyTree]:
        """Returns log-probabilities [B, K V] of each hypothesis with each token, and the cache."""
        last = jax.lax.dynamic_index_in_dim(state.running.tokens, state.length - 1, 2, False)
        logits, cache = step(flat(last), state.length - 1, state.cache)
        scores = jax.nn.log_softmax(widen(logits))
        ends = jnp.arange(scores.shape[-1]) == end
        scores = jnp.where(ends & (state.length < min_length), -jnp.inf, scores)
        if forbid is not None:
            scores = jnp.where(forbid(flat(state.running.tokens), state.length), -jnp.inf, scores)
        if forced_end:
            forced = jnp.where(ends, 0, -jnp.inf)
            scores = jnp.where(state.length == max_length - 1, forced, scores)
        scores = scores.reshape(rows, num_beams, -1) + state.running.scores[..., None]
        return scores.reshape(rows, -1), cache

    def body(state: State) -> State:
        scores, cache = next_scores(state)
        vocabulary = scores.shape[-1] // num_beams
        scores, chosen = jax.lax.top_k(scores, 2 * num_beams)
        beams, tokens = jnp.divmod(chosen, vocabulary)
        extended = _select_beams(state.running.tokens, beams).at[:, :, state.length].set(tokens)
        length = state.length + 1
        ended = (tokens == end) | (length >= max_length)

        order = jax.lax.top_k(scores + NEVER * ended, num_beams)[1]
        running = Beams(
            _select_beams(extended, order), _select_beams(scores + NEVER * ended, order)
        )
        beams = flat(_select_beams(beams, order) + num_beams * jnp.arange(rows)[:, None])
        cache = jax.tree.map(lambda x: jnp.take(x, beams, axis=cache_axis), cache)

        is_top = jnp.arange(2 * num_beams) < num_beams
        full = state.complete.all(-1) & (early_stopping is True)
        is_excluded = (full | ~state.improvable)[:, None] | ~(ended & is_top)
        candidates = scores / (length - 1.0) ** length_penalty + NEVER * is_excluded
        candidates = jnp.concatenate([state.finished.scores, candidates], axis=1)
        best, order = jax.lax.top_k(candidates, num_beams)
        all_tokens = jnp.concatenate([state.finished.tokens, extended], axis=1)
        complete = jnp.concatenate([state.complete, ended & is_top], axis=1)
        complete = _select_beams(complete, order)

        final_length = max_length if early_stopping == "never" and length_penalty > 0 else length
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

    empty = jnp.full((rows, num_beams, max_length), pad, jnp.int32).at[:, :, 0].set(start)
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


def check_options(
    num_beams: int, max_length: int, min_length: int, early_stopping: EarlyStopping
) -> None:
    """Rejects options of `beam_search` that are out of range."""
    if num_beams < 1:
        raise ValueError(f"num_beams = {num_beams} must be 1 or more")
    if max_length < 2:
        raise ValueError(f"max_length = {max_length} must be 2 or more: it counts the start token")
    if not 0 <= min_length <= max_length:
        raise ValueError(
            f"min_length = {min_length} must be between 0 and max_length = {max_length}"
        )
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping must be True, False or 'never', not {early_stopping!r}")


def _select_beams(x: jax.Array, beams: jax.Array) -> jax.Array:
    """Selects K of each row's J beams: x [B, J, ...] at beams int [B, K] -> [B, K, ...]."""
    return jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1)


def generate(
    model: Bart,
    variables: Mapping[str, PyTree],
    input_ids: jax.Array,
    attention_mask: jax.Array | None = None,
    *,
    num_beams: int = 1,
    max_length: int = 20,
    no_repeat_ngram_size: int = 0,
    encoder_no_repeat_ngram_size: int = 0,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns the best target int32 [B, max_length] of sources int [B, S], and scores fp32 [B].

    Args:
      model: An encoder-decoder.
      variables: The variables of `model.apply`: `{"params": params}`.
      input_ids: Sources int [B, S], padded.
      attention_mask: Mask [B, S], 0 or False on padding.
      num_beams: Hypotheses per row.
      max_length: The maximum length of a target, including the start token.
      no_repeat_ngram_size: n; a target never repeats an n-gram. 0 allows repetition.
      encoder_no_repeat_ngram_size: n; a target never has an n-gram of its source, including
        padding. 0 allows it.
      options: `min_length`, `length_penalty`, `early_stopping` and `forced_end` of `beam_search`.

    Raises:
      ValueError: The model has no positions for `max_length` tokens, or an option is out of range.
    """
    c, rows = model.config, input_ids.shape[0]
    early_stopping, min_length = options.get("early_stopping", False), options.get("min_length", 0)
    check_options(num_beams, max_length, min_length, early_stopping)
    if max_length > c.max_position_embeddings:
        raise ValueError(
            f"max_length = {max_length}, but max_position_embeddings = {c.max_position_embeddings}"
        )

    def repeated(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, num_beams, axis=0)

    call: Callable[..., PyTree] = functools.partial(model.apply, variables)
    mask = None if attention_mask is None else repeated(attention_mask)
    memory = repeated(call(input_ids, attention_mask, method="encode"))
    empty = call(rows * num_beams, max_length, method="empty_cache")
    start_tokens = jnp.full(rows * num_beams, c.decoder_start_token_id)
    # The memory's keys and values are the same in each step.
    _, _, memorized = call(start_tokens, 0, empty, None, memory, mask, method="decode")

    def step(tokens: jax.Array, position: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        decoded = call(tokens, position, cache, memorized, None, mask, method="decode")
        return decoded[:2]

    def forbid(written: jax.Array, length: jax.Array) -> jax.Array:
        histories = (
            (no_repeat_ngram_size, written, length),
            (encoder_no_repeat_ngram_size, repeated(input_ids), input_ids.shape[1]),
        )
        repeats = (
            completes(written, length, history, count, size=size, vocabulary=c.vocab_size)
            for size, history, count in histories
            if size
        )
        return functools.reduce(jnp.logical_or, repeats)

    return beam_search(
        step,
        empty,
        rows=rows,
        start=c.decoder_start_token_id,
        end=c.eos_token_id,
        pad=c.pad_token_id,
        num_beams=num_beams,
        max_length=max_length,
        forbid=forbid if no_repeat_ngram_size or encoder_no_repeat_ngram_size else None,
        cache_axis=1 if c.scan else 0,
        **options,
    )


def completes(
    written: jax.Array,
    length: jax.Array | int,
    history: jax.Array,
    count: jax.Array | int,
    *,
    size: int,
    vocabulary: int,
) -> jax.Array:
    """Returns which next tokens complete an n-gram of the history, bool [R, V].

    Args:
      written: Tokens int [R, L], of which the first `length` are written.
      length: The number of written tokens, the same for all rows.
      history: Tokens int [R, S], of which the first `count` are compared.
      count: The number of compared tokens, the same for all rows.
      size: n. With 1, each token of the history is found.
      vocabulary: V.

    >>> written = jnp.array([[5, 6, 7, 5, 6, 0]])             # five tokens, and a place for more
    >>> jnp.flatnonzero(completes(written, 5, written, 5, size=3, vocabulary=9)).tolist()
    [7]
    """
    rows, windows = history.shape[0], history.shape[1] - size + 1
    if windows < 1:
        return jnp.zeros((rows, vocabulary), bool)
    prefix = jax.lax.dynamic_slice_in_dim(written, length - (size - 1), size - 1, 1)
    ends = jnp.arange(windows) + size - 1
    is_match = jnp.broadcast_to((ends < count) & (length >= size - 1), (rows, windows))
    for i in range(size - 1):
        is_match &= history[:, i : i + windows] == prefix[:, i : i + 1]
    found = jnp.zeros((rows, vocabulary), bool)
    return found.at[jnp.arange(rows)[:, None], history[:, size - 1 :]].max(is_match)
