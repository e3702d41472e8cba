"""DeepSpeed's tags for what a step reports and returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

PREFIX = "Train/Samples/"
LOSS = PREFIX + "train_loss"
RATE = PREFIX + "lr"

Event = tuple[str, float, int]
"""A tag, its value, and the global samples seen so far."""


def figures(report: Mapping[str, Any], out: Any, *, fp16: bool) -> dict[str, Any]:
    """Every scalar of a step by its tag, none of them read yet.

    As DeepSpeed's engine has them: ``Train/Samples/train_loss``, ``lr`` and, in fp16,
    ``loss_scale``. Of the same family, but not DeepSpeed's: ``grad_norm``, and the other scalars
    that the step returned, under their own names. Where such a name is one of those above,
    ``Train/Samples/metrics/<name>``.

    The loss is the result itself, the first of a tuple, or what a dict calls ``train_loss`` or
    ``loss``.

    Args:
      report: of :func:`zerojax.telemetry`.
      out: what the step returned besides the state.
      fp16: there is a loss scale.

    Example:
      >>> report = {"learning_rate": 0.1, "grad_norm": 2.0, "loss_scale": 1.0}
      >>> out = 0.5, {"accuracy": 0.9, "lr": 7.0}
      >>> for tag, value in figures(report, out, fp16=False).items():
      ...     print(tag, value)
      Train/Samples/train_loss 0.5
      Train/Samples/lr 0.1
      Train/Samples/grad_norm 2.0
      Train/Samples/accuracy 0.9
      Train/Samples/metrics/lr 7.0
    """
    named = scalars(out)
    found = {}
    for name in ("train_loss", "loss"):
        if name in named:
            found[LOSS] = named.pop(name)
            break
    found[RATE] = report["learning_rate"]
    if fp16:
        found[PREFIX + "loss_scale"] = report["loss_scale"]
    found[PREFIX + "grad_norm"] = report["grad_norm"]
    for name, value in named.items():
        tag = PREFIX + name
        found[f"{PREFIX}metrics/{name}" if tag in found else tag] = value
    return found


def scalars(out: Any) -> dict[str, Any]:
    """The real numbers within a result of any form, by name; everything else is left out.

    Names of nested dicts and dataclasses are joined by "/". Positions in front of a name are left
    out where that is unambiguous; the very first of a tuple is ``train_loss``, others are
    ``output_<position>``.

    Example:
      >>> scalars({"eval": {"loss": 0.5}, "step": 3, "note": "warm"})
      {'eval/loss': 0.5, 'step': 3}
      >>> scalars((0.5, 0.25))
      {'train_loss': 0.5, 'output_1': 0.25}
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        if _is_number(leaf):
            name = next(name for name in _names(path) if name not in found)
            found[name] = leaf
    return found


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, bool | int | float):
        return True
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape != () or dtype is None:
        return False
    real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    return real or jnp.issubdtype(dtype, jnp.bool_)


def _names(path: tuple[Any, ...]) -> Iterator[str]:
    """Names for the leaf at ``path``, the best one first."""
    parts = [_part(key) for key in path]
    whole = [str(part) for part in parts]
    front = next((i for i, part in enumerate(parts) if isinstance(part, str)), len(parts))
    if front < len(parts):
        yield "/".join(whole[front:])
        yield "/".join(whole)
    elif any(parts):
        yield "output_" + "_".join(whole)
    else:
        yield "train_loss"
    # A user's own keys may look like any of the above.
    number = 2
    while True:
        yield "/".join([*whole, str(number)])
        number += 1


def _part(key: Any) -> str | int:
    if isinstance(key, jax.tree_util.DictKey):
        return str(key.key)
    if isinstance(key, jax.tree_util.GetAttrKey):
        return key.name
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    return int(key.key) if isinstance(getattr(key, "key", None), int) else str(key)
