"""Parameters drawn by the names that transformers has for them."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zerojax.models.hugging_face.module_names import Name

KINDS = {None: r"[^/.]+", "int": r"\d+", "path": r".+"}


def parameters(
    shapes: Any, names: Mapping[str, Name], draw: Callable[[str, tuple[int, ...]], np.ndarray]
) -> Any:
    """Leaves of the shapes, of the tensors that `draw(name, shape)` gives."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _leaf("/".join(key.key for key in path), leaf.shape, names, draw), shapes
    )


def _expression(pattern: str) -> str:
    return re.sub(r"\{(\w+)(?::(\w+))?\}", lambda m: f"(?P<{m[1]}>{KINDS[m[2]]})", pattern)


def _leaf(path: str, shape: tuple[int, ...], names: Mapping[str, Name], draw: Any) -> np.ndarray:
    matches = ((re.fullmatch(_expression(pattern), path), name) for pattern, name in names.items())
    found, name = next((found, name) for found, name in matches if found)
    given = {key: text.replace("/", ".") for key, text in found.groupdict().items()}
    theirs, ours = (side.split() for side in name.arrangement.split("->"))
    stacked = ours[0] == "layer"
    ours = [axis for axis in ours if axis != "layer"]
    axes = tuple(theirs.index(axis) for axis in ours) if "..." not in ours else None
    inner = shape[1:] if stacked else shape
    of_tensor = inner if axes is None else tuple(inner[ours.index(axis)] for axis in theirs)

    def tensor(layer: dict[str, str]) -> np.ndarray:
        drawn = draw(name.tensor.format(**given, **layer), of_tensor)
        assert drawn.size == math.prod(inner)
        return drawn if axes is None else drawn.transpose(axes)

    if not stacked:
        return tensor({})
    return np.stack([tensor({"layer": layer}) for layer in name.parts["layer"]])
