"""Muon: orthogonal momentum for matrices, Adam for other parameters.

Shapes: a flax kernel is [..., in, out], the transpose of torch's.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from zerojax.optim.decay import is_bias_or_norm, names_on_path
from zerojax.xla.types import Aval, PyTree

Matrices: TypeAlias = Callable[[tuple[object, ...], Aval], MuonDimensionNumbers | None]
"""A function from a leaf's path and the leaf to its matrix axes, or None to use Adam."""

# Full names of modules or leaves; names that contain "embed" count too.
_EMBEDDING_OR_HEAD = {"wte", "wpe", "lm_head", "head", "output_head", "logits", "classifier"}


def last_two_axes(path: tuple[object, ...], leaf: Aval) -> MuonDimensionNumbers | None:
    """Returns the matrix axes of a leaf for Muon; None for a leaf that Adam updates.

    Adam updates leaves of one dimension, biases and norms by name (even those that `nn.scan` has
    stacked), and the embeddings and the output head: a name on the path contains "embed", or is
    wte, wpe, lm_head, head, output_head, logits or classifier. Every other leaf is a stack of
    matrices [in, out] over its leading dimensions: [L, in, out] are L matrices.

    DeepSpeed looks only for "embed" and "lm_head", and so updates GPT-2's `wte` and `wpe` by Muon.
    DeepSpeed flattens a convolution to one matrix; this function treats each tap as a matrix. The
    kernels of flax's `DenseGeneral` attention, [in, heads, d], look like stacks: pass another
    function for them.

    Example:
      >>> kernel, = jax.tree_util.tree_leaves_with_path({"mlp": {"kernel": jnp.ones((2, 3, 4))}})
      >>> last_two_axes(*kernel)
      MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
      >>> table, = jax.tree_util.tree_leaves_with_path({"wte": {"embedding": jnp.ones((3, 4))}})
      >>> last_two_axes(*table) is None
      True
    """
    names = names_on_path(path)
    embedding_or_head = any("embed" in n or n in _EMBEDDING_OR_HEAD for n in map(str.lower, names))
    if leaf.ndim < 2 or embedding_or_head or is_bias_or_norm(names):
        return None
    return MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)


def muon_or_adam(
    muon: optax.GradientTransformation,
    adam: optax.GradientTransformation,
    matrices: Matrices = last_two_axes,
) -> optax.GradientTransformationExtraArgs:
    """Combines one transformation for the matrices and another for the other leaves.

    Args:
      muon, adam: Complete update rules, with their learning rates.
      matrices: The function that separates matrices from other leaves.

    Example:
      >>> tx = muon_or_adam(optax.sgd(1.0), optax.sgd(0.5))
      >>> p = {"kernel": jnp.ones((1, 1)), "bias": jnp.ones((1,))}
      >>> updates, _ = tx.update(p, tx.init(p), p)
      >>> updates["kernel"].item(), updates["bias"].item()
      (-1.0, -0.5)
    """

    def labels(params: optax.Params) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: "adam" if matrices(path, x) is None else "muon", params
        )

    return optax.partition({"muon": muon, "adam": adam}, labels)


class ScaleByOrthogonalState(NamedTuple):
    """State of `scale_by_orthogonal_momentum`.

    Attributes:
      momentum: The mean gradient; a tree like the parameters.
    """

    momentum: optax.Updates


def scale_by_orthogonal_momentum(
    momentum: float = 0.95,
    matrices: Matrices = last_two_axes,
    dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """DeepSpeed's Muon: m = b m + (1 - b) g; u = NS(b m + (1 - b) g) sqrt(max(1, out / in)).

    NS is five Newton-Schulz steps from X / (|X| + 1e-7): A = X X^T, then
    X = 3.4445 X + (-4.775 A + 2.0315 A A) X, in `dtype` (DeepSpeed: the gradients' dtype, bf16 or
    fp16, and with "gram" the same products in another order). torch's rows are flax's `out`.

    NS comes from optax, the momentum does not: `optax.contrib.scale_by_muon` corrects the bias of m
    and of g by different factors, which changes the direction of the first few updates.

    DeepSpeed's ZeRO orthogonalizes gradients before it measures and clips their norm, and before it
    divides by the loss scale. zerojax keeps the order of every optimizer: divide, clip, apply rule.

    Args:
      momentum: The factor b, with Nesterov's look-ahead.
      matrices: The axes `in` and `out` of each leaf.
      dtype: The dtype of NS; None for that of the momentum.

    Example:
      >>> tx = scale_by_orthogonal_momentum()
      >>> g = {"kernel": jnp.array([[3.0, 0.0], [0.0, 3.0]])}
      >>> u, _ = tx.update(g, tx.init(g))
      >>> [[round(float(x), 1) for x in row] for row in u["kernel"]]
      [[1.1, 0.0], [0.0, 1.1]]
    """
    b = momentum

    axes = functools.partial(jax.tree_util.tree_map_with_path, matrices)
    # optax does not export the orthogonalisation; a rule without momentum does nothing else.
    orthogonal = scale_by_muon(beta=0.0, eps=1e-7, nesterov=False, weight_dimension_numbers=axes)

    def scaled(u: jax.Array, numbers: MuonDimensionNumbers) -> jax.Array:
        rows, columns = (_size(u, a) for a in (numbers.output_axis, numbers.reduction_axis))
        return u * math.sqrt(max(1.0, rows / columns))

    def init(params: optax.Params) -> ScaleByOrthogonalState:
        return ScaleByOrthogonalState(jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: optax.Updates, state: ScaleByOrthogonalState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByOrthogonalState]:
        mean = jax.tree.map(lambda m, g: b * m + (1 - b) * g, state.momentum, updates)
        lookahead = jax.tree.map(lambda m, g: b * m + (1 - b) * g, mean, updates)
        given = lookahead if dtype is None else optax.tree.cast(lookahead, dtype)
        directions, _ = orthogonal.update(given, orthogonal.init(given))
        directions = jax.tree.map(lambda u, m: u.astype(m.dtype), directions, mean)
        return jax.tree.map(scaled, directions, axes(directions)), ScaleByOrthogonalState(mean)

    return optax.GradientTransformation(init, update)


def _size(x: jax.Array, axes: int | Sequence[int]) -> int:
    return math.prod(x.shape[a] for a in ((axes,) if isinstance(axes, int) else axes))
