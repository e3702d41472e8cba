"""Parameters drawn by the names that transformers has for them."""

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from zerojax.weights import Names, load
from zerojax.weights.names import link


def parameters(
    shapes: Any, names: Names, draw: Callable[[str, tuple[int, ...]], np.ndarray]
) -> Any:
    """Leaves of the shapes, of the tensors that `draw(name, shape)` gives."""
    flat = traverse_util.flatten_dict(shapes, sep="/")
    tensors = link(names, {path: leaf.shape for path, leaf in flat.items()}).tensors
    drawn = {name: draw(name, shape) for name, shape in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_file(drawn, f"{folder}/model.safetensors")
        return load(folder, like=shapes, names=names)
