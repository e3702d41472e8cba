"""Rows sharded along their tokens: sequence parallelism as in DeepSpeed-Ulysses.

On a mesh with the axis "seq" the devices along that axis share the tokens of a row. The values that
a model computes for a position stay on the position's device. Attention needs all positions, but
treats each head independently: an all-to-all each moves queries, keys and values from some tokens
of all heads to all tokens of some heads, and another moves the results back.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zerojax.devices.mesh import (
    SEQUENCE,
    are_present,
    batch_axes,
    batch_devices,
    explicit_axes,
    nearest_multiples,
    sequence_size,
)

_FREE = PartitionSpec.UNCONSTRAINED


class SequenceAxis(NamedTuple):
    """The axis "seq" of a mesh, for a model: ``zero.sequence``.

    Attributes:
      mesh: The devices.
    """

    mesh: Mesh

    @classmethod
    def of(cls, mesh: Mesh) -> SequenceAxis | None:
        """Returns the axis; None if each device has all tokens of its rows."""
        return cls(mesh) if sequence_size(mesh) > 1 else None

    @property
    def size(self) -> int:
        """The number of devices that share the tokens of a row."""
        return sequence_size(self.mesh)

    def tokens(self, x: jax.Array) -> jax.Array:
        """Shards an array [B, T, ...] along its tokens.

        Raises:
          ValueError: T does not divide among the devices.
        """
        check_tokens(f"an array {x.shape}", x.shape[1], self.size)
        return self._constrained(x, self._rows(x), SEQUENCE, *[_FREE] * (x.ndim - 2))

    def positions(self, x: jax.Array) -> jax.Array:
        """Shards an array [T, ...] that all rows share along its tokens.

        Raises:
          ValueError: T does not divide among the devices.
        """
        check_tokens(f"an array {x.shape}", x.shape[0], self.size)
        return self._constrained(x, SEQUENCE, *[_FREE] * (x.ndim - 1))

    def attention(
        self, function: Callable[..., jax.Array], *, sharded: Mapping[str, int] | None = None
    ) -> Callable[..., jax.Array]:
        """Returns ``function`` of q [B, T, H, d], k and v [B, T, G, d] such that each device runs
        it on some heads with all tokens. Heads of keys and values that do not divide among the
        devices are repeated.

        Args:
          function: An attention. The result of a head must depend only on the heads of its group:
            head h of q reads head h // (H / G) of k and v.
          sharded: Other mesh axes that already shard the heads: ``{"model": 2}``, as for
            :meth:`zerojax.Zero.per_device`.

        Raises:
          ValueError: On a call, T or H does not divide among the devices.
        """
        others = tuple(axis for axis, at in (sharded or {}).items() if at == 2 and axis != SEQUENCE)
        heads = (*others, SEQUENCE)
        parts = math.prod(self.mesh.shape[axis] for axis in heads)

        def by_heads(x: jax.Array) -> jax.Array:
            return self._constrained(x, self._rows(x), None, heads, *[None] * (x.ndim - 3))

        def by_tokens(x: jax.Array) -> jax.Array:
            return self._constrained(
                x, self._rows(x), SEQUENCE, others or None, *[None] * (x.ndim - 3)
            )

        def across(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            check_tokens(f"an array {q.shape}", q.shape[1], self.size)
            if q.shape[2] % parts:
                raise ValueError(
                    f"the {parts} devices of {' and '.join(map(repr, heads))} do not divide the "
                    f"{q.shape[2]} heads of q {q.shape}. Make the axis {SEQUENCE!r} a divisor of "
                    "the heads."
                )
            times = math.lcm(k.shape[2], parts) // k.shape[2]
            q, k, v = map(by_tokens, (q, k, v))
            # The all-to-all gives each device equally many heads.
            if times > 1:
                k, v = (jnp.repeat(x, times, axis=2) for x in (k, v))
            return by_tokens(by_heads(function(by_heads(q), by_heads(k), by_heads(v))))

        return across

    def _rows(self, x: jax.Array) -> object:
        """Returns the axes of the rows if the rows divide among them; else leaves them to XLA."""
        return batch_axes(self.mesh) if x.shape[0] % batch_devices(self.mesh) == 0 else _FREE

    def _constrained(self, x: jax.Array, *entries: object) -> jax.Array:
        if explicit := explicit_axes(jax.sharding.get_abstract_mesh()):
            raise ValueError(
                "zero.sequence needs automatic mesh axes, but jax.set_mesh declares "
                f"{', '.join(map(repr, explicit))} explicit. Call the step outside of "
                "jax.set_mesh, or set zerojax.mesh(...)."
            )
        mesh: Mesh | AbstractMesh = self.mesh if are_present(self.mesh) else self.mesh.abstract_mesh
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))


def tokens_entry(shape: Sequence[int], size: int) -> tuple[str, ...]:
    """Returns the spec entry that shards the tokens of a batch's array: ("seq",), or () if the
    array has no tokens.

    Args:
      shape: Shape of the array, [rows, tokens, ...].
      size: Number of devices along "seq".
    """
    return (SEQUENCE,) if size > 1 and len(shape) > 1 and shape[1] > 1 else ()


def check_tokens(what: str, tokens: int, size: int) -> None:
    """Refuses a row whose tokens do not divide among the devices that share them.

    Args:
      what: The array, for a message.
      tokens: Number of tokens of a row.
      size: Number of devices along "seq".

    Raises:
      ValueError: The tokens do not divide; the message has the axis and a remedy.
    """
    if tokens % size:
        fits = nearest_multiples(tokens, size)
        raise ValueError(
            f"{what}: the {size} devices of the axis {SEQUENCE!r} do not divide its {tokens} "
            f"tokens (dimension 1). Pad it to {fits} with a mask; pass tokens and targets as two "
            "arrays [rows, T], not as one of T + 1; give an array without tokens a dimension of 1 "
            "there (x[:, None])."
        )
