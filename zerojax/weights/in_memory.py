"""Tensors in host memory instead of files, such as a state dict of torch as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from zerojax.weights.cast import cast
from zerojax.weights.loader import fit
from zerojax.weights.names import Names, Tensor, link
from zerojax.weights.strides import contiguous
from zerojax.weights.tree import open_tree
from zerojax.xla.types import PyTree


class HostTensor(NamedTuple):
    """An array with the interface of a tensor in a file."""

    name: str
    file: str
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def stored(self) -> str:
        return self.array.dtype.name

    def read(
        self, out: np.ndarray, offset: int = 0, strides: Sequence[int] | None = None
    ) -> np.ndarray:
        """Fills ``out``, as :meth:`zerojax.weights.reader.FileTensor.read` does."""
        strides = contiguous(out.shape) if strides is None else strides
        if out.size:
            flat = np.ascontiguousarray(self.array).reshape(-1)
            steps = [stride * flat.itemsize for stride in strides]
            elements = np.lib.stride_tricks.as_strided(flat[offset:], out.shape, steps)
            out[...] = cast(elements, out.dtype, self.name)
        return out


def rearranged(
    tensors: Mapping[str, np.ndarray],
    like: PyTree,
    names: Names | Mapping[str, str | Tensor | None] | None = None,
) -> PyTree:
    """Builds parameters from arrays in host memory, as NumPy arrays of the same dtypes.

    Args:
      tensors: Arrays by name.
      like: A tree with the parameters' shapes and dtypes, as for ``load``; only whether a dtype is
        a float matters.
      names: The arrays' names by parameter, as for ``load``.

    Raises:
      ValueError: The names do not fit the parameters, or an array is missing, not used by any
        parameter, or of another shape or kind.

    Example:
      >>> like = {"up": {"kernel": np.zeros((2, 3))}}
      >>> names = {"up/kernel": Tensor("up.weight", "o i -> i o")}
      >>> rearranged({"up.weight": np.ones((3, 2), np.float16)}, like, names)["up"]["kernel"].dtype
      dtype('float16')
    """
    opened, names = open_tree(like), Names.of(names)
    linked = link(names, {path: tuple(x.shape) for path, x in opened.leaves.items()})
    host_tensors = {name: HostTensor(name, "the tensors given", x) for name, x in tensors.items()}
    dtypes = {path: np.dtype(opened.leaves[path].dtype) for path in linked.links}
    sources = fit("the tensors given", names, linked, host_tensors, dtypes)
    arrays: dict[str, np.ndarray] = {}
    for path, links in linked.links.items():
        shape = tuple(opened.leaves[path].shape)
        bounds = tuple((0, n) for n in shape)
        arrays[path] = np.empty(shape, sources[links[0].tensor].dtype)
        for part in links:
            for box in part.boxes(bounds):
                sources[part.tensor].read(box.view(arrays[path], bounds), box.offset, box.strides)
    return opened.close(arrays)
