"""Restore of a saved step: reads every array directly to its devices, host memory or disk."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from zerojax.api import Zero
from zerojax.checkpoint import piecewise, state_tree
from zerojax.checkpoint.checksum import begin_checksums, finish_checksum, share
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError, cannot_be_read
from zerojax.checkpoint.matching import match
from zerojax.checkpoint.processes import LONGEST, call_on_all, gather_strings
from zerojax.checkpoint.saved import SavedArray, SavedStep
from zerojax.checkpoint.state_tree import Path, is_key
from zerojax.offload.disk.array import DiskArray
from zerojax.optim.loss_scale import LossScale
from zerojax.optim.wrap import ZeroTransformation, adopt
from zerojax.placement.states import abstract, split_state
from zerojax.plan import layout
from zerojax.plan.places import DISK, PINNED, disk_sections
from zerojax.plan.state_sharding import Leaf
from zerojax.plan.stored import StoredArray, pad, unwrap_stored, user_leaf
from zerojax.train_state.state_parts import OpenedState, Parts
from zerojax.xla.types import PyTree, Shaped

_MAX_IN_FLIGHT_GB = 0.5
"""Limit in GB on data that is read but not yet on the devices; it bounds the host memory."""


class _Wanted(NamedTuple):
    """The target arrays of a restore.

    Attributes:
      leaves: Shapes, dtypes and shardings by path in the checkpoint.
      close: Builds the caller's object from the arrays, in the order of ``leaves``.
      on_disk: The planned leaves of the arrays that belong on a disk, by path.
    """

    leaves: dict[Path, jax.ShapeDtypeStruct]
    close: Callable[[Sequence[object]], PyTree]
    on_disk: Mapping[Path, Leaf]


def restore(folder: epath.Path, abstract_state: PyTree, zero: Zero, name: str) -> PyTree:
    """Restores the state or parameters of a step in the form and shardings of ``abstract_state``.

    Every array is read shard by shard in the saved dtype, checked against its recorded checksum,
    and then cast if the target has another dtype. An array that belongs on a disk is written there
    slice by slice.

    Args:
      folder: The step's folder.
      abstract_state: See :meth:`Checkpointer.restore`.
      zero: The source of the plan and of missing shardings.
      name: The name of the exchanges between the processes, see :func:`call_on_all`.

    Raises:
      CheckpointError: the saved arrays are not those of ``abstract_state``.
      DamagedCheckpointError: arrays cannot be read, or differ from the saved ones.
    """
    local = call_on_all(name, lambda: _read_local_arrays(folder, abstract_state, zero), LONGEST)
    saved, wanted, in_memory = local.saved, local.wanted, local.in_memory
    _verify(saved, {leaf: local.arrays[leaf.path] for leaf in in_memory.values()}, local.sound)
    restored: dict[Path, object] = {
        path: _fit(path, local.arrays[leaf.path], wanted) for path, leaf in in_memory.items()
    }
    restored |= _to_disk(saved, local.chosen, wanted, zero, name)
    if len(restored) < len(wanted.leaves):
        restored |= _fresh(wanted, restored, local, zero)
    return wanted.close([restored[path] for path in wanted.leaves])


class _LocalArrays(NamedTuple):
    """The arrays that this process has read, before any step that involves other processes.

    Attributes:
      saved: The step.
      form: The form of the ``abstract_state`` to restore.
      numbers: The paths of zerojax's numbers in it; None if it is parameters.
      wanted: The target arrays.
      chosen: The saved arrays to restore, by target path.
      in_memory: The subset of ``chosen`` that does not belong on a disk.
      arrays: The values of ``in_memory``, by path in the checkpoint.
      sound: The checksums, computed on the host, of 64-bit arrays that JAX narrows to 32 bits.
    """

    saved: SavedStep
    form: state_tree.Form
    numbers: Sequence[Path] | None
    wanted: _Wanted
    chosen: dict[Path, SavedArray]
    in_memory: dict[Path, SavedArray]
    arrays: dict[Path, jax.Array | StoredArray]
    sound: dict[str, int]


def _read_local_arrays(folder: epath.Path, abstract_state: PyTree, zero: Zero) -> _LocalArrays:
    saved = SavedStep(folder)
    present = {state_tree.unboxed(leaf.path): leaf for leaf in saved.arrays()}
    form, only_params = state_tree.form_of(abstract_state), False
    if form == "pytree":
        _check_arrays(abstract_state)
        only_params = saved.record is None or saved.record.form != "pytree"
        only_params |= {("params", *path) for path in state_tree.below((), abstract_state)} <= {
            *present
        }
        wanted = (_only_params if only_params else _any_pytree)(abstract_state, present, zero)
    else:
        wanted = _full_state(abstract_state, form, zero)
    numbers = None if only_params else state_tree.numbers_of(abstract_state, form)
    sources = match(wanted.leaves, present, numbers, where=str(saved.folder))
    chosen = {path: present[source] for path, source in sources.items() if source is not None}
    in_memory = {path: leaf for path, leaf in chosen.items() if path not in wanted.on_disk}
    structs = {leaf.path: _as_saved(wanted.leaves[path], leaf) for path, leaf in in_memory.items()}
    arrays = _read(saved, structs)
    for path, leaf in in_memory.items():
        _check_kind(path, arrays[leaf.path], wanted.leaves[path])
        x, dtype = unwrap_stored(arrays[leaf.path]), wanted.leaves[path].dtype
        if x.dtype != dtype:
            is_pinned = x.sharding.memory_kind == PINNED
            for shard in x.addressable_shards:
                block = np.asarray(shard.data) if is_pinned else shard.data
                _check_fits(saved, leaf, block, dtype)
    narrowed = [x for x in in_memory.values() if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype]
    host_checksums = {leaf.name: _host_checksum(saved, leaf) for leaf in narrowed}
    return _LocalArrays(saved, form, numbers, wanted, chosen, in_memory, arrays, host_checksums)


def _full_state(state: PyTree, form: state_tree.Form, zero: Zero) -> _Wanted:
    objects = state if form == "nnx" else (state,)
    opened: OpenedState = split_state(objects)
    if not isinstance(opened.tx, ZeroTransformation):
        opened = zero.states.open(objects)
    leaves, tree = jax.tree.flatten(opened.parts)
    if not all(isinstance(getattr(x, "sharding", None), NamedSharding) for x in leaves):
        leaves = jax.tree.leaves(abstract(opened.parts, zero.states.plan(opened)))
    paths = state_tree.paths_of(opened.parts, form)

    def close(arrays: Sequence[object]) -> PyTree:
        closed = opened.close(jax.tree.unflatten(tree, arrays))
        return closed if form == "nnx" else closed[0]

    return _Wanted(
        {
            path: _struct(x, unwrap_stored(x).sharding)
            for path, x in zip(paths, leaves, strict=True)
        },
        close,
        _on_disk(paths, opened, zero) if disk_sections(zero.config) else {},
    )


def _on_disk(
    paths: list[Path],
    opened: OpenedState,
    zero: Zero,
    in_order: Callable[[Parts], object] = lambda parts: parts,
) -> dict[Path, Leaf]:
    """Returns the planned leaves, by path, of the arrays that the config places on a disk.

    Args:
      paths: The paths of all arrays.
      opened: The state.
      zero: The source of the plan.
      in_order: Turns ``Parts`` into a tree whose leaves are in the order of ``paths``.

    Raises:
      DiskError: the disk has too little room, or cannot be used.
    """
    plan = zero.states.plan(opened)
    zero.states.placer.reserve(plan)
    leaves = jax.tree.unflatten(jax.tree.structure(opened.parts), plan.all_leaves())
    planned = zip(paths, jax.tree.leaves(in_order(leaves)), strict=True)
    return {path: leaf for path, leaf in planned if leaf.place == DISK}


def _check_arrays(params: PyTree) -> None:
    if not any(hasattr(x, "shape") and hasattr(x, "dtype") for x in jax.tree.leaves(params)):
        raise CheckpointError(
            f"restore takes zero.abstract_state(create_state, key), not a {type(params).__name__}"
        )


def _any_pytree(state: PyTree, present: dict[Path, SavedArray], zero: Zero) -> _Wanted:
    """Targets all arrays of a pytree; uses the plan's shardings unless every array has its own."""
    opened = split_state((state,))
    given = jax.tree.leaves(opened.parts.rest)
    if not all(isinstance(getattr(x, "sharding", None), NamedSharding) for x in given):
        planned = zero.states.open((state,))
        shapes = abstract(planned.parts, zero.states.plan(planned))
        opened = split_state(planned.close(shapes))
    (arrays,) = opened.parts.rest.values()
    leaves, tree = jax.tree.flatten(opened.parts.rest)
    structs = [_struct(x, unwrap_stored(x).sharding) for x in leaves]
    paths = state_tree.below((), arrays)

    def close(arrays: Sequence[object]) -> PyTree:
        remaining = iter(arrays)  # arrays without elements are not saved
        all_leaves = [next(remaining) if x.size else jnp.zeros(x.shape, x.dtype) for x in structs]
        parts = opened.parts._replace(rest=jax.tree.unflatten(tree, all_leaves))
        zero.states.owned.add(parts.rest)
        (closed,) = opened.close(parts)
        return closed

    wanted = {path: x for path, x in zip(paths, structs, strict=True) if x.size}
    on_disk = {}
    if disk_sections(zero.config):
        planned = zero.states.open((state,))

        def in_order(parts: Parts) -> object:
            return opened.kind.split(*planned.close(parts)).rest

        on_disk = _on_disk(paths, planned, zero, in_order)
    return _Wanted(wanted, close, on_disk)


def _only_params(params: PyTree, present: dict[Path, SavedArray], zero: Zero) -> _Wanted:
    is_nnx = all(path[0].isdecimal() for path in present)
    prefix = state_tree.PARAMS["nnx" if is_nnx else "linen"]
    if not any(path[: len(prefix)] == prefix for path in present):
        prefix = ()  # only parameters were saved
    leaves, tree = jax.tree.flatten(params)
    replicated = NamedSharding(zero.mesh, PartitionSpec())
    paths = state_tree.below(prefix, params)
    return _Wanted(
        {
            path: _struct(x, getattr(unwrap_stored(x), "sharding", None) or replicated)
            for path, x in zip(paths, leaves, strict=True)
        },
        lambda arrays: jax.tree.unflatten(tree, arrays),
        {},
    )


def _struct(x: Shaped, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _as_saved(wanted: jax.ShapeDtypeStruct, leaf: SavedArray) -> jax.ShapeDtypeStruct:
    """Returns the target in the saved dtype, which the checksum covers, as far as JAX has it."""
    if is_key(wanted):
        return wanted
    return wanted.update(dtype=jax.dtypes.canonicalize_dtype(leaf.dtype))


def _read(
    saved: SavedStep, wanted: dict[Path, jax.ShapeDtypeStruct]
) -> dict[Path, jax.Array | StoredArray]:
    """Reads arrays by path through orbax, only each device's shards, padded as shardings require.

    Raises:
      DamagedCheckpointError: arrays cannot be read.
    """
    handler = ocp.PyTreeCheckpointHandler()
    try:
        tree = handler.metadata(saved.item).tree
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        paths = [state_tree.strings(keys) for keys, _ in leaves]
        structs = [wanted.get(path) for path in paths]
        read_bytes = [
            _max_read_bytes(struct, metadata)
            for struct, (_, metadata) in zip(structs, leaves, strict=True)
            if struct is not None
        ]
        handler.close()
        handler = ocp.PyTreeCheckpointHandler(
            restore_concurrent_gb=max(_MAX_IN_FLIGHT_GB, 2e-9 * max(read_bytes, default=0))
        )
        args = ocp.args.PyTreeRestore(
            item=jax.tree.unflatten(
                structure, [ocp.PLACEHOLDER if s is None else s for s in structs]
            ),
            restore_args=jax.tree.unflatten(structure, [_restore_args(s) for s in structs]),
        )
        restored = jax.tree.leaves(handler.restore(saved.item, args=args))
    except RuntimeError:  # from the devices, such as out of memory
        raise
    except Exception as error:  # orbax has no exception class for unreadable data
        raise cannot_be_read(saved.item, error) from error
    finally:
        handler.close()
    by_path = {path: x for path, x in zip(paths, restored, strict=True) if path in wanted}
    return {path: user_leaf(x, wanted[path].shape) for path, x in by_path.items()}


def _padded(wanted: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Returns the shape of an array at rest, padded so that its shards have equal sizes."""
    shape, sharding = tuple(wanted.shape), wanted.sharding
    if not isinstance(sharding, NamedSharding):
        return shape
    return layout.padded_shape(shape, layout.full(sharding.spec, len(shape)), sharding.mesh)


def _max_read_bytes(wanted: jax.ShapeDtypeStruct, about: object) -> int:
    """Returns the maximum bytes read for one device: its shard, and the rest of the same chunks."""
    storage = getattr(about, "storage", None)
    chunk = (storage and storage.chunk_shape) or wanted.shape
    shard = wanted.sharding.shard_shape(_padded(wanted))
    sizes = [
        s if s % c == 0 else c if c % s == 0 else s + 2 * c
        for s, c in zip(shard, chunk, strict=False)
    ]
    return math.prod(sizes) * wanted.dtype.itemsize


def _restore_args(wanted: jax.ShapeDtypeStruct | None) -> ocp.RestoreArgs:
    if wanted is None:
        return ocp.RestoreArgs()
    padded = _padded(wanted)
    if padded == wanted.shape:
        return ocp.ArrayRestoreArgs(sharding=wanted.sharding)
    # Orbax pads with zeros.
    return ocp.ArrayRestoreArgs(sharding=wanted.sharding, global_shape=padded, strict=False)


def _verify(
    saved: SavedStep,
    arrays: dict[SavedArray, jax.Array | StoredArray],
    sound: Mapping[str, int],
) -> None:
    """Verifies the checksums of arrays; ``sound`` has those that the host has already computed.

    Raises:
      DamagedCheckpointError: an array differs from the saved one.
    """
    if saved.record is None:
        return
    device_checksums = begin_checksums(
        {leaf.name: x for leaf, x in arrays.items() if leaf.name not in sound}
    )
    _compare(saved, {**sound, **{name: finish_checksum(x) for name, x in device_checksums.items()}})


def _compare(saved: SavedStep, checksums: Mapping[str, int]) -> None:
    """Raises DamagedCheckpointError if checksums differ from the recorded ones."""
    recorded = saved.record.leaves if saved.record else None
    wrong = [name for name, x in checksums.items() if recorded and x != recorded[name].checksum]
    if wrong:
        raise DamagedCheckpointError(
            f"{saved.item} differs from what was saved: {', '.join(sorted(wrong))}"
        )


def _host_checksum(saved: SavedStep, leaf: SavedArray) -> int:
    """Computes the checksum of a saved array; its integers must fit the dtype that JAX has."""
    total = 0
    for start, block in saved.blocks(leaf.name):
        total += share(block, start)
        _check_fits(saved, leaf, block, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return total % 2**32


def _check_kind(path: Path, x: jax.Array | StoredArray, struct: jax.ShapeDtypeStruct) -> None:
    """Raises CheckpointError for PRNG keys of another kind, or where only one of both is keys."""
    if x.dtype != struct.dtype and (is_key(x) or is_key(struct)):
        raise CheckpointError(
            f"{'.'.join(path)} was saved as {x.dtype}, not {struct.dtype}: use one kind of keys"
        )


def _check_fits(
    saved: SavedStep, leaf: SavedArray, block: np.ndarray | jax.Array, dtype: np.dtype
) -> None:
    """Raises CheckpointError if numbers of a block overflow in ``dtype``."""
    with np.errstate(over="ignore"):
        cast = block.astype(dtype)
    if jnp.issubdtype(block.dtype, jnp.integer):
        overflows = (cast.astype(block.dtype) != block) | ((cast < 0) != (block < 0))
    elif jnp.finfo(dtype).max < jnp.finfo(block.dtype).max / 2:  # bfloat16 has float32's range
        overflows = abs(cast) == np.inf
        overflows &= abs(block) != np.inf
    else:
        return
    if overflows.any():
        x64 = ", with jax_enable_x64" if leaf.dtype.itemsize == 8 else ""
        raise CheckpointError(
            f"{saved.item}: {leaf.name} does not fit into {dtype}: restore it as {leaf.dtype}{x64}"
        )


def _fit(path: Path, x: jax.Array | StoredArray, wanted: _Wanted) -> jax.Array | StoredArray:
    dtype = wanted.leaves[path].dtype
    return x if x.dtype == dtype else user_leaf(_cast(unwrap_stored(x), dtype), x.shape)


def _cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    if x.sharding.memory_kind != PINNED:
        return x.astype(dtype)
    shards = [  # cast on the host, where the array is stored
        jax.device_put(np.asarray(shard.data).astype(dtype), shard.data.sharding)
        for shard in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def _to_disk(
    saved: SavedStep, leaves: Mapping[Path, SavedArray], wanted: _Wanted, zero: Zero, name: str
) -> dict[Path, DiskArray | StoredArray]:
    """Restores the arrays that belong on a disk, by path; returns once all checksums match."""
    disk_leaf = zero.states.placer.disk_leaf
    targets = {
        path: disk_leaf(planned.path, planned.padded, struct.dtype, struct.sharding)
        for path, planned in wanted.on_disk.items()
        if path in leaves
        for struct in [wanted.leaves[path]]
    }
    if not targets:
        return {}

    def fill_targets() -> str:
        shares = {
            leaves[path].name: piecewise.fill(
                target,
                leaves[path].shape,
                functools.partial(_read_box, saved, leaves[path], target.dtype),
            )
            for path, target in targets.items()
        }
        return json.dumps(shares)

    _compare(saved, piecewise.sum_shares(gather_strings(name, fill_targets, LONGEST)))
    return {path: user_leaf(x.advance(), leaves[path].shape) for path, x in targets.items()}


def _read_box(saved: SavedStep, leaf: SavedArray, dtype: np.dtype, box: object) -> np.ndarray:
    """Reads a box of a saved array; its numbers must fit ``dtype``."""
    values = saved.read(leaf.name, box)
    _check_fits(saved, leaf, values, dtype)
    return values


def _fresh(
    wanted: _Wanted, restored: Mapping[Path, object], local: _LocalArrays, zero: Zero
) -> dict[Path, object]:
    """Creates the arrays that a plain state, or a state of another precision, lacks."""
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
            at_rest = jax.device_put(pad(value, _padded(struct)), struct.sharding)
            fresh[path] = user_leaf(at_rest, struct.shape)
    return fresh
