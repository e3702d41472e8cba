"""Restore of a saved step: reads every array directly to its devices, host memory or disk."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.api import Zero
from zerojax.checkpoint import checksum, piecewise, state_tree
from zerojax.checkpoint.checksum import begin_share
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError
from zerojax.checkpoint.matching import match
from zerojax.checkpoint.processes import LONGEST, call_and_gather, gather_strings
from zerojax.checkpoint.saved import SavedArray, SavedStep
from zerojax.checkpoint.state_tree import Path, is_key
from zerojax.offload.disk.array import DiskArray
from zerojax.offload.disk.slices import Index, StoredShard, full_index, meet, shape_of
from zerojax.optim.loss_scale import LossScale
from zerojax.optim.wrap import ZeroTransformation, adopt
from zerojax.placement.states import abstract, split_state
from zerojax.plan.places import DISK, disk_sections
from zerojax.plan.state_sharding import Leaf
from zerojax.plan.stored import StoredArray, pad, unwrap_stored, user_leaf
from zerojax.train_state.nnx import ordered
from zerojax.weights.cast import narrowed
from zerojax.weights.shards import from_shards, padded_shape
from zerojax.xla.types import PyTree

_MAX_BYTES_IN_FLIGHT = 2**29
"""Limit on data that is read but not yet on the devices, unless two shards exceed it."""
_MIN_THREADS, _MAX_THREADS = 2, 8


class _Wanted(NamedTuple):
    """The target arrays of a restore.

    Attributes:
      leaves: Shapes, dtypes and shardings by path in the checkpoint.
      close: Builds the caller's object from the arrays by path.
      on_disk: The planned leaves of the arrays that belong on a disk, by path.
      given: The caller's leaves by path.
    """

    leaves: dict[Path, jax.ShapeDtypeStruct]
    close: Callable[[Mapping[Path, object]], PyTree]
    on_disk: Mapping[Path, Leaf]
    given: Mapping[Path, Any]


def restore(folder: epath.Path, abstract_state: PyTree, zero: Zero, name: str) -> PyTree:
    """Restores the state or parameters of a step in the form and shardings of ``abstract_state``.

    Every array is read shard by shard and compared with its recorded checksum, which the devices
    compute, or the host if it casts the array to another dtype. An array that belongs on a disk is
    written there slice by slice.

    Args:
      folder: The step's folder.
      abstract_state: See :meth:`Checkpointer.restore`.
      zero: The source of the plan and of missing shardings.
      name: The name of the exchanges between the processes, see :func:`call_on_all`.

    Raises:
      CheckpointError: the saved arrays are not those of ``abstract_state``.
      DamagedCheckpointError: arrays cannot be read, or differ from the saved ones.
    """
    local, shares = call_and_gather(
        name,
        lambda: _read_local_arrays(folder, abstract_state, zero),
        lambda arrays: json.dumps(arrays.shares),
        LONGEST,
    )
    _compare(local.saved, piecewise.sum_shares(shares))
    restored: dict[Path, object] = {
        path: _user_array(x, local.wanted.leaves[path]) for path, x in local.arrays.items()
    }
    restored |= _to_disk(local, zero, name)
    if len(restored) < len(local.wanted.leaves):
        restored |= _fresh(restored, local, zero)
    state = local.wanted.close(restored)
    if local.form == "pytree" and local.numbers is not None:
        zero.states.owned.add(state)
    return state


class _LocalArrays(NamedTuple):
    """The arrays that this process has read, before any step that involves other processes.

    Attributes:
      saved: The step.
      form: The form of the ``abstract_state`` to restore.
      numbers: The paths of zerojax's numbers in it; None if it is parameters.
      wanted: The target arrays.
      on_disk: The saved arrays that belong on a disk, by target path.
      arrays: The other arrays at rest, by target path; of PRNG keys their data.
      shares: This process's shares of the checksums of ``arrays``, by orbax's name.
    """

    saved: SavedStep
    form: state_tree.Form
    numbers: Sequence[Path] | None
    wanted: _Wanted
    on_disk: dict[Path, SavedArray]
    arrays: dict[Path, jax.Array]
    shares: dict[str, int]


def _read_local_arrays(folder: epath.Path, abstract_state: PyTree, zero: Zero) -> _LocalArrays:
    saved = SavedStep(folder)
    present = {state_tree.unboxed(leaf.path): leaf for leaf in saved.arrays()}
    form, only_params = state_tree.form_of(abstract_state), False
    if form == "pytree":
        if not any(hasattr(x, "dtype") for x in jax.tree.leaves(abstract_state)):
            kind = type(abstract_state).__name__
            raise CheckpointError(
                f"restore takes zero.abstract_state(create_state, key), not a {kind}"
            )
        only_params = saved.record is None or saved.record.form != "pytree"
        only_params |= {("params", *path) for path in state_tree.below((), abstract_state)} <= {
            *present
        }
    if only_params:
        is_nnx = all(path[0].isdecimal() for path in present)
        prefix = state_tree.PARAMS["nnx" if is_nnx else "linen"]
        if not any(path[: len(prefix)] == prefix for path in present):
            prefix = ()  # only parameters were saved
        replicated = NamedSharding(zero.mesh, PartitionSpec())
        wanted = _target(abstract_state, prefix=prefix, sharding=replicated)
    else:
        wanted = _full_state(abstract_state, form, zero)
    frozen = _take_frozen(saved, wanted)
    numbers = None if only_params else state_tree.numbers_of(abstract_state, form)
    sources = match(wanted.leaves, present, numbers, where=str(saved.folder))
    chosen = {path: present[source] for path, source in sources.items() if source is not None}
    for path, leaf in chosen.items():
        _check_kind(saved, leaf, wanted.leaves[path])
    in_memory = {path: leaf for path, leaf in chosen.items() if path not in wanted.on_disk}
    arrays, shares = _read(saved, in_memory, wanted.leaves)
    shares |= {name: share() for name, share in frozen.items()}
    on_disk = {path: leaf for path, leaf in chosen.items() if path in wanted.on_disk}
    return _LocalArrays(saved, form, numbers, wanted, on_disk, arrays, shares)


def _take_frozen(saved: SavedStep, wanted: _Wanted) -> dict[str, Callable[[], int]]:
    """Removes the arrays that were left out of a step from the targets, so that those of the
    caller's state stay; returns, by orbax's name, functions that return shares of their checksums.

    Raises:
      CheckpointError: The caller's state has no such array.
    """
    shares, paths = {}, {".".join(path): path for path in wanted.leaves}
    recorded = saved.record.frozen if saved.record else {}
    for name, leaf in recorded.items():
        path = paths.get(name.removesuffix(".value"))
        if path is None:
            continue
        x, struct = wanted.given[path], wanted.leaves.pop(path)
        if isinstance(x, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{saved.item}: {name} was left out as frozen. Pass its array, placed as by "
                "zero.init, in abstract_state: restore(abstract_state.replace(base=state.base))"
            )
        if (struct.shape, str(struct.dtype)) != (leaf.shape, leaf.dtype):
            raise CheckpointError(
                f"{saved.item}: {name} was {leaf.dtype}{[*leaf.shape]}, not "
                f"{struct.dtype}{[*struct.shape]}. {_SAME_BASE}"
            )
        shares[name] = begin_share(x)
    return shares


_SAME_BASE = "Pass the frozen arrays with which the step was trained."


def _full_state(state: PyTree, form: state_tree.Form, zero: Zero) -> _Wanted:
    """Targets all arrays of a state; uses the plan's shardings unless every array has its own.

    Raises:
      DiskError: the disk that the config names has too little room, or cannot be used.
    """
    objects = state if form == "nnx" else (state,)
    planned: dict[int, Leaf] = {}
    is_wrapped = form == "pytree" or isinstance(split_state(objects).tx, ZeroTransformation)
    is_placed = all(
        isinstance(getattr(x, "sharding", None), NamedSharding)
        for x in jax.tree.leaves(state_tree.tree_of(state))
    )
    has_disk = bool(disk_sections(zero.config))
    if has_disk or not (is_wrapped and is_placed):
        opened = zero.states.open(objects)
        plan = zero.states.plan(opened)
        shapes = abstract(opened.parts, plan)
        if has_disk:
            zero.states.placer.reserve(plan)
            leaves = zip(jax.tree.leaves(shapes), plan.all_leaves(), strict=True)
            planned = {id(x): leaf for x, leaf in leaves if leaf.place == DISK}
        objects = opened.close(shapes)
    if form != "nnx":
        return _target(objects[0], planned=planned)
    order = ordered(objects)
    graph, tree = nnx.split(tuple(objects[i] for i in order))

    def merged(tree: PyTree) -> PyTree:
        nodes = nnx.merge(graph, tree)
        by_position = dict(zip(order, nodes, strict=True))
        return tuple(by_position[i] for i in range(len(order)))

    return _target(tree, merged, planned=planned)


def _target(
    tree: PyTree,
    close: Callable[[PyTree], PyTree] = lambda tree: tree,
    *,
    prefix: Path = (),
    sharding: NamedSharding | None = None,
    planned: Mapping[int, Leaf] | None = None,
) -> _Wanted:
    """Targets all arrays of a tree.

    Args:
      tree: The arrays, abstract or not.
      close: Builds the caller's object from this tree of restored arrays.
      prefix: The path of the tree in the checkpoint.
      sharding: The sharding of arrays that have none.
      planned: The planned leaf of each array that belongs on a disk, by the array's ``id``.
    """
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [state_tree.unboxed((*prefix, *state_tree.strings(keys))) for keys, _ in keyed]
    leaves = dict(zip(paths, (x for _, x in keyed), strict=True))

    def rebuild(restored: Mapping[Path, object]) -> PyTree:
        # A leaf that is no array, such as a module's function, is the caller's.
        return close(jax.tree.unflatten(structure, [restored.get(p, leaves[p]) for p in paths]))

    structs = {
        path: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=getattr(unwrap_stored(x), "sharding", None) or sharding
        )
        for path, x in leaves.items()
        if hasattr(x, "shape")
    }
    on_disk = {path: planned[id(x)] for path, x in leaves.items() if planned and id(x) in planned}
    return _Wanted(structs, rebuild, on_disk, leaves)


def _read(
    saved: SavedStep,
    leaves: Mapping[Path, SavedArray],
    wanted: Mapping[Path, jax.ShapeDtypeStruct],
) -> tuple[dict[Path, jax.Array], dict[str, int]]:
    """Reads each distinct shard of this process's devices once.

    Returns:
      The arrays at rest by target path, padded as their shardings require, of PRNG keys their data;
      and this process's shares of their checksums by orbax's name.

    Raises:
      CheckpointError: numbers overflow in the target's dtype.
      DamagedCheckpointError: arrays cannot be read.
    """

    def read_array(path: Path) -> tuple[jax.Array, Callable[[], int]]:
        struct = state_tree.data_of(wanted[path])
        reader = _Reader(saved, leaves[path], struct.dtype)
        padded = padded_shape(struct.shape, struct.sharding)
        x = from_shards(padded, struct.sharding, lambda shard: reader.read(shard, shard.box))
        is_cast = leaves[path].dtype != struct.dtype
        share = reader.share if is_cast else begin_share(user_leaf(x, struct.shape))
        # Each process has all of an array that it does not share: process 0 counts it.
        is_counted = jax.process_index() == 0 or not struct.sharding.is_fully_addressable
        return x, share if is_counted else lambda: 0

    largest = max((_shard_bytes(leaf, wanted[path]) for path, leaf in leaves.items()), default=1)
    threads = max(_MIN_THREADS, min(_MAX_THREADS, _MAX_BYTES_IN_FLIGHT // largest))
    with ThreadPoolExecutor(threads, "zerojax-restore") as pool:
        read = dict(zip(leaves, pool.map(read_array, leaves), strict=True))
    shares = {leaves[path].name: share() for path, (_, share) in read.items() if saved.record}
    return {path: x for path, (x, _) in read.items()}, shares


class _Reader:
    """Reads boxes of a saved array for one target.

    Args:
      saved: The step.
      leaf: The array.
      dtype: The target's dtype; if it is another one, the host computes the checksum.
    """

    def __init__(self, saved: SavedStep, leaf: SavedArray, dtype: np.dtype) -> None:
        self._saved, self._leaf, self._dtype = saved, leaf, dtype
        self._shares: list[int] = []

    def read(self, shard: StoredShard, box: Index, *, summed: bool = False) -> np.ndarray:
        """Returns a box of a shard at rest, with zeros as its padding.

        Args:
          shard: The shard.
          box: The indices in the array at rest.
          summed: Whether to add the box to :meth:`share` even if its dtype is the target's.

        Raises:
          CheckpointError: numbers overflow in the target's dtype.
          DamagedCheckpointError: the box cannot be read.
        """
        if (inside := meet(box, full_index(self._leaf.shape))) is None:
            return np.zeros(shape_of(box), self._dtype)
        values = self._saved.read(self._leaf.name, inside)
        is_cast = values.dtype != self._dtype
        if (summed or is_cast) and shard.owner == jax.process_index():
            self._shares.append(checksum.share(values, [s.start for s in inside]))
        return pad(self._cast(values) if is_cast else values, shape_of(box))

    def share(self) -> int:
        """Returns this process's share of the checksum, as far as the host has computed it."""
        return sum(self._shares)

    def _cast(self, values: np.ndarray) -> np.ndarray:
        leaf, dtype = self._leaf, self._dtype
        cast, overflows = narrowed(values, dtype)
        if overflows.any():
            x64 = ", with jax_enable_x64" if leaf.dtype.itemsize == 8 else ""
            raise CheckpointError(
                f"{self._saved.item}: {leaf.name} does not fit into {dtype}: restore it as "
                f"{leaf.dtype}{x64}"
            )
        return cast


def _shard_bytes(leaf: SavedArray, struct: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of a shard in the saved dtype."""
    shard = struct.sharding.shard_shape(padded_shape(struct.shape, struct.sharding))
    return math.prod(shard) * leaf.dtype.itemsize


def _compare(saved: SavedStep, checksums: Mapping[str, int]) -> None:
    """Raises DamagedCheckpointError if checksums differ from the recorded ones."""
    record = saved.record
    recorded = record.leaves | record.frozen if record else None
    wrong = [name for name, x in checksums.items() if recorded and x != recorded[name].checksum]
    if record and (others := sorted(record.frozen.keys() & wrong)):
        more = f" ({len(others) - 1} more arrays too)" if others[1:] else ""
        digests = f"{record.frozen[others[0]].checksum:08x}, not {checksums[others[0]]:08x}"
        raise CheckpointError(
            f"{saved.item}: {others[0]} had the checksum {digests}{more}. {_SAME_BASE}"
        )
    if wrong:
        raise DamagedCheckpointError(
            f"{saved.item} differs from what was saved: {', '.join(sorted(wrong))}"
        )


def _check_kind(saved: SavedStep, leaf: SavedArray, struct: jax.ShapeDtypeStruct) -> None:
    """Raises CheckpointError for PRNG keys of another kind, or where only one of both is keys."""
    data = state_tree.data_of(struct)
    kind = saved.record.leaves[leaf.name].dtype if saved.record else str(leaf.dtype)
    if saved.record is None and (data.shape, data.dtype) == (leaf.shape, leaf.dtype):
        return  # plain orbax saves keys as their data
    if kind != str(struct.dtype) and (is_key(struct) or kind.startswith("key<")):
        raise CheckpointError(
            f"{leaf.name} was saved as {kind}, not {struct.dtype}: use one kind of keys"
        )


def _user_array(x: jax.Array, struct: jax.ShapeDtypeStruct) -> jax.Array | StoredArray:
    """Returns an array at rest as the user sees it."""
    if is_key(struct):
        return jax.random.wrap_key_data(x, impl=state_tree.key_impl(struct))
    return user_leaf(x, struct.shape)


def _to_disk(local: _LocalArrays, zero: Zero, name: str) -> dict[Path, DiskArray | StoredArray]:
    """Restores the arrays that belong on a disk, by path; returns once all checksums match."""
    disk_leaf, saved, leaves = zero.states.placer.disk_leaf, local.saved, local.on_disk
    targets = {
        path: disk_leaf(planned.path, planned.padded, struct.dtype, struct.sharding)
        for path in leaves
        for planned, struct in [(local.wanted.on_disk[path], local.wanted.leaves[path])]
    }
    if not targets:
        return {}

    def fill_targets() -> str:
        shares = {}
        for path, target in targets.items():
            reader = _Reader(saved, leaves[path], target.dtype)
            piecewise.fill(target, functools.partial(reader.read, summed=True))
            shares[leaves[path].name] = reader.share()
        return json.dumps(shares)

    _compare(saved, piecewise.sum_shares(gather_strings(name, fill_targets, LONGEST)))
    return {path: user_leaf(x.advance(), leaves[path].shape) for path, x in targets.items()}


def _fresh(restored: Mapping[Path, object], local: _LocalArrays, zero: Zero) -> dict[Path, object]:
    """Creates the arrays that a plain state, or a state of another precision, lacks."""
    wanted = local.wanted
    step = restored[state_tree.STEP[local.form]] if local.form in state_tree.STEP else 0
    new = adopt(None, np.asarray(jax.device_get(step)), LossScale.of(zero.config))
    values = {
        path: x
        for numbers in local.numbers or ()
        for path, x in zip(state_tree.below(numbers, new), jax.tree.leaves(new), strict=True)
    }
    fresh: dict[Path, object] = {}
    for path, struct in wanted.leaves.items():
        if path in restored:
            continue
        value = values[path] if path in values else jnp.zeros(struct.shape, struct.dtype)
        if path in wanted.on_disk:
            fresh[path] = zero.states.placer.put(value, struct.sharding, wanted.on_disk[path])
        else:
            at_rest = jax.device_put(
                pad(value, padded_shape(struct.shape, struct.sharding)), struct.sharding
            )
            fresh[path] = user_leaf(at_rest, struct.shape)
    return fresh
