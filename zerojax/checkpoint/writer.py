"""The writer of a folder, which saves steps through orbax in the background; and its lock."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import pathlib
import socket
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from zerojax.checkpoint import record as records
from zerojax.checkpoint import saved, steps_folder
from zerojax.checkpoint.errors import CheckpointError, reason
from zerojax.checkpoint.pending import PendingSave
from zerojax.checkpoint.piecewise import CHUNK_BYTES, PiecewiseHandler, sum_shares
from zerojax.checkpoint.processes import LONGEST, call_on_first, gather_strings
from zerojax.checkpoint.retention import Retention
from zerojax.offload.disk.array import DiskArray
from zerojax.plan.stored import StoredArray
from zerojax.xla import compat

LOCK = ".writer"

_T = TypeVar("_T")


class Writer:
    """Writes steps to ``directory``, one at a time, and removes those that ``retention`` drops.

    All processes write their arrays into one folder, ``STEP.orbax-checkpoint-tmp``. Once all have
    done so, process 0 adds the files that exist once per step and gives the folder its final name.

    Orbax's handler writes the arrays. Orbax's managers are not used, because a process that cannot
    write blocks the other processes in the managers' barriers for minutes.

    Args:
      directory: The folder of the steps.
      retention: The steps to keep.
      name: The name of the exchanges between the processes, see :func:`call_on_all`.
    """

    def __init__(self, directory: epath.Path, retention: Retention, name: str) -> None:
        self._directory, self._retention, self._name = directory, retention, name
        self._step: int | None = None
        self._saving: Future[None] | None = None
        self._background = ThreadPoolExecutor(1, "zerojax-save")
        self._piecewise = PiecewiseHandler()
        # Trained floats hardly compress, and compression would take most of the save's time.
        self._handler = ocp.PyTreeCheckpointHandler(
            use_compression=False,
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (DiskArray, self._piecewise),
                (StoredArray, self._piecewise),
                (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),
            ),
        )
        compat.before_the_end(functools.partial(_settle_last, weakref.ref(self)))
        if jax.process_index() == 0:
            steps_folder.discard_unfinished(directory)

    def make(self, pending: PendingSave) -> None:
        """Creates the folder of the next step, in process 0, after the previous step is settled."""
        if jax.process_index() == 0:
            folder = steps_folder.under_way(self._directory, pending.step)
            steps_folder.discard(folder)  # left by a save that another process refused
            (folder / saved.STATE).mkdir(parents=True)

    def discard(self, pending: PendingSave) -> None:
        """Removes what process 0 and the others wrote of an unfinished step, in process 0."""
        if jax.process_index() == 0 and pending.step not in steps_folder.folders(self._directory):
            # Orbax stops at the first error, but writes that it has begun still create files.
            folder = steps_folder.under_way(self._directory, pending.step)
            steps_folder.discard(folder, pauses=(0.01, 0.1, 1.0, 4.0))

    def begin(self, pending: PendingSave) -> None:
        """Begins to write a step into the folder that process 0 created.

        Returns once the arrays in memory are copied and the arrays on a disk are written.

        Raises:
          CheckpointError: see :meth:`settle`.
        """
        # A removal is slow, so it runs concurrently with the write.
        self._background.submit(self._sweep)
        self._step = pending.step
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), pending.tree)
        args = ocp.args.PyTreeSave(pending.tree, save_args=save_args, custom_metadata=records.MARK)
        writes: list[object] = []
        error: Exception | None = None
        try:
            pending.begin_checksums()
            folder = steps_folder.under_way(self._directory, pending.step)
            state = folder / saved.STATE
            writes += _completed(lambda: self._handler.async_save(state, args=args)) or []
            if pending.has_disk_arrays:  # which the next step overwrites
                wait_for(writes)
            pending.write_extra(folder)
        except Exception as raised:
            error = raised
        pending.tree = None
        self._saving = self._background.submit(self._finish, pending, writes, error)
        if any(gather_strings(self._name, lambda: "failed" if error else "")):
            self.settle()

    def _finish(self, pending: PendingSave, writes: list[object], error: Exception | None) -> None:
        """Waits for the arrays of all processes, then gives the step its final name."""
        name = f"{self._name}: the end of a save"

        def await_writes() -> str:
            shares = pending.shares()
            wait_for(writes)
            if error:
                raise error
            return json.dumps(self._piecewise.shares | shares)

        try:
            sums = sum_shares(gather_strings(name, await_writes, LONGEST))
            call_on_first(name, lambda: self._commit(pending, sums), LONGEST)
        except Exception:
            with contextlib.suppress(CheckpointError):  # raised if a process is gone
                call_on_first(name, lambda: self.discard(pending), 30.0)
            raise

    def _commit(self, pending: PendingSave, sums: Mapping[str, int]) -> None:
        folder = steps_folder.under_way(self._directory, pending.step)
        self._handler.finalize(folder / saved.STATE)
        pending.finish(folder, sums)
        steps_folder.complete(folder, pending.step)
        folders = steps_folder.folders(self._directory)
        if pending.step not in folders:
            raise CheckpointError(f"{self._directory} does not show the finished step")
        with contextlib.suppress(OSError):  # the next save tries again
            for step in self._retention.expired(folders):
                steps_folder.remove(self._directory, step)

    def settle(self, *, swept: bool = False) -> None:
        """Waits until the step that was begun is complete in all processes.

        Args:
          swept: Whether to wait for removals too.

        Raises:
          CheckpointError: the write failed in a process; nothing is left of the step, and the next
            step can begin.
        """
        saving, step = self._saving, self._step
        self._saving = self._step = None
        try:
            if saving:
                saving.result()
        except Exception as error:
            last_good = self._last_good()
            raise CheckpointError(
                f"step {step} was not saved in {self._directory} ({last_good}): {reason(error)}"
            ) from error
        if swept:
            self._background.submit(self._sweep).result()

    def _last_good(self) -> str:
        try:
            folders = steps_folder.folders(self._directory)
        except CheckpointError as error:  # perhaps for the same reason
            return str(error)
        return f"step {max(folders)} is the last good one" if folders else "there is none yet"

    def delete(self, step: int) -> None:
        """Removes a step; only process 0 calls this method."""
        steps_folder.remove(self._directory, step)
        self._sweep()

    def close(self) -> None:
        """Stops the threads."""
        self._background.shutdown()
        self._handler.close()

    def _sweep(self) -> None:
        if jax.process_index() == 0:
            steps_folder.sweep(self._directory)


def _settle_last(kept: weakref.ref[Writer]) -> None:
    """Waits for a save that the program has not waited for; reports its error."""
    if writer := kept():
        try:
            writer.settle(swept=True)
        except CheckpointError:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]


def _completed(begin: Callable[[], Coroutine[object, object, _T]]) -> _T:
    """Runs a coroutine to its result, even if an asyncio loop already runs, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(begin())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(begin())).result()


def wait_for(writing: Iterable[Any]) -> None:
    """Waits for all writes, then raises the first error, if any."""
    errors = []
    for write in writing:
        try:
            write.result()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


class Lock:
    """The right to write to a folder, held until :meth:`release` or the end of this object.

    The operating system releases the lock when the process ends.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._held: weakref.finalize | None = None
        self._file = -1

    def take(self) -> bool:
        """Takes the lock; returns False if another object of this process holds it.

        Raises:
          CheckpointError: another process holds the lock, or the file that this object has locked
            is no longer the folder's lock file.
        """
        if self._held:
            self._require_place()
            return True
        file = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 1000, 0).decode(errors="replace")
            os.close(file)
            if holder == _this_process():
                return False
            raise CheckpointError(
                f"another run writes to {self._directory} ({holder or 'unknown process'}): "
                "stop it, or pass Checkpointer(..., read_only=True)"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, _this_process().encode(), 0)
        self._file, self._held = file, weakref.finalize(self, os.close, file)
        return True

    def _require_place(self) -> None:
        """Checks that the folder's lock file is still the file that this object has locked."""
        path = self._directory / LOCK
        try:
            if os.path.samestat(os.stat(path), os.fstat(self._file)):
                return
            what = "another file"
        except (FileNotFoundError, NotADirectoryError):
            what = "gone"
        raise CheckpointError(
            f"{self._directory} was removed or replaced while this run saved there: its lock, "
            f"{LOCK}, is {what}. Nothing was saved: make a new Checkpointer"
        )

    def release(self) -> None:
        """Releases the lock."""
        if self._held:
            self._held()
            self._held = None


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
