"""Matrices as int8 codes and scales in a folder of compressed-tensors, for transformers and vLLM.

In place of a tensor ``x.weight`` [out, in], ``x.weight_packed`` int32 [out, in / 4] holds four
codes, each plus 128, in the bytes of an element; ``x.weight_scale`` float32 [out, 1] the scales and
``x.weight_shape`` int64 [2] the shape. The format is ``pack-quantized``: of the two formats for
int8 that compressed-tensors has, vLLM reads the other one for quantized activations only.

The codes are those of :func:`zerojax.quantize_weights`. Format: compressed-tensors 0.20,
https://github.com/neuralmagic/compressed-tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zerojax.quantize.weights import quantize_weights
from zerojax.weights.arrangement import Axis, Bounds, Link
from zerojax.weights.names import Linked
from zerojax.weights.shards import to_host
from zerojax.weights.writer import BlockWriter, TensorSpec
from zerojax.xla.types import Shaped

if TYPE_CHECKING:
    import qwix

CONFIG_FILE = "config.json"
_SUFFIX = ".weight"
_NUMBERED = re.compile(r"\.\d+\.")


class Compression(NamedTuple):
    """The matrices of an export that become codes.

    Attributes:
      paths: The parameters.
      shapes: The shapes [out, in] of their tensors, by name.
      ignored: The modules of the other matrices, which remain floats.
    """

    paths: frozenset[str] = frozenset()
    shapes: Mapping[str, tuple[int, ...]] = {}
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, linked: Linked, quantize: str | None) -> Compression:
        """Chooses the matrices of numbered layers: not the embeddings, and no head of the model.

        Args:
          linked: The parameters and their tensors.
          quantize: "int8", or None for no matrix.

        Raises:
          ValueError: ``quantize`` is another value, there is no such matrix, or the format has no
            place for one.
        """
        if quantize is None:
            return cls()
        if quantize != "int8":
            raise ValueError(f"quantize={quantize!r}: write 'int8', or None for floats")
        matrices = {
            path: links
            for path, links in linked.links.items()
            if path not in linked.tied and all(map(_is_linear, links))
        }
        paths = {
            path
            for path, links in matrices.items()
            if all(_NUMBERED.search(link.tensor) for link in links)
        }
        others = [link.tensor for path in matrices.keys() - paths for link in matrices[path]]
        chosen = [link for path in sorted(paths) for link in matrices[path]]
        for each in chosen:
            _check(each)
        if not chosen:
            names = ", ".join(sorted(linked.tensors)[:3])
            raise ValueError(
                f"quantize={quantize!r}: no tensor is the [out, in] matrix of a torch.nn.Linear in "
                f"a numbered layer, such as layers.0.mlp.up_proj.weight (there are {names}): "
                "leave quantize out"
            )
        ignored = {"lm_head", *(name.removesuffix(_SUFFIX) for name in others)}
        return cls(
            frozenset(paths),
            {each.tensor: each.tensor_shape for each in chosen},
            tuple(sorted(ignored)),
        )

    def specs(self, tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Replaces the chosen tensors by those of the format."""
        found = [tensor for tensor in tensors if tensor.name not in self.shapes]
        for name, shape in self.shapes.items():
            found += [
                TensorSpec(f"{name}_packed", shape, np.dtype(np.uint8), np.dtype(np.int32)),
                TensorSpec(f"{name}_scale", (shape[0], 1), np.dtype(np.float32)),
                TensorSpec(f"{name}_shape", (2,), np.dtype(np.int64)),
            ]
        return found

    def texts(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Adds ``quantization_config`` to ``config.json``.

        Raises:
          ValueError: There is no ``config.json``.
        """
        if not self.paths:
            return {**texts}
        if CONFIG_FILE not in texts:
            raise ValueError(
                "quantize: transformers and vLLM read how weights are quantized from config.json, "
                "and there is none: give config, or names of a model of zerojax"
            )
        config = {**json.loads(texts[CONFIG_FILE]), "quantization_config": self._config()}
        return {**texts, CONFIG_FILE: json.dumps(config, indent=2) + "\n"}

    def _config(self) -> dict[str, object]:
        weights = dict(num_bits=8, type="int", symmetric=True, strategy="channel", dynamic=False)
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": [*self.ignored],
        }

    def write(self, put: BlockWriter, path: str, links: Sequence[Link], x: Shaped) -> None:
        """Quantizes a parameter on its devices, and writes it shard by shard."""
        array = _quantized(path, links, x)
        for bounds, codes in to_host(array.qvalue):
            _write_codes(put, links, bounds, codes)
        for bounds, scales in to_host(array.scale):
            _write_scales(put, links, bounds, scales)

    def write_matrix(self, put: BlockWriter, path: str, link: Link, values: np.ndarray) -> None:
        """Quantizes and writes one matrix: the slice of a parameter that ``link`` covers."""
        array, bounds = _quantized(path, [link], values), extent(link)
        _write_codes(put, [link], bounds, np.asarray(array.qvalue))
        inputs = _inputs(link)
        bounds = tuple((0, 1) if d in inputs else b for d, b in enumerate(bounds))
        _write_scales(put, [link], bounds, np.asarray(array.scale))

    def write_shapes(self, put: BlockWriter) -> None:
        """Writes the shapes of all chosen tensors."""
        for name, shape in self.shapes.items():
            put(f"{name}_shape", np.array(shape, np.int64))


def extent(link: Link) -> Bounds:
    """Returns the bounds of the slice of a parameter that a link covers."""
    sizes = [1] * len(link.start)
    for axis in link.axes:
        sizes[axis.dimension] += (axis.size - 1) * axis.step
    return tuple((start, start + n) for start, n in zip(link.start, sizes, strict=True))


def _is_linear(link: Link) -> bool:
    """Returns whether a tensor is a matrix [out, in] of a parameter whose outputs come last."""
    if not link.tensor.endswith(_SUFFIX) or len(link.tensor_shape) != 2:
        return False
    columns = _columns(link)
    rows = [axis for axis in link.axes if axis not in columns]
    return max((axis.dimension for axis in columns), default=0) < min(
        (axis.dimension for axis in rows), default=0
    )


def _columns(link: Link) -> list[Axis]:
    """Returns the axes of a link that are within the last dimension of its tensor, the inputs."""
    return [axis for axis in link.axes if axis.stride < link.tensor_shape[-1]]


def _check(link: Link) -> None:
    """Raises ValueError if the format has no place for the matrix of a link."""
    name, (_, width) = link.tensor, link.tensor_shape
    if ".experts." in name:
        raise ValueError(f"quantize: {name} is an expert's, and only dense layers are quantized")
    if width % 4:
        raise ValueError(
            f"quantize: {name} {[*link.tensor_shape]} has {width} inputs, and the format stores "
            "four codes an element: leave quantize out"
        )
    if link.base % width or math.prod(axis.size for axis in _columns(link)) != width:
        raise ValueError(
            f"quantize: several parameters share the inputs of {name}, and with them a scale: "
            "leave quantize out"
        )
    if math.prod(high - low for low, high in extent(link)) != link.size:
        raise ValueError(
            f"quantize: the elements of {name} are not adjacent in its parameter: leave quantize "
            "out"
        )


def _inputs(link: Link) -> set[int]:
    """Returns the dimensions of a parameter that hold the inputs of a matrix."""
    return {axis.dimension for axis in _columns(link)}


def _quantized(path: str, links: Sequence[Link], x: Shaped) -> qwix.QArray:
    """Quantizes a parameter, or a matrix of it.

    Raises:
      ValueError: A scale serves more than the inputs of one output.
    """
    array: qwix.QArray = quantize_weights({path: x}, select=lambda *_: True)[path]
    for link in links:
        inputs = _inputs(link)
        scales = tuple(1 if d in inputs else n for d, n in enumerate(x.shape))
        if tuple(array.scale.shape) != scales:
            raise ValueError(
                f"quantize: {path} {[*x.shape]} gets scales {[*array.scale.shape]}, and the format "
                f"needs {[*scales]}, one an output: save a checkpoint and write it by `python -m "
                "zerojax export`, which quantizes matrix by matrix"
            )
    return array


def _write_codes(
    put: BlockWriter, links: Sequence[Link], bounds: Bounds, codes: np.ndarray
) -> None:
    values = codes.view(np.uint8) ^ np.uint8(128)  # code + 128
    for link in links:
        for box in link.boxes(bounds):
            put(f"{link.tensor}_packed", box.view(values, bounds), box.offset, box.strides)


def _write_scales(
    put: BlockWriter, links: Sequence[Link], bounds: Bounds, scales: np.ndarray
) -> None:
    scales = scales.astype(np.float32)
    for link in links:
        width, columns = link.tensor_shape[1], _columns(link)
        axes = tuple(
            axis._replace(stride=axis.stride // width) for axis in link.axes if axis not in columns
        )
        rows = link._replace(base=link.base // width, axes=axes)
        for box in rows.boxes(bounds):
            put(f"{link.tensor}_scale", box.view(scales, bounds), box.offset, box.strides)
