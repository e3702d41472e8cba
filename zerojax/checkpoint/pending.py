"""A save in progress: the record is begun with the save and finished once its files exist."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pydantic_core
from etils import epath
from jax.sharding import NamedSharding

from zerojax.api import Zero
from zerojax.checkpoint import record as records
from zerojax.checkpoint import saved, state_tree
from zerojax.checkpoint.checksum import begin_share
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.record import LeafRecord, Record, Spec
from zerojax.checkpoint.state_tree import is_key
from zerojax.config import ZeroConfig
from zerojax.offload.disk.array import DiskArray
from zerojax.plan.places import PINNED
from zerojax.plan.stored import StoredArray, unwrap_stored, user_leaf
from zerojax.xla.types import PyTree

_SMALL = 1024
"""Maximum bytes of an array that every save compares between the processes."""

_PACKAGES = ("zerojax", "jax", "flax", "optax", "orbax-checkpoint")


class PendingSave:
    """A state to be written.

    Args:
      step: The number of updates done.
      state: A ``TrainState``, a tuple of NNX objects, or another pytree of arrays.
      zero: The source of the recorded config and mesh.
      extra: JSON, see :func:`zerojax.checkpoint.record.encode_json`.
      metrics: Numbers by name.
      frozen: Whether to leave an array out, by its name, and to record its checksum alone.

    Attributes:
      tree: The arrays that orbax writes; None once they are copied.
      replicated: A digest, by name, of each small array of integers, bools or keys that is
        replicated across the processes. Floats are left out: they may differ in the last bit,
        because some devices sum in any order.
      extra_by_process: Whether each process writes a separate ``extra``.

    Raises:
      CheckpointError: an array of the state cannot be saved.
    """

    def __init__(
        self,
        step: int,
        state: PyTree,
        zero: Zero,
        extra: PyTree,
        metrics: dict[str, float] | None,
        frozen: Callable[[str], bool],
    ) -> None:
        self.step = step
        tree = state_tree.tree_of(state)
        _check_arrays(tree, frozen)
        leaves = state_tree.arrays_by_name(tree)
        self._frozen = {name: x for name, x in leaves.items() if frozen(name)}
        self.tree: PyTree = jax.tree_util.tree_map_with_path(
            lambda keys, x: (
                None if ".".join(state_tree.strings(keys)) in self._frozen else _array(x)
            ),
            tree,
        )
        leaves = self._frozen | state_tree.arrays_by_name(self.tree)
        self.replicated: dict[str, str] = {
            name: _digest(x) for name, x in leaves.items() if _is_replicated(x)
        }
        self.extra_by_process: bool = False
        self._shares: dict[str, Callable[[], int]] = {}
        self._began = time.time_ns()
        self._leaves = {
            name: LeafRecord(shape=x.shape, dtype=str(x.dtype), spec=_spec(x), checksum=0)
            for name, x in leaves.items()
        }
        self._record = Record(
            step=step,
            saved=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions={name: _version(name) for name in _PACKAGES},
            form=state_tree.form_of(state),
            stage=zero.config.stage,
            compute_dtype=zero.config.compute_dtype,
            mesh=dict(zero.mesh.shape),
            axis=zero.states.axis,
            devices=zero.mesh.devices.flat[0].device_kind,
            processes=jax.process_count(),
            config=_config(zero.config),
            leaves={},
            files={},
            metrics=metrics,
            extra=extra,
        )

    @property
    def word(self) -> str:
        """This process's digests of ``replicated`` and ``extra``, for :meth:`compare`."""
        return json.dumps([_sha256(self.replicated), _sha256(self._record.extra)])

    def compare(self, words: Sequence[str]) -> bool:
        """Compares the :attr:`word` of all processes.

        The ``extra`` may differ, and then each process writes its own; replicated arrays may not.

        Returns:
          Whether the small replicated arrays are equal in all processes.
        """
        arrays, extras = zip(*map(json.loads, words), strict=True)
        self.extra_by_process = len({*extras}) > 1
        return len({*arrays}) == 1

    def write_extra(self, folder: epath.Path) -> None:
        """Writes this process's ``extra`` if the processes passed different ones."""
        if self.extra_by_process:
            file = records.extra_file(folder, jax.process_index())
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(self._record.extra))

    @property
    def has_disk_arrays(self) -> bool:
        """True if the state keeps arrays on a disk."""
        return any(isinstance(x, DiskArray) for x in jax.tree.leaves(unwrap_stored(self.tree)))

    def begin_checksums(self) -> None:
        """Starts the checksums of arrays in memory; all processes call this together."""
        leaves = self._frozen | state_tree.arrays_by_name(self.tree)
        self._shares = {
            name: begin_share(x)
            for name, x in leaves.items()
            if not isinstance(unwrap_stored(x), DiskArray)
        }

    def shares(self) -> dict[str, int]:
        """Returns this process's shares of the checksums of arrays in memory; drops the arrays."""
        return {name: self._shares.pop(name)() for name in [*self._shares]}

    def finish(self, folder: epath.Path, checksums: Mapping[str, int]) -> None:
        """Writes the record and orbax's metadata, before the step's folder gets its final name.

        Args:
          folder: The step's folder, with all arrays already written.
          checksums: The checksums of the arrays by name.

        Raises:
          CheckpointError: the written step is incomplete.
        """
        leaves = {
            name: leaf.model_copy(update={"checksum": checksums[name]})
            for name, leaf in self._leaves.items()
        }
        frozen = {name: leaves.pop(name) for name in self._frozen}
        items = {saved.STATE: ocp.PyTreeCheckpointHandler.typestr()}
        if (metrics := self._record.metrics) is not None:
            items["metrics"] = ocp.JsonCheckpointHandler.typestr()
            (folder / "metrics").mkdir()
            (folder / "metrics" / "metrics").write_text(json.dumps(metrics))
        update = {"leaves": leaves, "frozen": frozen, "files": records.files(folder)}
        records.write(folder, self._record.model_copy(update=update))
        metadata = {
            "item_handlers": items,
            "init_timestamp_nsecs": self._began,
            "commit_timestamp_nsecs": time.time_ns(),
        }
        (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))
        saved.require_complete(folder)
        if self.extra_by_process:
            for process in range(jax.process_count()):
                if not records.extra_file(folder, process).exists():
                    raise CheckpointError(f"{folder}: the extra of process {process} is missing")


def _is_replicated(x: object) -> bool:
    """Returns whether ``x`` is a small replicated array of integers, bools or keys."""
    return (
        isinstance(x, jax.Array)
        and not x.is_fully_addressable
        and x.is_fully_replicated
        and x.nbytes <= _SMALL
        and (is_key(x) or x.dtype.kind in "iub")
    )


def _digest(x: jax.Array) -> str:
    """Returns a small array as a string: its values, or a SHA-256 if there are more than 4."""
    local = x.addressable_data(0)
    values = np.asarray(jax.random.key_data(local) if is_key(local) else local)
    return repr(values.tolist()) if values.size <= 4 else _sha256(values.tobytes().hex())


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check_arrays(tree: PyTree, frozen: Callable[[str], bool]) -> None:
    """Checks that every array can be saved, or left out.

    Raises:
      CheckpointError: an array was donated, is half updated or abstract, is local to one process,
        or shares its name with another array.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [".".join(state_tree.strings(keys)) for keys, _ in leaves]
    for name, (_, x) in zip(names, leaves, strict=True):
        problem, held = None, unwrap_stored(x)
        if names.count(name) > 1:
            problem = "is the name of two arrays, as orbax joins keys with dots: rename a key"
        elif isinstance(x, jax.ShapeDtypeStruct):
            problem = f"is abstract, {x}: save a state with arrays, such as zero.init returns"
        elif isinstance(held, jax.Array | DiskArray) and held.is_deleted():
            problem = "was donated to a step: save the state that the step returned"
        elif isinstance(held, DiskArray) and held.leaf.half:
            problem = f"cannot be saved: {held.leaf.interrupted}"
        elif jax.process_count() > 1 and getattr(held, "is_fully_addressable", True):
            problem = "is only this process's: save a state that zero.init or a step returned"
        elif x.dtype == jnp.uint4 and not frozen(name):
            problem = (
                "is uint4, which orbax cannot write. If it is frozen, leave it out: frozen=..."
            )
        elif isinstance(held, DiskArray) and frozen(name):
            problem = "is on a disk, and frozen leaves out only arrays in memory"
        if problem:
            raise CheckpointError(f"{name} {problem}")


def _array(x: PyTree) -> jax.Array | DiskArray | StoredArray:
    """Returns a leaf as an array that does not change during the save."""
    at_rest = unwrap_stored(x)
    if isinstance(at_rest, jax.Array) and at_rest.sharding.memory_kind == PINNED:
        # Orbax would keep a reference to host memory, so the next step could not donate the array.
        return user_leaf(jnp.copy(at_rest), x.shape)
    return x if isinstance(x, jax.Array | DiskArray | StoredArray) else jnp.asarray(x)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _spec(x: object) -> Spec | None:
    sharding = getattr(unwrap_stored(x), "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return [list(entry) if isinstance(entry, tuple) else entry for entry in sharding.spec]


def _config(config: ZeroConfig) -> dict[str, object]:
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    del fields["notes"]
    plain: dict[str, object] = pydantic_core.to_jsonable_python(
        fields, fallback=lambda x: dict(x) if isinstance(x, Mapping) else repr(x)
    )
    return plain
