"""DeepSpeed's tags for the figures of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp

from zerojax.xla.types import PyTree

PREFIX = "Train/Samples/"
LOSS = PREFIX + "train_loss"
RATE = PREFIX + "lr"
NORM = PREFIX + "grad_norm"

Scalar: TypeAlias = jax.Array | float
"""A number, or an array of shape [], maybe not ready."""


def figures(report: Mapping[str, Scalar], out: PyTree, *, fp16: bool) -> dict[str, Scalar]:
    """Returns every scalar of a step by its tag, without reading the arrays.

    DeepSpeed's engine has ``Train/Samples/train_loss``, ``lr`` and, in fp16, ``loss_scale``.
    zerojax adds ``grad_norm``, and the other scalars of the step's results under their names; if a
    name is already used, the tag is ``Train/Samples/metrics/<name>``.

    The loss is the result itself, the first element of a tuple, or a dict's ``train_loss`` or
    ``loss``.

    Args:
      report: The result of :func:`zerojax.telemetry`.
      out: The step's results besides the state.
      fp16: Whether the step has a loss scale.

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
    by_tag = {}
    for name in ("train_loss", "loss"):
        if name in named:
            by_tag[LOSS] = named.pop(name)
            break
    by_tag[RATE] = report["learning_rate"]
    if fp16:
        by_tag[PREFIX + "loss_scale"] = report["loss_scale"]
    by_tag[NORM] = report["grad_norm"]
    for name, value in named.items():
        tag = PREFIX + name
        by_tag[f"{PREFIX}metrics/{name}" if tag in by_tag else tag] = value
    return by_tag


def scalars(out: PyTree) -> dict[str, Scalar]:
    """Returns the real scalars, of shape [], in a result of any structure, by name.

    "/" joins the names of nested dicts and dataclasses. Positions before a name are omitted if
    the name stays unambiguous. The first element of a tuple is ``train_loss``, the others are
    ``output_<position>``.

    Example:
      >>> scalars({"eval": {"loss": 0.5}, "step": 3, "note": "warm"})
      {'eval/loss': 0.5, 'step': 3}
      >>> scalars((0.5, 0.25))
      {'train_loss': 0.5, 'output_1': 0.25}
    """
    numbers: dict[str, Scalar] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        if _is_number(leaf):
            name = next(name for name in _names(path) if name not in numbers)
            numbers[name] = leaf
    return numbers


def _is_number(leaf: object) -> bool:
    if isinstance(leaf, bool | int | float):
        return True
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape != () or dtype is None:
        return False
    is_real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    return is_real or jnp.issubdtype(dtype, jnp.bool_)


def _names(path: tuple[object, ...]) -> Iterator[str]:
    """Yields candidate names for the leaf at ``path``, the best one first."""
    parts = [_part(key) for key in path]
    texts = [str(part) for part in parts]
    name_start = next((i for i, part in enumerate(parts) if isinstance(part, str)), len(parts))
    if name_start < len(parts):
        yield "/".join(texts[name_start:])
        yield "/".join(texts)
    elif any(parts):
        yield "output_" + "_".join(texts)
    else:
        yield "train_loss"
    # The user's keys may equal any of these names.
    number = 2
    while True:
        yield "/".join([*texts, str(number)])
        number += 1


def _part(key: object) -> str | int:
    text = jax.tree_util.keystr((key,), simple=True)
    is_position = isinstance(key, jax.tree_util.SequenceKey | jax.tree_util.FlattenedIndexKey)
    return int(text) if is_position else text
