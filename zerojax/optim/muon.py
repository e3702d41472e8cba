"""Muon: orthogonal momentum for matrices, Adam for other parameters.

Shapes: a flax kernel is [..., in, out], the transpose of torch's.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from zerojax.optim.decay import is_bias_or_norm, names_on_path
from zerojax.optim.over_matrices import over_matrices
from zerojax.xla.types import Aval, PyTree

# Full names of modules or leaves; names that contain "embed" count too.
_EMBEDDING_OR_HEAD = {"wte", "wpe", "lm_head", "head", "output_head", "logits", "classifier"}


def has_matrices(path: tuple[object, ...], leaf: Aval) -> bool:
    """Returns whether Muon updates a leaf, and not Adam.

    Adam updates leaves of one dimension, biases and norms by name (even those that `nn.scan` has
    stacked), and the embeddings and the output head: a name on the path contains "embed", or is
    wte, wpe, lm_head, head, output_head, logits or classifier. Every other leaf is a stack of
    matrices [in, out] over its leading dimensions: [L, in, out] are L matrices.

    DeepSpeed looks only for "embed" and "lm_head", and so updates GPT-2's `wte` and `wpe` by Muon.
    DeepSpeed flattens a convolution to one matrix; zerojax treats each tap as a matrix, and the
    kernels of flax's `DenseGeneral` attention, [in, heads, d], as stacks.

    Example:
      >>> kernel, = jax.tree_util.tree_leaves_with_path({"mlp": {"kernel": jnp.ones((2, 3, 4))}})
      >>> table, = jax.tree_util.tree_leaves_with_path({"wte": {"embedding": jnp.ones((3, 4))}})
      >>> has_matrices(*kernel), has_matrices(*table)
      (True, False)
    """
    names = names_on_path(path)
    embedding_or_head = any("embed" in n or n in _EMBEDDING_OR_HEAD for n in map(str.lower, names))
    return leaf.ndim >= 2 and not embedding_or_head and not is_bias_or_norm(names)


def muon_or_adam(
    muon: optax.GradientTransformation, adam: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Combines one transformation for the matrices and another for the other leaves.

    Args:
      muon, adam: Complete update rules, with their learning rates.

    Example:
      >>> tx = muon_or_adam(optax.sgd(1.0), optax.sgd(0.5))
      >>> p = {"kernel": jnp.ones((1, 1)), "bias": jnp.ones((1,))}
      >>> updates, _ = tx.update(p, tx.init(p), p)
      >>> updates["kernel"].item(), updates["bias"].item()
      (-1.0, -0.5)
    """

    def labels(params: optax.Params) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: "muon" if has_matrices(path, x) else "adam", params
        )

    return optax.partition({"muon": muon, "adam": adam}, labels)


class ScaleByOrthogonalState(NamedTuple):
    """State of `scale_by_orthogonal_momentum`.

    Attributes:
      momentum: The mean gradient; a tree like the parameters.
    """

    momentum: optax.Updates


def scale_by_orthogonal_momentum(
    momentum: float = 0.95, dtype: DTypeLike | None = None
) -> optax.GradientTransformation:
    """DeepSpeed's Muon: m = b m + (1 - b) g; u = NS(b m + (1 - b) g) sqrt(max(1, out / in)).

    NS is :func:`newton_schulz`, in `dtype` (DeepSpeed: the gradients' dtype, bf16 or fp16, and with
    "gram" the same products in another order).

    `optax.contrib.scale_by_muon` corrects the bias of m and of g by different factors, which
    changes the direction of the first few updates.

    DeepSpeed's ZeRO orthogonalizes gradients before it measures and clips their norm, and before it
    divides by the loss scale. zerojax keeps the order of every optimizer: divide, clip, apply rule.

    Args:
      momentum: The factor b, with Nesterov's look-ahead.
      dtype: The dtype of NS; None for that of the momentum.

    Example:
      >>> tx = scale_by_orthogonal_momentum()
      >>> g = {"kernel": jnp.array([[3.0, 0.0], [0.0, 3.0]])}
      >>> u, _ = tx.update(g, tx.init(g))
      >>> [[round(float(x), 1) for x in row] for row in u["kernel"]]
      [[1.1, 0.0], [0.0, 1.1]]
    """
    b = momentum
    orthogonal = over_matrices(newton_schulz)

    def init(params: optax.Params) -> ScaleByOrthogonalState:
        return ScaleByOrthogonalState(jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: optax.Updates, state: ScaleByOrthogonalState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByOrthogonalState]:
        mean = jax.tree.map(lambda m, g: b * m + (1 - b) * g, state.momentum, updates)
        lookahead = jax.tree.map(lambda m, g: b * m + (1 - b) * g, mean, updates)
        directions = orthogonal(lookahead if dtype is None else optax.tree.cast(lookahead, dtype))
        return jax.tree.map(_scaled, directions, mean), ScaleByOrthogonalState(mean)

    return optax.GradientTransformation(init, update)


def newton_schulz(x: jax.Array) -> jax.Array:
    """Returns a matrix [in, out] of about the same singular vectors as ``x``, whose singular values
    are near 1: five steps from X / (|X| + 1e-7), A = X X^T, then
    X = 3.4445 X + (-4.775 A + 2.0315 A A) X. torch's rows are flax's `out`; X^T has the transposed
    result, so that the smaller of A's two shapes is computed with.
    """
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if is_tall else x


def _scaled(u: jax.Array, mean: jax.Array) -> jax.Array:
    columns, rows = u.shape[-2:]
    return u.astype(mean.dtype) * math.sqrt(max(1.0, rows / columns))
