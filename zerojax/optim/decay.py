"""The parameters that weight decay leaves out, by their names."""

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

import jax
import optax

from zerojax.xla.types import PyTree

Mask: TypeAlias = PyTree | Callable[[optax.Params], PyTree]
"""optax's mask: a tree of bools like the parameters or a prefix, or a function that returns one."""

_WEIGHTS = {"kernel", "embedding"}
_BIAS_OR_SCALE = {"bias", "biases", "scale", "gamma", "beta", "gain"}
# LayerNorm_0, input_layernorm, normalization, norm1, ln_f, bn2; but not normal.
_NORM = re.compile(r"norm(?!al(?!i))|(?:^|_)(?:ln|bn|gn)(?:_|\d|$)", re.IGNORECASE)


def no_bias_and_norm(params: optax.Params) -> PyTree:
    """Returns a mask that decays all parameters but biases and those of norms.

    Names decide, since the number of dimensions is no guide: `nn.scan` stacks the biases of its
    layers to matrices. A leaf does not decay if the last word of its name is bias, scale, gain,
    gamma or beta, or if a module on its path is a norm (`LayerNorm_0`, `norm1`, `ln_f`, `bn2`,
    ...). Leaves named kernel or embedding always decay. flax's boxes and NNX's variables add no
    names to the path.

    Args:
      params: The parameters of linen or NNX, or any tree with names; `optax.MaskedNode` is kept.

    Returns:
      A tree of booleans like `params`.

    Example:
      >>> no_bias_and_norm({"ln_f": {"weight": 1.0}, "h": {"bias": 1.0, "kernel": 1.0}})
      {'h': {'bias': False, 'kernel': True}, 'ln_f': {'weight': False}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not is_bias_or_norm(names_on_path(path)), params
    )


def is_bias_or_norm(names: tuple[str, ...]) -> bool:
    """Returns whether a parameter is a bias or belongs to a norm; see :func:`no_bias_and_norm`.

    Example:
      >>> is_bias_or_norm(("attn", "out_bias")), is_bias_or_norm(("attn", "kernel"))
      (True, False)
    """
    if not names or names[-1] in _WEIGHTS:
        return False
    *modules, own = names
    return own.lower().split("_")[-1] in _BIAS_OR_SCALE or any(map(_NORM.search, modules))


def names_on_path(path: Iterable[object]) -> tuple[str, ...]:
    """Returns the names on a leaf's path, without the box around a flax parameter.

    Example:
      >>> (path, _), = jax.tree_util.tree_leaves_with_path({"h": [{"kernel": 1.0}]})
      >>> names_on_path(path)
      ('h', '0', 'kernel')
    """
    keys = list(path)
    # linen's Partitioned and NNX's Variable hold their array as an attribute.
    while keys and getattr(keys[-1], "name", None) in ("value", "raw_value"):
        keys.pop()
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
