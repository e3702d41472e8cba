"""`zerojax.generate`: tokens from a decoder, with its parameters where training left them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from zerojax.generation.beam_search import EarlyStopping
from zerojax.generation.options import OTHERS, Options
from zerojax.generation.prompts import Tokens
from zerojax.generation.run import Run, readable
from zerojax.generation.weights import Weights
from zerojax.xla.types import PyTree


def generate(
    model: object,
    params: PyTree,
    tokens: Tokens,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    key: jax.Array | None = None,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    early_stopping: EarlyStopping | None = None,
    eos: int | Sequence[int] | None = None,
    pad: int | None = None,
    forced_eos: int | Sequence[int] | None = None,
    mask: ArrayLike | None = None,
    weights: Weights | None = None,
    dtype: DTypeLike | None = None,
    **others: Any,
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
      temperature: 0, the default, takes the largest logit.
      top_k: The number of tokens from which one is drawn; None for all.
      top_p: The probability of the tokens from which one is drawn; None for 1.
      key: The key of the draws, needed if ``temperature`` is above 0.
      num_beams: The hypotheses of each row that a beam search extends, see
        :func:`zerojax.generation.beam_search.beam_search`. 1 searches none.
      length_penalty: The exponent of length in the scores of the search.
      early_stopping: The condition for the search to end, as in transformers.
      eos: The token, or the tokens, that end a row; by default that of an encoder-decoder's config.
        ``()`` for none.
      pad: The token after the end of a row; by default that of an encoder-decoder's config, the
        first of ``eos``, or 0.
      forced_eos: The token, or the tokens, of which one is the last of a row that has not ended;
        none by default.
      mask: [B, T], 0 or False on padding of ``tokens``, on either side of a row, else 1 or True.
      weights: ``"gathered"`` gathers the parameters once, for all tokens; ``"by_layer"`` leaves
        them at rest, and gathers each layer, or copies it from host memory, in every token. By
        default they are gathered if they fit into the devices' free memory.
      dtype: The dtype to which floating parameters are cast first; None for their own.
      others: None are known. The error for one of transformers' names says what to write.

    For a model of a Hugging Face folder the defaults of all options are those of its files, see
    :mod:`zerojax.generation.options`.

    Returns:
      int32 [B, T + max_new_tokens]: each row's prompt, directly followed by its new tokens, and
      then by ``pad``. For an encoder-decoder int32 [B, 1 + max_new_tokens]: the targets, from the
      config's ``decoder_start_token_id`` on.

    Raises:
      ValueError: An option or a token is out of range, a prompt is empty, or the rows are longer
        than the model's longest.
      TypeError: The model has no cache, or an argument is unknown.
      FloatingPointError: The logits of a row contain NaN.
      LaunchError: Prompts, key or options differ between processes that share the devices.

    Example:
      >>> import jax, zerojax
      >>> from zerojax.models.gpt import GPT, SIZES, GPTConfig
      >>> model = GPT(GPTConfig(**SIZES["tiny"]))
      >>> params = jax.jit(model.init)(jax.random.key(0), jax.numpy.ones((1, 8), "int32"))
      >>> zerojax.generate(model, params, [[1, 2, 3], [4]], max_new_tokens=5).shape
      (2, 8)
    """
    options = Options.of(
        model, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping, eos=eos,
        pad=pad, forced_eos=forced_eos, weights=weights, dtype=dtype, **others,
    )  # fmt: skip
    run = Run.of(model, params, tokens, options, mask=mask, key=key)
    progress = run.finish()
    run.check(progress)
    return run.written(progress)


def generate_stream(
    model: object,
    params: PyTree,
    tokens: Tokens,
    *,
    max_new_tokens: int | None = None,
    **how: Any,
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
    others = {name: how.pop(name, None) for name in OTHERS}
    options = Options.of(model, max_new_tokens=max_new_tokens, **how)
    if options.search.num_beams > 1:
        raise ValueError(
            "generate_stream: num_beams: a beam search yields no tokens before its end; pass "
            "num_beams=1"
        )
    run = Run.of(model, params, tokens, options, **others)
    run.check_lengths("generate_stream")
    return (np.asarray(readable(progress.new)) for progress in run.steps(run.start()))
