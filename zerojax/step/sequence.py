"""Rows cut along their tokens: sequence parallelism as DeepSpeed-Ulysses has it.

On a mesh with the axis "seq" the devices along that axis share the tokens of a row. What a model
makes of a position stays on the position's device. Attention needs all positions, and treats each
head alone: so queries, keys and values change places, from a part of the tokens with all heads to
all tokens with a part of the heads, and the results go back, an all-to-all each.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.devices.mesh import (
    SEQUENCE,
    are_there,
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
        """None where a row lies whole on a device."""
        return cls(mesh) if sequence_size(mesh) > 1 else None

    @property
    def size(self) -> int:
        """The devices that share the tokens of a row."""
        return sequence_size(self.mesh)

    def tokens(self, x: jax.Array) -> jax.Array:
        """An array [B, T, ...] with each device's tokens on itself.

        Raises:
          ValueError: T does not divide among the devices.
        """
        self._check(x.shape, 1)
        return self._constrained(x, self._rows(x), SEQUENCE, *[_FREE] * (x.ndim - 2))

    def positions(self, x: jax.Array) -> jax.Array:
        """An array [T, ...] that all rows share, likewise.

        Raises:
          ValueError: T does not divide among the devices.
        """
        self._check(x.shape, 0)
        return self._constrained(x, SEQUENCE, *[_FREE] * (x.ndim - 1))

    def attention(
        self, function: Callable[..., jax.Array], *, cut: Mapping[str, int] | None = None
    ) -> Callable[..., jax.Array]:
        """``function`` of q [B, T, H, d], k and v [B, T, G, d], each device with its heads of all
        tokens. Heads of keys and values that are fewer than the devices are repeated.

        Args:
          function: What a head makes must not depend on other heads but those of its group: head h
            of q reads number h // (H / G) of k and v.
          cut: Other axes of the mesh that cut heads already: ``{"model": 2}``, as for
            :meth:`zerojax.Zero.per_device`.

        Raises:
          ValueError: On a call, T or H does not divide among the devices.
        """
        others = tuple(axis for axis, at in (cut or {}).items() if at == 2 and axis != SEQUENCE)
        heads = (*others, SEQUENCE)
        parts = math.prod(self.mesh.shape[axis] for axis in heads)

        def by_heads(x: jax.Array) -> jax.Array:
            return self._constrained(x, self._rows(x), None, heads, *[None] * (x.ndim - 3))

        def by_tokens(x: jax.Array) -> jax.Array:
            return self._constrained(
                x, self._rows(x), SEQUENCE, others or None, *[None] * (x.ndim - 3)
            )

        def across(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            self._check(q.shape, 1)
            if q.shape[2] % parts:
                raise ValueError(
                    f"attention of q {q.shape}: its {q.shape[2]} heads do not divide among the "
                    f"{parts} devices of {' and '.join(map(repr, heads))}: each device attends "
                    f"with some of them. Make {SEQUENCE!r} a divisor of the heads."
                )
            times = math.lcm(k.shape[2], parts) // k.shape[2]
            q, k, v = map(by_tokens, (q, k, v))
            if times > 1:
                k, v = (jnp.repeat(x, times, axis=2) for x in (k, v))
            return by_tokens(by_heads(function(by_heads(q), by_heads(k), by_heads(v))))

        return across

    def _rows(self, x: jax.Array) -> Any:
        """The axes of the rows, where the rows divide among them."""
        return batch_axes(self.mesh) if x.shape[0] % batch_devices(self.mesh) == 0 else _FREE

    def _constrained(self, x: jax.Array, *entries: Any) -> jax.Array:
        if explicit := explicit_axes(jax.sharding.get_abstract_mesh()):
            raise ValueError(
                "zero.sequence leaves the placing to XLA, but jax.set_mesh has made the axes "
                f"{', '.join(map(repr, explicit))} explicit: call the step outside of "
                "jax.set_mesh, or set zerojax.mesh(...), whose axes are automatic."
            )
        mesh: Any = self.mesh if are_there(self.mesh) else self.mesh.abstract_mesh
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))

    def _check(self, shape: tuple[int, ...], at: int) -> None:
        check_tokens(f"an array {shape}", shape[at], self.size)


def tokens_entry(shape: Sequence[int], size: int) -> tuple[str, ...]:
    """The entry of a spec that cuts the tokens of a batch's array: ("seq",), or () where the array
    has none.

    Args:
      shape: Of the array, [rows, tokens, ...].
      size: The devices along "seq".
    """
    return (SEQUENCE,) if size > 1 and len(shape) > 1 and shape[1] > 1 else ()


def check_tokens(what: str, tokens: int, size: int) -> None:
    """Refuses a row whose tokens do not divide among the devices that share them.

    Args:
      what: The array, for a message.
      tokens: Of a row.
      size: The devices along "seq".

    Raises:
      ValueError: With the axis and what to do.
    """
    if tokens % size:
        fits = nearest_multiples(tokens, size)
        raise ValueError(
            f"{what}: its dimension of {tokens} tokens does not divide among the {size} devices of "
            f"the axis {SEQUENCE!r}: make it {fits}, with a mask for what is filled up. Tokens and "
            "targets are two arrays [rows, tokens]: a row of T + 1 tokens, of which the step takes "
            "the first and the last T, does not divide. What has no tokens in its second dimension "
            "has a dimension of 1 there (x[:, None])."
        )
