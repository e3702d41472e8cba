"""Parameters of equal blocks: separate, as an unrolled model has them, and stacked for a loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from zerojax.xla.types import PyTree


def stacked(params: PyTree, blocks: str = "h_{}", stack: str | None = None) -> PyTree:
    """Stacks the parameters of separate blocks, for a model that loops over them
    (``flax.linen.scan``, ``nnx.scan``, ``jax.lax.scan``).

    Args:
      params: A tree of mappings and lists, such as a linen model's parameters or an ``nnx.State``.
        Its leaves are arrays, sharded or not, or ``jax.ShapeDtypeStruct``.
      blocks: The key of the blocks, with ``{}`` for their numbers 0, 1, ...: ``"h_{}"``, at any
        depth; ``"decoder/h_{}"`` for those below this key; ``"layers/{}"`` for a list of blocks.
      stack: The key of the stack; by default the key of the blocks without number, ``"h"``.

    Returns:
      The tree with one subtree in place of the L blocks, leaves [L, ...]. The stack of sharded
      arrays is sharded as they are, and not along L.

    Raises:
      ValueError: There are no such blocks, a number is missing, or blocks have other arrays.

    Example:
      >>> params = {"h_0": {"w": np.zeros((3, 4))}, "h_1": {"w": np.ones((3, 4))}}
      >>> jax.tree.map(np.shape, stacked(params, "h_{}"))
      {'h': {'w': (2, 3, 4)}}
    """
    names = _Names.of(blocks, stack)
    found: list[int] = []

    def visit(tree: PyTree, path: tuple[str, ...]) -> PyTree:
        if not isinstance(tree, Mapping | list | tuple):
            return tree
        items = dict(tree) if isinstance(tree, Mapping) else dict(enumerate(tree))
        items = {key: visit(x, (*path, str(key))) for key, x in items.items()}
        numbers = {n: key for key in items if (n := names.number(path, str(key))) is not None}
        if not numbers:
            return _like(tree, items)
        found.append(len(numbers))
        if missing := {*range(len(numbers))} - numbers.keys():
            raise ValueError(
                f"{'/'.join((*path, blocks))}: there are blocks {sorted(numbers)}, and "
                f"{min(missing)} is missing: number them from 0."
            )
        joined = _joined([items.pop(numbers[n]) for n in range(len(numbers))], blocks)
        if names.is_list and not items:
            return joined
        if names.is_list or names.stack in items:
            raise ValueError(
                f"{'/'.join((*path, blocks))}: beside the blocks there is "
                f"{names.stack if names.stack in items else next(iter(items))!r}: name the stack "
                "otherwise, stacked(params, blocks, stack)."
            )
        return _like(tree, {**items, names.stack: joined})

    return _visited(params, visit, found, blocks)


def unstacked(params: PyTree, blocks: str = "h_{}", stack: str | None = None) -> PyTree:
    """Splits the stacks of :func:`stacked` into separate blocks; takes the same arguments.

    Raises:
      ValueError: There is no such stack, or its arrays have different first dimensions.

    Example:
      >>> params = unstacked({"h": {"w": np.zeros((2, 3, 4))}}, "h_{}")
      >>> jax.tree.map(np.shape, params)
      {'h_0': {'w': (3, 4)}, 'h_1': {'w': (3, 4)}}
    """
    names = _Names.of(blocks, stack)
    found: list[int] = []
    is_state = isinstance(params, nnx.State)  # whose lists have the keys 0, 1, ...

    def visit(tree: PyTree, path: tuple[str, ...]) -> PyTree:
        if isinstance(tree, list | tuple):
            return _like(tree, {i: visit(x, (*path, str(i))) for i, x in enumerate(tree)})
        if not isinstance(tree, Mapping):
            return tree
        items: dict[Any, PyTree] = {}
        for key, x in tree.items():
            if not names.is_stack(path, str(key)):
                items[key] = visit(x, (*path, str(key)))
                continue
            split = _split(x, "/".join((*path, str(key))))
            found.append(len(split))
            split = [visit(block, (*path, str(key))) for block in split]
            if names.is_list:
                items[key] = dict(enumerate(split)) if is_state else split
            else:
                items |= {names.last.format(i): block for i, block in enumerate(split)}
        return _like(tree, items)

    return _visited(params, visit, found, names.stack)


class _Names(NamedTuple):
    """The keys of blocks and of their stack.

    Attributes:
      above: The keys above the blocks.
      last: The key of a block, with ``{}`` for its number.
      stack: The key of the stack.
    """

    above: tuple[str, ...]
    last: str
    stack: str

    @classmethod
    def of(cls, blocks: str, stack: str | None) -> _Names:
        *above, last = blocks.split("/")
        if last.count("{}") != 1 or "{}" in "".join(above) or (last == "{}" and not above):
            raise ValueError(
                f'blocks = {blocks!r} must be the key of blocks, such as "h_{{}}", or of a list, '
                '"layers/{}".'
            )
        if last == "{}":
            return cls((*above,), last, above[-1])
        return cls((*above,), last, last.replace("{}", "").strip("_.-") if stack is None else stack)

    @property
    def is_list(self) -> bool:
        """True if the blocks are a list, which the stack replaces."""
        return self.last == "{}"

    def number(self, path: tuple[str, ...], key: str) -> int | None:
        """Returns the number of the block with a key; None for other keys."""
        before, after = map(re.escape, self.last.split("{}"))
        match = re.fullmatch(f"{before}([0-9]+){after}", key)
        return int(match[1]) if match and self._is_below(path) else None

    def is_stack(self, path: tuple[str, ...], key: str) -> bool:
        """Returns whether a key is that of a stack."""
        return key == self.stack and self._is_below((*path, key) if self.is_list else path)

    def _is_below(self, path: tuple[str, ...]) -> bool:
        return path[len(path) - len(self.above) :] == self.above


def _visited(
    params: PyTree, visit: Callable[[PyTree, tuple[str, ...]], PyTree], found: list[int], key: str
) -> PyTree:
    """Returns the visited tree, in which ``visit`` must have found a ``key``."""
    is_state = isinstance(params, nnx.State)
    result = visit(params.raw_mapping if is_state else params, ())
    if not found:
        keys = [*params] if isinstance(params, Mapping) else []
        raise ValueError(f"the tree has no {key!r}, only {keys}: pass the key of yours.")
    return type(params)(result) if is_state else result


def _like(tree: Any, items: dict[Any, PyTree]) -> PyTree:
    """Returns a mapping or a sequence of the type of ``tree``."""
    if type(tree) is dict:
        return items
    if isinstance(tree, Mapping):
        return type(tree)(items)  # type: ignore[call-arg]
    make = getattr(tree, "_make", type(tree))  # a NamedTuple's
    return make(items.values())


def _joined(blocks: list[PyTree], name: str) -> PyTree:
    """Stacks blocks of equal arrays."""
    first, structure = jax.tree_util.tree_flatten_with_path(blocks[0])
    for i, block in enumerate(blocks):
        leaves, other = jax.tree.flatten(block)
        if other != structure:  # type: ignore[operator]
            raise ValueError(
                f"block {name.format(i)} has other arrays than block {name.format(0)}: stack "
                f"blocks of one kind ({other} instead of {structure})."
            )
        for (path, x), y in zip(first, leaves, strict=True):
            if (np.shape(x), x.dtype) != (np.shape(y), y.dtype):
                raise ValueError(
                    f"{name.format(i)}{keystr(path)} is {y.dtype}{[*y.shape]}, that of block 0 "
                    f"{x.dtype}{[*x.shape]}: stack only equal blocks."
                )
    joined = jax.tree.map(lambda *leaves: _stack(leaves), *blocks)
    return meta.add_axis(joined, 0, {meta.PARTITION_NAME: None})


def _split(stack: PyTree, name: str) -> list[PyTree]:
    """Splits a stack into its blocks."""
    leaves, structure = jax.tree.flatten(stack)
    sizes = {np.shape(x)[:1] for x in leaves}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"{name} is no stack of blocks: its arrays have first dimensions {sorted(sizes)}."
        )
    ((n,),) = sizes
    parts = [_unstack(x) for x in leaves]
    blocks = [jax.tree.unflatten(structure, [part[i] for part in parts]) for i in range(n)]
    return [meta.map_axis_meta(_without_axis, block) for block in blocks]


def _without_axis(box: Any) -> Any:
    return box.remove_axis(0, {meta.PARTITION_NAME: box.names[0]})


def _stack(leaves: tuple[Any, ...]) -> Any:
    sharding = _sharding(leaves[0], lambda spec: (None, *spec))
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        shape = (len(leaves), *leaves[0].shape)
        return jax.ShapeDtypeStruct(shape, leaves[0].dtype, sharding=sharding)
    if all(isinstance(x, np.ndarray) for x in leaves):
        return np.stack(leaves)
    if sharding is None:
        return jnp.stack(leaves)
    return jax.jit(lambda *x: jnp.stack(x), out_shardings=sharding)(*leaves)


def _unstack(x: Any) -> Any:
    sharding = _sharding(x, lambda spec: spec[1:])
    if isinstance(x, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)] * x.shape[0]
    if sharding is None:
        return [*x]
    return jax.jit(lambda x: [*jnp.unstack(x)], out_shardings=sharding)(x)


def _sharding(x: Any, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> NamedSharding | None:
    """Returns the sharding of an array with a changed spec; None without a NamedSharding."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    spec = PartitionSpec(*change(tuple(sharding.spec)))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
