"""Rotary position embeddings, and their scaling to rows longer than those of the pretraining.

Source: Su et al. 2021, RoFormer (arXiv:2104.09864).

Shapes: B batch, T time, H heads, d features of a head, r <= d rotated features.
"""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp

from zerojax.models.config import Flag, ModelConfig, Positive, Size, one_of
from zerojax.models.loss import widen

Tables = tuple[jax.Array, jax.Array]
"""cos and sin, fp32 [T, 1, r / 2], or [B, T, 1, r / 2] where rows have different positions."""

TYPES = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig(ModelConfig):
    """Options of the rotation, named as in transformers' `rope_parameters`.

    Attributes:
      rope_theta: The base of the wavelengths.
      partial_rotary_factor: The share of a head's features that is rotated.
      rope_type: "default"; "linear" divides all frequencies by the factor; "dynamic" enlarges the
        base for rows longer than `block_size`; "llama3" and "yarn" divide the low frequencies;
        "longrope" divides each frequency by its own factor.
      rope_factor: The ratio of the longest row to that of the pretraining.
      original_size: The longest row of the pretraining, for "llama3", "longrope" and "yarn".
      low_freq_factor, high_freq_factor: The bounds of "llama3", in waves per `original_size`.
      short_factor, long_factor: The divisors of "longrope", for rows up to `original_size` and for
        longer ones.
      attention_factor: The factor of cos and sin for "longrope" and "yarn"; None for the default.
      beta_fast, beta_slow: The bounds of "yarn", in waves per `original_size`: from `beta_fast` on
        a frequency is unchanged, up to `beta_slow` it is divided by the factor.
      truncate: Whether the pairs of features at these bounds are rounded outwards.
      mscale, mscale_all_dim: Weights of the factor's logarithm in the default of "yarn"'s
        `attention_factor`, in its numerator and denominator.
    """

    rope_theta: Positive = 10000.0
    partial_rotary_factor: Positive = 1.0
    rope_type: Annotated[str, one_of(*TYPES)] = "default"
    rope_factor: Positive = 1.0
    original_size: Size | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: Flag = True
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def check_rope(self, head_size: int) -> None:
        """Rejects the config if its rotation of heads of that size is invalid."""
        rotated = self.rotated(head_size)
        if rotated % 2 or not 0 < rotated <= head_size:
            self.reject("partial_rotary_factor", f"rotate an even number of {head_size} features")
        if self.rope_type in ("llama3", "longrope", "yarn") and self.original_size is None:
            self.reject("original_size", f"be an int for rope_type={self.rope_type!r}")
        for name in ("short_factor", "long_factor"):
            if self.rope_type == "longrope" and len(getattr(self, name)) != rotated // 2:
                self.reject(name, f"have {rotated // 2} numbers, one for each rotated pair")

    def rotated(self, head_size: int) -> int:
        """Returns the number of rotated features of a head."""
        return int(head_size * self.partial_rotary_factor)


def rotary_tables(
    tokens: int,
    head_size: int,
    config: RopeConfig,
    block_size: int,
    positions: jax.Array | None = None,
) -> Tables:
    """Computes cos and sin, fp32 [T, 1, r / 2], of position x frequency for each pair of features.

    The frequency of the pair i is theta^(-2i / r), scaled by the config's `rope_type`. With
    `positions` [B, T] in place of 0 ... T - 1 the tables are [B, T, 1, r / 2]; the scaling is that
    of a row that ends at its largest position, as in transformers.

    >>> cos, sin = rotary_tables(3, 4, RopeConfig(), block_size=8)
    >>> cos.shape, [round(float(x), 4) for x in sin[:, 0, 0]]                # sin of 0, 1, 2
    ((3, 1, 2), [0.0, 0.8415, 0.9093])
    """
    length: jax.Array | int = tokens
    if positions is None:
        positions = jnp.arange(tokens)
    else:
        length = positions.max(-1)[:, None, None, None] + 1
    frequencies, factor = _frequencies(length, config.rotated(head_size), config, block_size)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    if factor == 1:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def _frequencies(
    tokens: jax.Array | int, rotated: int, c: RopeConfig, block_size: int
) -> tuple[jax.Array, float]:
    """Returns the frequencies, fp32 [r / 2], and the factor of cos and sin.

    For rows of different lengths, `tokens` [B, 1, 1, 1], the frequencies are [B, 1, 1, r / 2].
    """
    theta: jax.Array | float = c.rope_theta
    factor = c.rope_factor
    if c.rope_type == "dynamic":  # Source: "NTK-aware" scaling, arXiv:2309.00071, section 3.1.
        growth = factor * jnp.maximum(tokens, block_size) / block_size - (factor - 1)
        theta *= growth ** (rotated / (rotated - 2))
    frequencies = theta ** (-jnp.arange(0, rotated, 2, dtype=jnp.float32) / rotated)
    if c.rope_type == "linear":  # Source: Chen et al. 2023, arXiv:2306.15595.
        return frequencies / factor, 1.0
    if c.rope_type == "llama3":  # Source: Llama 3, arXiv:2407.21783, and Meta's code of Llama 3.1.
        assert c.original_size is not None
        waves = c.original_size * frequencies / (2 * math.pi)
        low, high = c.low_freq_factor, c.high_freq_factor
        smooth = jnp.clip((waves - low) / (high - low), 0, 1)
        return (1 - smooth) * frequencies / factor + smooth * frequencies, 1.0
    if c.rope_type == "longrope":  # Source: Ding et al. 2024, arXiv:2402.13753.
        assert c.original_size is not None
        is_long = jnp.asarray(tokens > c.original_size)
        divisors = jnp.where(is_long, jnp.array(c.long_factor), jnp.array(c.short_factor))
        scale = c.attention_factor
        if scale is None:
            scale = math.sqrt(1 + max(0, math.log(factor)) / math.log(c.original_size))
        return frequencies / divisors.astype(jnp.float32), scale
    if c.rope_type == "yarn":
        kept = 1 - _ramp(rotated, c)
        return frequencies * (kept + (1 - kept) / factor), _yarn_scale(c)
    return frequencies, 1.0


def _ramp(rotated: int, c: RopeConfig) -> jax.Array:
    """Returns the share of "yarn"'s division in each frequency, fp32 [r / 2], from 0 to 1.

    Source: Peng et al. 2023, YaRN (arXiv:2309.00071), section 3.2, as transformers computes it.
    """
    assert c.original_size is not None

    # The numbers of the pairs with `beta_fast` and `beta_slow` waves per `original_size`.
    pairs = rotated / (2 * math.log(c.rope_theta))
    low = pairs * math.log(c.original_size / (2 * math.pi * c.beta_fast))
    high = pairs * math.log(c.original_size / (2 * math.pi * c.beta_slow))
    if c.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    high += 0.001 * (low == high)
    return jnp.clip((jnp.arange(rotated // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)


def _yarn_scale(c: RopeConfig) -> float:
    """Returns the factor of cos and sin for "yarn" (section 3.4 of the paper)."""

    def scale(weight: float) -> float:
        return 1 + 0.1 * weight * math.log(max(c.rope_factor, 1))

    if c.attention_factor is not None:
        return c.attention_factor
    if c.mscale and c.mscale_all_dim:
        return scale(c.mscale) / scale(c.mscale_all_dim)
    return scale(1)


def rotate(x: jax.Array, tables: Tables) -> jax.Array:
    """Rotates each pair (i, i + r / 2) of [B, T, H, d] by its angle, in fp32 or wider.

    These are Hugging Face's pairs. Meta's files pair 2i with 2i + 1, which permutes the rows of
    `q_proj` and `k_proj`. Features from r on are unchanged.

    >>> x = jnp.array([1.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    >>> quarter_turn = (jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2)))
    >>> rotate(x, quarter_turn).ravel().tolist()
    [0.0, 0.0, 1.0, 0.0]
    """
    cos, sin = tables
    pairs = cos.shape[-1]
    low, high, rest = jnp.split(widen(x), (pairs, 2 * pairs), axis=-1)
    rotated = [low * cos - high * sin, high * cos + low * sin]
    rotated += [rest] if rest.shape[-1] else []
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
