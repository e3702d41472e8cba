"""Arrangements in einops' notation, which map elements of tensors to elements of a parameter.

``"o i -> i o"`` lists the tensor's axes, an arrow, and the parameter's axes. Axes in parentheses
share a dimension, the first outermost; ``...`` stands for the remaining dimensions in order.

>>> kernel = Arrangement.parse("(head d) i -> i head d")
>>> (link,) = kernel.links("q_proj.weight", {}, (8, 2, 3), {}, {})
>>> link.tensor_shape
(6, 8)
>>> [box.shape for box in link.boxes(((0, 4), (1, 2), (0, 3)))]      # in the tensor's order
[(1, 3, 4)]

Source of the notation: Rogozhnikov 2022 (https://openreview.net/forum?id=oapKSVM2bcj).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
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


class Axis(NamedTuple):
    """An axis that a tensor and a parameter share.

    Attributes:
      size: Its length.
      stride: The distance from one index to the next in the tensor, in elements.
      dimension: The parameter's dimension that contains the axis.
      step: The distance from one index to the next in that dimension.
    """

    size: int
    stride: int
    dimension: int
    step: int


class Box(NamedTuple):
    """Elements of a tensor, and their places in a parameter.

    Attributes:
      shape: The shape of the elements, in the tensor's order of axes.
      offset, strides: Their offset and strides in the tensor, in elements.
      start: The index of the first element in the parameter.
      dimensions, steps: The parameter's dimension of each axis, and the step in that dimension.
    """

    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    start: tuple[int, ...]
    dimensions: tuple[int, ...]
    steps: tuple[int, ...]

    def view(self, values: np.ndarray, bounds: Bounds) -> np.ndarray:
        """Returns a view of the elements, in the tensor's order of axes.

        Args:
          values: The slice of the parameter within ``bounds``; the view shares its memory.
          bounds: The bounds of ``values`` in the parameter.
        """
        begins = (first - low for first, (low, _) in zip(self.start, bounds, strict=True))
        corner: tuple[slice | EllipsisType, ...] = (*(slice(i, None) for i in begins), ...)
        byte_strides = (
            values.strides[d] * step for d, step in zip(self.dimensions, self.steps, strict=True)
        )
        return np.lib.stride_tricks.as_strided(values[corner], self.shape, tuple(byte_strides))


class Link(NamedTuple):
    """A link between a tensor, or a slice of it, and a parameter, or a slice of it.

    Attributes:
      tensor: The tensor's name.
      tensor_shape: The shape of the full tensor.
      base: The offset of the slice in the tensor, in elements.
      start: The index at which the slice begins in the parameter.
      axes: The axes of the slice, in the tensor's order.
    """

    tensor: str
    tensor_shape: tuple[int, ...]
    base: int
    start: tuple[int, ...]
    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        """The number of elements in the slice."""
        return math.prod(axis.size for axis in self.axes)

    def boxes(self, bounds: Bounds) -> Iterator[Box]:
        """Yields the boxes of the slice that are within ``bounds`` of the parameter."""
        ranges = []
        for dimension, (low, high) in enumerate(bounds):
            axis_indices = [i for i, axis in enumerate(self.axes) if axis.dimension == dimension]
            axis_indices.sort(key=lambda i: -self.axes[i].step)
            begin = self.start[dimension]
            dimension_boxes = _within(
                low - begin, high - begin, [self.axes[i] for i in axis_indices]
            )
            ranges.append([dict(zip(axis_indices, box, strict=True)) for box in dimension_boxes])
        for combination in itertools.product(*ranges):
            by_axis = {i: r for each in combination for i, r in each.items()}
            ordered = [by_axis[i] for i in range(len(self.axes))]
            start = list(self.start)
            for axis, r in zip(self.axes, ordered, strict=True):
                start[axis.dimension] += r.start * axis.step
            offsets = (r.start * axis.stride for axis, r in zip(self.axes, ordered, strict=True))
            yield Box(
                tuple(map(len, ordered)),
                self.base + sum(offsets),
                tuple(axis.stride for axis in self.axes),
                tuple(start),
                tuple(axis.dimension for axis in self.axes),
                tuple(axis.step for axis in self.axes),
            )


def _within(low: int, high: int, axes: Sequence[Axis]) -> Iterator[tuple[range, ...]]:
    """Yields the indices of axes that share a dimension, outermost first, at which their sum of
    steps is in [low, high), as a minimal number of boxes."""
    if not axes:
        if low <= 0 < high:
            yield ()
        return
    (size, _, _, step), inner = axes[0], axes[1:]
    extent = 1 + sum((axis.size - 1) * axis.step for axis in inner)
    touched = range(max(0, (low - extent) // step + 1), min(size, -(-high // step)))
    complete = range(
        max(touched.start, -(-low // step)), min(touched.stop, (high - extent) // step + 1)
    )
    if complete:
        yield (complete, *(range(axis.size) for axis in inner))
    for i in touched:
        if i not in complete:
            for box in _within(low - i * step, high - i * step, inner):
                yield (range(i, i + 1), *box)


class Arrangement(NamedTuple):
    """The dimensions of a tensor and of a parameter, each a tuple of named axes."""

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
        return cls(tensor, parameter)

    def links(
        self,
        name: str,
        given: Mapping[str, str],
        shape: Sequence[int],
        parts: Parts,
        sizes: Mapping[str, int],
    ) -> list[Link]:
        """Returns links to the tensors of a parameter, one for each value of the axes in ``name``.

        Args:
          name: The tensors' name; ``{axis}`` in it stands for the value of that axis.
          given: The values of axes that come from the parameter's path.
          shape: The parameter's shape.
          parts: The values of axes; other axes in a name have the values 0, 1, 2 ...
          sizes: The lengths of axes that no shape shows.

        Raises:
          ValueError: The arrangement does not fit the shape, or the length of an axis is unknown.
        """
        return _Links(self._spelled(len(shape)), name, given, tuple(shape), parts, sizes).all()

    def _spelled(self, dimensions: int) -> Arrangement:
        """Replaces ``...`` by numbered axes."""
        count = dimensions - (len(self.parameter) - 1)
        ellipsis_axes = tuple((f"{_ELLIPSIS}{i}",) for i in range(count))

        def expand(side: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
            if (_ELLIPSIS,) not in side:
                return side
            position = side.index((_ELLIPSIS,))
            return (*side[:position], *ellipsis_axes, *side[position + 1 :])

        return Arrangement(expand(self.tensor), expand(self.parameter))

    def __str__(self) -> str:
        def side(dimensions: tuple[tuple[str, ...], ...]) -> str:
            return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dimensions)

        return f"{side(self.tensor)} -> {side(self.parameter)}"


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
        sizes: Mapping[str, int],
    ) -> None:
        self.text, self.name, self.shape, self.given = str(arrangement), name, shape, given
        self.tensor, self.parameter = arrangement
        self.parts = {axis: tuple(values) for axis, values in parts.items()}
        self.sections = {axis: v for axis, v in parts.items() if isinstance(v, Mapping)}
        self.sizes = {**sizes, **{axis: len(values) for axis, values in self.parts.items()}}
        if len(self.parameter) != len(shape):
            raise self._error(
                f"has {len(self.parameter)} dimensions, the parameter is {[*shape]}: write "
                f"{len(shape)} axes after ->, or several in brackets for one dimension"
            )
        of_tensor = {axis for dimension in self.tensor for axis in dimension}
        of_parameter = {axis for dimension in self.parameter for axis in dimension}
        fields = [*dict.fromkeys(_FIELD.findall(name))]
        self.numbered = [axis for axis in fields if axis not in given]
        self.chosen = of_tensor - of_parameter
        one_sided = (of_parameter - of_tensor) ^ {*self.numbered}
        if wrong := one_sided | (self.chosen - given.keys()):
            raise self._error(
                f"{min(wrong)} is on one side of ->: write it on both, or also as {{{min(wrong)}}} "
                f"in the name {name} (right side) or in the path (left side)"
            )
        if wrong := {axis for axis in self.sections if not self._leads(axis)}:
            raise self._error(
                f"{min(wrong)} has sizes: write ({min(wrong)} ...), the first of several"
            )

    def _error(self, text: str) -> ValueError:
        return ValueError(f'"{self.text}": {text}')

    def _misfit(self, text: str) -> ValueError:
        return self._error(f"{text}: correct sizes or parts")

    def _leads(self, axis: str) -> bool:
        return any(d[0] == axis and len(d) > 1 for d in (*self.tensor, *self.parameter) if d)

    def all(self) -> list[Link]:
        counts = {}
        for axis in self.numbered:
            known = self.sizes.get(axis)
            counts[axis] = self._inferred(self.sizes, {})[axis] if known is None else known
        return [
            self._link(dict(zip(self.numbered, indices, strict=True)))
            for indices in itertools.product(*(range(n) for n in counts.values()))
        ]

    def _link(self, at: dict[str, int]) -> Link:
        """Builds the link at the indices ``at`` of the axes in the name."""
        values = {axis: self._value(axis, i) for axis, i in at.items()}
        at = at | {axis: self._index(axis) for axis in self.chosen}
        sizes = self._inferred(self.sizes, at)
        if unknown := {axis for axis in self.chosen if axis not in sizes}:
            raise self._error(f"the length of {min(unknown)} is unknown: pass it in parts or sizes")
        tensor_shape, tensor_start, tensor_steps = self._laid(self.tensor, sizes, at)
        shape, start, steps = self._laid(self.parameter, sizes, at)
        if shape != self.shape:
            raise self._misfit(f"yields {[*shape]}, the parameter is {[*self.shape]}")
        tensor_strides = [math.prod(tensor_shape[d + 1 :]) for d in range(len(tensor_shape))]
        axes = [
            Axis(sizes[axis], step * tensor_strides[d], steps[axis][0], steps[axis][1])
            for axis, (d, step) in tensor_steps.items()
        ]
        return Link(
            _FIELD.sub(lambda match: {**self.given, **values}[match[1]], self.name),
            tensor_shape,
            sum(i * stride for i, stride in zip(tensor_start, tensor_strides, strict=True)),
            start,
            tuple(axes),
        )

    def _value(self, axis: str, index: int) -> str:
        return self.parts[axis][index] if axis in self.parts else str(index)

    def _index(self, axis: str) -> int:
        value, known = self.given[axis], self.parts.get(axis)
        if known is None and value.isdecimal():
            return int(value)
        if known is None or value not in known:
            raise self._error(f"parts has no value {value!r} of {axis}: add it")
        return known.index(value)

    def _inferred(self, known: Mapping[str, int], at: Mapping[str, int]) -> dict[str, int]:
        """Infers the lengths of the parameter's axes from its shape."""
        sizes = dict(known)
        for axes, n in zip(self.parameter, self.shape, strict=True):
            if axes and axes[0] in self.sections:
                if axes[0] not in at:
                    continue
                n = [*self.sections[axes[0]].values()][at[axes[0]]]
                axes = axes[1:]
            unknown = [axis for axis in axes if axis not in sizes]
            if len(unknown) > 1:
                raise self._error(
                    f"the lengths of {' and '.join(unknown)} are unknown: pass all but one, "
                    f"Tensor(..., sizes={{{unknown[0]!r}: ...}})"
                )
            product = math.prod(sizes[axis] for axis in axes if axis in sizes)
            if n % product or (not unknown and n != product):
                raise self._misfit(
                    f"{' '.join(axes)} = {product} does not fit {n} of {[*self.shape]}"
                )
            sizes |= {axis: n // product for axis in unknown}
        return sizes

    def _laid(
        self, dimensions: Sequence[Sequence[str]], sizes: Mapping[str, int], at: Mapping[str, int]
    ) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, tuple[int, int]]]:
        """Returns a shape, the slice's first index in it, and each axis's dimension and step."""
        shape, start, steps = [], [], {}
        for d, axes in enumerate(dimensions):
            step, begin = 1, 0
            for axis in reversed(axes):
                if axis in at and axis in self.sections:
                    lengths = [*self.sections[axis].values()]
                    n = lengths[at[axis]]
                    if n != step:
                        value = self._value(axis, at[axis])
                        raise self._misfit(f"{axis} = {value} has {n}, its axes {step}")
                    begin += sum(lengths[: at[axis]])
                    step = sum(lengths)
                    continue
                if axis in at:
                    if at[axis] >= sizes[axis]:
                        raise self._misfit(f"{axis} = {at[axis]} of {sizes[axis]}")
                    begin += at[axis] * step
                else:
                    steps[axis] = (d, step)
                step *= sizes[axis]
            shape.append(step)
            start.append(begin)
        order = [axis for axes in dimensions for axis in axes if axis in steps]
        return tuple(shape), tuple(start), {axis: steps[axis] for axis in order}
