"""Parameters drawn by the names that transformers has for them."""

import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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


def stacked(params: Any, blocks: str = "h_") -> Any:
    """The parameters of blocks `h_0`, `h_1`, ... as stacks, for a loop over layers."""
    names = sorted((x for x in params if x.startswith(blocks)), key=lambda x: int(x[len(blocks) :]))
    stack = jax.tree.map(lambda *x: jnp.stack(x), *(params[name] for name in names))
    return {k: x for k, x in params.items() if k not in names} | {blocks.strip("_"): stack}
