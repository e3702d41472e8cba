"""Arrangements in einops' notation, which map elements of tensors to elements of a parameter.

``"o i -> i o"`` lists the tensor's axes, an arrow, and the parameter's axes. Axes in parentheses
share a dimension, the first outermost; ``...`` stands for the remaining dimensions in order. In a
dimension of the parameter, only the last axis may have several elements in one tensor.

>>> kernel = Arrangement.parse("(head d) i -> i head d")
>>> (link,) = kernel.links("q_proj.weight", {}, (8, 2, 3), {})
>>> link.tensor_shape, link.strides
((6, 8), (1, 24, 8))
>>> view, offset, strides = link.block(np.ones((4, 1, 3)), ((0, 4), (1, 2), (0, 3)))
>>> view.shape, offset, strides                                      # in the tensor's order
((1, 3, 4), 24, (24, 8, 1))

Source of the notation: Rogozhnikov 2022 (https://openreview.net/forum?id=oapKSVM2bcj).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Bounds = tuple[tuple[int, int], ...]
"""The first index of each dimension, and the index after the last."""

Parts = Mapping[str, Sequence[str] | Mapping[str, int]]
"""The values of named axes, in order; a mapping to the length of each value if lengths differ."""

_ELLIPSIS = "..."
_AXIS = r"[A-Za-z_]\w*"
_SIDE = re.compile(rf"\s*(?:(?P<group>\((?:\s*{_AXIS})*\s*\))|(?P<axis>{_AXIS})|(?P<rest>\.\.\.))")
_FIELD = re.compile(rf"\{{({_AXIS})\}}")


class Link(NamedTuple):
    """A link between a tensor, or a slice of it, and a parameter, or a slice of it.

    Attributes:
      tensor: The tensor's name.
      tensor_shape: The shape of the full tensor.
      offset: The offset of the slice in the tensor, in elements.
      start: The index at which the slice begins in the parameter.
      shape: The shape of the slice, in the parameter's order of dimensions.
      strides: The strides of these dimensions in the tensor, in elements.
    """

    tensor: str
    tensor_shape: tuple[int, ...]
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements in the slice."""
        return math.prod(self.shape)

    def block(
        self, values: np.ndarray, bounds: Bounds
    ) -> tuple[np.ndarray, int, tuple[int, ...]] | None:
        """Returns a view of the slice's elements in the tensor's order, their offset in the tensor
        and the view's strides in the tensor; None if ``bounds`` contain no element of the slice.

        Args:
          values: The elements of the parameter within ``bounds``; the view shares their memory.
          bounds: The bounds of ``values`` in the parameter.
        """
        index, offset = [], self.offset
        for (low, high), start, n, stride in zip(
            bounds, self.start, self.shape, self.strides, strict=True
        ):
            first, end = max(low, start), min(high, start + n)
            if first >= end:
                return None
            index.append(slice(first - low, end - low))
            offset += (first - start) * stride
        order = sorted(range(len(index)), key=lambda d: -self.strides[d])
        view = values[(*index, ...)].transpose(order)  # type: ignore[arg-type]
        return view, offset, tuple(self.strides[d] for d in order)


class Arrangement(NamedTuple):
    """The dimensions of a tensor and of a parameter, each a tuple of named axes, and their text."""

    text: str
    tensor: tuple[tuple[str, ...], ...]
    parameter: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Arrangement:
        """Parses an arrangement such as ``"o i -> i o"``.

        Raises:
          ValueError: The text is not an arrangement.
        """
        sides = text.split("->")
        if len(sides) != 2:
            raise ValueError(f'"{text}" is no arrangement: write "o i -> i o"')
        tensor, parameter = (_dimensions(side, text) for side in sides)
        if ((_ELLIPSIS,) in tensor) != ((_ELLIPSIS,) in parameter):
            raise ValueError(f'"{text}" has ... on one side: write it on both')
        return cls(text, tensor, parameter)

    def links(
        self, name: str, given: Mapping[str, str], shape: Sequence[int], parts: Parts
    ) -> list[Link]:
        """Returns links to the tensors of a parameter, one for each value of the axes in ``name``.

        Args:
          name: The tensors' name; ``{axis}`` in it stands for the value of that axis.
          given: The values of axes that come from the parameter's path.
          shape: The parameter's shape.
          parts: The values of axes; other axes in a name have the values 0, 1, 2 ...

        Raises:
          ValueError: The arrangement does not fit the shape, or the length of an axis is unknown.
        """
        return _Links(self._spelled(len(shape)), name, given, tuple(shape), parts).all()

    def _spelled(self, dimensions: int) -> Arrangement:
        """Replaces ``...`` by numbered axes."""
        count = dimensions - (len(self.parameter) - 1)
        ellipsis_axes = tuple((f"{_ELLIPSIS}{i}",) for i in range(count))

        def expand(side: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
            if (_ELLIPSIS,) not in side:
                return side
            position = side.index((_ELLIPSIS,))
            return (*side[:position], *ellipsis_axes, *side[position + 1 :])

        return Arrangement(self.text, expand(self.tensor), expand(self.parameter))


def _dimensions(side: str, text: str) -> tuple[tuple[str, ...], ...]:
    dimensions, position = [], 0
    side = side.rstrip()
    while position < len(side):
        match = _SIDE.match(side, position)
        if match is None:
            raise ValueError(
                f'"{text}" is no arrangement: {side[position:].strip()!r} is no axis; write "o i '
                '-> i o"'
            )
        dimensions.append(
            tuple(match["group"].strip("()").split()) if match["group"] else (match[0].strip(),)
        )
        position = match.end()
    axes = [axis for dimension in dimensions for axis in dimension]
    if duplicates := {axis for axis in axes if axes.count(axis) > 1}:
        raise ValueError(f'"{text}" has {min(duplicates)} twice on one side: rename one')
    return tuple(dimensions)


class _Links:
    """The links of one parameter; see :meth:`Arrangement.links`."""

    def __init__(
        self,
        arrangement: Arrangement,
        name: str,
        given: Mapping[str, str],
        shape: tuple[int, ...],
        parts: Parts,
    ) -> None:
        self.name, self.shape, self.given = name, shape, given
        self.text, self.tensor, self.parameter = arrangement
        self.parts = parts
        if len(self.parameter) != len(shape):
            raise self._error(
                f"has {len(self.parameter)} dimensions, the parameter is {[*shape]}: write "
                f"{len(shape)} axes after ->, or several in brackets for one dimension"
            )
        of_tensor = {axis for dimension in self.tensor for axis in dimension}
        of_parameter = {axis for dimension in self.parameter for axis in dimension}
        self.numbered = [x for x in dict.fromkeys(_FIELD.findall(name)) if x not in given]
        self.chosen = of_tensor - of_parameter
        one_sided = (of_parameter - of_tensor) ^ {*self.numbered}
        if wrong := one_sided | (self.chosen - given.keys()):
            raise self._error(
                f"{min(wrong)} is on one side of ->: write it on both, or also as {{{min(wrong)}}} "
                f"in the name {name} (right side) or in the path (left side)"
            )
        for axes in self.parameter:
            if shared := [axis for axis in axes[:-1] if axis not in self.numbered]:
                raise self._error(
                    f"{' '.join(axes)} share a dimension of the parameter: write {shared[0]} as "
                    f"{{{shared[0]}}} in the name {name}, or give it a dimension"
                )

    def _error(self, text: str) -> ValueError:
        return ValueError(f'"{self.text}": {text}')

    def _misfit(self, text: str) -> ValueError:
        return self._error(f"{text}: correct parts")

    def all(self) -> list[Link]:
        counts = {axis: self._count(axis) for axis in self.numbered}
        return [
            self._link(dict(zip(counts, indices, strict=True)), counts)
            for indices in itertools.product(*map(range, counts.values()))
        ]

    def _count(self, axis: str) -> int:
        """Returns the number of values of an axis in the name."""
        if axis in self.parts:
            return len(self.parts[axis])
        axes, n = next(x for x in zip(self.parameter, self.shape, strict=True) if axis in x[0])
        if len(axes) > 1:
            raise self._error(
                f"the length of {axis} is unknown: pass its values, Tensor(..., "
                f"parts={{{axis!r}: [...]}})"
            )
        return n

    def _link(self, at: Mapping[str, int], counts: Mapping[str, int]) -> Link:
        """Builds the link at the indices ``at`` of the axes in the name."""
        start, shape = [], []
        for axes, n in zip(self.parameter, self.shape, strict=True):
            begin, length = 0, n
            for axis in filter(at.__contains__, axes):
                lengths = self._lengths(axis, counts[axis], length // counts[axis])
                if sum(lengths) != length:
                    raise self._unfit(axes, counts, n)
                begin += sum(lengths[: at[axis]])
                length = lengths[at[axis]]
            if length != 1 and {*axes} <= at.keys():
                raise self._unfit(axes, counts, n)
            start.append(begin)
            shape.append(length)
        lasts = ["".join(axes[-1:]) for axes in self.parameter]
        sizes = {axis: n for axis, n in zip(lasts, shape, strict=True) if axis not in at}
        tensor_shape, offset, strides = self._laid(sizes)
        values = {axis: self._value(axis, i) for axis, i in at.items()}
        return Link(
            _FIELD.sub(lambda match: {**self.given, **values}[match[1]], self.name),
            tensor_shape,
            offset,
            tuple(start),
            tuple(shape),
            tuple(strides.get(axis, 0) for axis in lasts),
        )

    def _lengths(self, axis: str, count: int, each: int) -> list[int]:
        """Returns the length of each value of an axis: those in ``parts``, or ``each``."""
        values = self.parts.get(axis)
        return [*values.values()] if isinstance(values, Mapping) else [each] * count

    def _unfit(self, axes: Sequence[str], counts: Mapping[str, int], n: int) -> ValueError:
        product = math.prod(sum(self._lengths(x, counts[x], 1)) for x in axes if x in counts)
        return self._misfit(f"{' '.join(axes)} = {product} does not fit {n} of {[*self.shape]}")

    def _laid(self, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], int, dict[str, int]]:
        """Returns the tensor's shape, the slice's offset in it, and the stride of each axis."""
        shape: list[int] = []
        strides: dict[str, int] = {}
        offset, stride = 0, 1
        for axes in reversed(self.tensor):
            n = 1
            for axis in reversed(axes):
                if axis in sizes:
                    strides[axis] = n * stride
                    n *= sizes[axis]
                    continue
                index = self._index(axis)
                lengths = self._lengths(axis, len(self.parts[axis]), n)
                if lengths[index] != n:
                    value = self.given[axis]
                    raise self._misfit(f"{axis} = {value} has {lengths[index]}, its axes {n}")
                offset += sum(lengths[:index]) * stride
                n = sum(lengths)
            shape.insert(0, n)
            stride *= n
        return tuple(shape), offset, strides

    def _value(self, axis: str, index: int) -> str:
        return [*self.parts[axis]][index] if axis in self.parts else str(index)

    def _index(self, axis: str) -> int:
        values, value = [*self.parts.get(axis, ())], self.given[axis]
        if value not in values:
            raise self._error(f"parts has no value {value!r} of {axis}: add it")
        return values.index(value)
