"""Decoders with a cache: one interface for the ways in which flax models keep keys and values.

Shapes: B rows, T tokens of a call, S positions of the cache, V vocabulary, N tokens of a source.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.tree_util import PyTreeDef

from zerojax.generation.checks import check_params
from zerojax.generation.layers import Stacks
from zerojax.generation.nnx_decoder import NNXDecoder
from zerojax.models.cache import COLLECTION, MEMORY
from zerojax.models.hugging_face.config_file import carried
from zerojax.quantize import dequantize
from zerojax.trace.late import with_late_weights
from zerojax.trace.scaled_products import with_scaled_products
from zerojax.weights.saver import GENERATION_FILE
from zerojax.xla.types import AnyJaxpr, PyTree

LIMITS = ("block_size", "max_position_embeddings", "max_len", "max_length")
"""Names of the longest row in a model's config."""


class Source(NamedTuple):
    """Sources of an encoder-decoder.

    Attributes:
      tokens: int32 [B, N].
      mask: [B, N], 0 or False on padding; None without padding.
    """

    tokens: Any
    mask: Any


class Decoder(Protocol):
    """A model that reads tokens, and keeps what later tokens need of them in a cache.

    Hashable, so that compiled programs are found by it.

    Attributes:
      takes_positions: Whether one call takes the start of rows of different lengths, and later
        calls take tokens at a different position of each row. Otherwise a call takes one token a
        row, all at the same position.
    """

    @property
    def takes_positions(self) -> bool: ...

    def __hash__(self) -> int: ...

    def limit(self) -> int | None:
        """Returns the number of tokens of the longest row; None if the model states none."""

    def __call__(
        self, params: PyTree, cache: PyTree | Source | None, tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Returns logits [B, T, V] after tokens [B, T] at positions [B, T], and the cache.

        Without a cache, or with the source of an encoder-decoder in its place, the call creates one
        for as many positions as there are tokens.
        """


@dataclasses.dataclass(frozen=True)
class LinenDecoder:
    """A flax linen decoder whose call takes `positions`, see `zerojax.models.cache`; or one with a
    field `decode`, which takes one token at a time, as `flax.linen.MultiHeadDotProductAttention`
    with `decode=True` does.
    """

    model: nn.Module
    takes_positions: bool

    def limit(self) -> int | None:
        return longest_row(self.model)

    def __call__(
        self, params: PyTree, cache: PyTree | Source | None, tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        variables = _variables(params)
        if cache is not None:
            variables = {**variables, COLLECTION: cache}
        more: dict[str, Any] = {"positions": positions} if self.takes_positions else {}
        logits, changed = self.model.apply(variables, tokens, mutable=[COLLECTION], **more)
        return logits, changed.get(COLLECTION, {})


@dataclasses.dataclass(frozen=True)
class EncoderDecoder:
    """A flax linen encoder-decoder with the methods `encode` and `decode` of
    `zerojax.models.cache`, and in its config the tokens that start, end and pad a target.
    """

    model: nn.Module
    takes_positions = True

    def limit(self) -> int | None:
        return longest_row(self.model)

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config  # type: ignore[attr-defined]

    @property
    def start(self) -> int:
        """The first token of a target.

        Raises:
          ValueError: The config has none.
        """
        of_folder = carried(self.config, GENERATION_FILE).get("decoder_start_token_id")
        start: int | None = self.config.decoder_start_token_id if of_folder is None else of_folder
        if start is None:
            raise ValueError(
                "the config has decoder_start_token_id = None: set it to the first token of targets"
            )
        return start

    def __call__(
        self, params: PyTree, cache: PyTree | Source | None, tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        source: tuple[Any, ...] = ()
        variables, changes = _variables(params), [COLLECTION]
        if isinstance(cache, Source):
            source = (self.model.apply(variables, *cache, method="encode"), cache.mask)
            cache, changes = {}, [COLLECTION, MEMORY]
        assert cache is not None
        logits, changed = self.model.apply(
            {**variables, **cache}, tokens, positions, *source, method="decode", mutable=changes
        )
        return logits, {**cache, **changed}


def _variables(params: PyTree) -> dict[str, PyTree]:
    return params if "params" in params else {"params": params}


def longest_row(model: object) -> int | None:
    """Returns the number of tokens of a model's longest row; None if its config states none."""
    config = getattr(model, "config", model)
    if getattr(config, "rope_type", None) == "dynamic":
        return None
    limits = (getattr(config, name, None) for name in LIMITS)
    return next((limit for limit in limits if isinstance(limit, int)), None)


def decoder_of(model: object, params: PyTree) -> tuple[Decoder, PyTree]:
    """Returns a model as a :class:`Decoder`, and its parameters.

    Args:
      model: The model.
      params: The parameters, or a state with them; for an NNX model also None.

    Raises:
      TypeError: The model has no cache, or there are no parameters.
    """
    given, params = params, getattr(params, "params", params)
    if isinstance(model, nnx.Module):
        takes_positions = _takes_positions(type(model), "__call__")
        return NNXDecoder.of(model, params, takes_positions, longest_row(model))
    decoder = _linen_decoder(model)
    check_params(given, params, model)
    return decoder, params


def _linen_decoder(model: object) -> Decoder:
    if isinstance(model, nn.Module):
        if _takes_positions(type(model), "decode") and hasattr(model, "encode"):
            return EncoderDecoder(model)
        if _takes_positions(type(model), "__call__"):
            return LinenDecoder(model, takes_positions=True)
        if "decode" in type(model).__dataclass_fields__:
            return LinenDecoder(model.clone(decode=True), takes_positions=False)
    raise TypeError(
        f"generate: a {type(model).__name__} keeps no keys and values between tokens. Pass a "
        "linen module with a field `decode` and attention that keeps them in the collection "
        '"cache" (flax.linen.MultiHeadDotProductAttention), one whose __call__ takes '
        "`positions` int [B, T] (zerojax.models.gpt.GPT), or an encoder-decoder with `encode` "
        "and `decode` (zerojax.models.t5.T5); see zerojax.models.cache"
    )


def _takes_positions(model: type, method: str) -> bool:
    function = getattr(model, method, None)
    return callable(function) and "positions" in inspect.signature(function).parameters


class Cache(NamedTuple):
    """The arrays of a cache; hashable.

    Attributes:
      shapes: The shape and dtype of each array.
      rows: The dimension of each array that has the rows; -1 if none has.
      structure: `jax.tree.structure` of the cache.
      vocabulary: V of the logits beside it.
      stacks: The stacks of layers among the parameters and these arrays.
    """

    shapes: tuple[jax.ShapeDtypeStruct, ...]
    rows: tuple[int, ...]
    structure: PyTreeDef
    vocabulary: int
    stacks: Stacks

    @classmethod
    def of(
        cls, decoder: Decoder, params: PyTree, rows: int, length: int, source: PyTree = None
    ) -> Cache:
        """Returns the cache of `rows` rows of up to `length` tokens.

        `source` is the :class:`Source` of an encoder-decoder.

        Raises:
          TypeError: The model returns no cache.
        """
        leaves, structure = jax.tree.flatten((params, source))
        arguments = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        return _cache(decoder, arguments, structure, rows, length)

    @property
    def axes(self) -> PyTree:
        """`rows` in the structure of the cache."""
        return jax.tree.unflatten(self.structure, self.rows)

    def empty(self) -> PyTree:
        """Returns a cache of zeros."""
        return jax.tree.unflatten(
            self.structure, [jnp.zeros(x.shape, x.dtype) for x in self.shapes]
        )

    @property
    def bytes(self) -> int:
        """The bytes of the cache."""
        return sum(x.size * x.dtype.itemsize for x in self.shapes)


# Traces of a model take longer than a token: a loop that generates again needs them once.
@functools.lru_cache(maxsize=32)
def _cache(
    decoder: Decoder,
    arguments: tuple[jax.ShapeDtypeStruct, ...],
    structure: PyTreeDef,
    rows: int,
    length: int,
) -> Cache:
    params, source = jax.tree.unflatten(structure, arguments)

    def call(rows: int) -> tuple[jax.ShapeDtypeStruct, PyTree]:
        tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        begun = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), source)
        return jax.eval_shape(
            lambda p, s, t: decoder(dequantize(p), s, t, t), params, begun, tokens
        )

    logits, cache = call(rows)
    shapes, structure = jax.tree.flatten(cache)
    if not shapes:
        raise TypeError(
            f'generate: the model wrote nothing into its collection "{COLLECTION}": keep keys and '
            "values there, as flax.linen.MultiHeadDotProductAttention(decode=True) does"
        )
    others = jax.tree.leaves(call(rows + 1)[1])
    dims = (
        [i for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if a != b]
        for x, y in zip(shapes, others, strict=True)
    )
    by_rows = tuple(found[0] if found else -1 for found in dims)
    leaves, of_params = jax.tree.flatten(params)
    token = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    closed = traced(decoder, (of_params, structure), leaves, shapes, token, token)
    stacks = Stacks.of(closed, len(leaves), len(shapes))
    return Cache(tuple(shapes), by_rows, structure, logits.shape[-1], stacks)


def traced(
    decoder: Decoder,
    structures: tuple[PyTreeDef, PyTreeDef],
    params: Sequence[Any],
    cache: Sequence[Any] | Source,
    tokens: Any,
    positions: Any,
) -> AnyJaxpr:
    """Traces a call for abstract or concrete arrays, with a cache or the sources of one.

    Args:
      decoder: The model.
      structures: Those of the parameters and of the cache.
      params, cache: Their arrays; or the sources in place of a cache.
      tokens, positions: int32 [B, T].

    Returns:
      A program of the arrays of parameters and cache, the tokens and their positions. Quantized
      weights are dequantized where it uses them, most after the product.
    """
    params_structure, cache_structure = structures

    def read(
        params: list[Any], cache: list[Any] | Source, *at: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        if not isinstance(cache, Source):
            cache = jax.tree.unflatten(cache_structure, cache)
        return decoder(dequantize(jax.tree.unflatten(params_structure, params)), cache, *at)

    before = cache if isinstance(cache, Source) else list(cache)
    closed = jax.make_jaxpr(read)(list(params), before, tokens, positions)
    return with_scaled_products(with_late_weights(closed, len(params)))
