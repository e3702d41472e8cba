"""The writer of a folder: steps through orbax, one at a time in the background; and its lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import socket
import threading
import weakref
from collections.abc import Iterator

import jax
import orbax.checkpoint as ocp
from etils import epath

from zerojax.checkpoint import record as records
from zerojax.checkpoint import saved
from zerojax.checkpoint.errors import CheckpointError, reason
from zerojax.checkpoint.pending import PendingSave
from zerojax.checkpoint.piecewise import CHUNK_BYTES, PiecewiseHandler
from zerojax.checkpoint.retention import Retention
from zerojax.offload.disk.array import DiskArray
from zerojax.plan.stored import StoredArray

DELETED = ".deleted"
LOCK = ".writer"


class Writer:
    """Writes steps to ``directory``, and removes those that ``retention`` does not keep.

    A step is first moved to ``.deleted``: a removal that is interrupted must not look like a step.
    """

    def __init__(self, directory: epath.Path, retention: Retention) -> None:
        self._directory, self._retention = directory, retention
        self._pending: PendingSave | None = None
        self._sweeper: threading.Thread | None = None
        self._piecewise = PiecewiseHandler()
        self._manager = self._fresh_manager()
        self._sweep()

    def _fresh_manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            **self._retention.options(),
            todelete_subdir=DELETED,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._finish),
        )
        # Trained floats hardly compress, and compression would take most of the time.
        handler = ocp.PyTreeCheckpointHandler(
            use_compression=False,
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (DiskArray, self._piecewise),
                (StoredArray, self._piecewise),
                (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),
            ),
        )
        return ocp.CheckpointManager(
            self._directory, options=options, item_handlers={saved.STATE: handler}
        )

    def begin(self, pending: PendingSave) -> None:
        """Begins to write a step, once the one before is settled.

        Returns when the arrays in memory are copied, and the arrays on a disk written.

        Raises:
          CheckpointError: the write failed; nothing is left of the step.
        """
        # A removal is slow: it runs beside the write.
        self._sweeper = threading.Thread(target=self._sweep, daemon=True)
        self._sweeper.start()
        self._pending = pending
        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), pending.tree)
        args = ocp.args.PyTreeSave(pending.tree, save_args=chunks, custom_metadata=records.MARK)
        with self._telling():
            self._manager.save(
                pending.step,
                args=ocp.args.Composite(**{saved.STATE: args}),
                metrics=pending.metrics,
                force=True,
            )
            self._piecewise.wait()

    def _finish(self) -> None:
        """Adds the record when all arrays are written, before orbax commits the step."""
        if jax.process_index() == 0 and self._pending is not None:
            self._pending.finish(self._piecewise.sums)

    def settle(self, *, swept: bool = False) -> None:
        """Returns when the step that was begun is complete.

        Args:
          swept: Whether to wait for removals too.

        Raises:
          CheckpointError: the write failed; nothing is left of the step, and the next can begin.
        """
        with self._telling():
            self._manager.wait_until_finished()
        self._pending = None
        if swept and self._sweeper:
            self._sweeper.join()
            self._sweep()

    def delete(self, step: int) -> None:
        """Removes a step."""
        # The first process deletes, after the others have seen the step.
        ocp.multihost.sync_global_processes("zerojax:delete")
        self._manager.delete(step)
        self._sweep()

    def close(self) -> None:
        """Closes orbax's manager."""
        with contextlib.suppress(Exception):  # settle has raised it
            self._manager.close()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Raises any error as a CheckpointError, after removing the step."""
        try:
            yield
        except Exception as error:
            step = self._pending.step if self._pending else None
            self._pending = None
            self.close()
            if jax.process_index() == 0:
                for left in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                    shutil.rmtree(left, ignore_errors=True)
            self._manager = self._fresh_manager()
            there = saved.folders(self._directory)
            kept = f"step {max(there)} is the last good one" if there else "there is none yet"
            raise CheckpointError(
                f"step {step} was not saved in {self._directory} ({kept}): {reason(error)}"
            ) from error

    def _sweep(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self._directory / DELETED, ignore_errors=True)


class Lock:
    """The right to write to a folder, held until :meth:`release` or the end of this object.

    The operating system releases the lock when the process ends.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._held: weakref.finalize | None = None

    def take(self) -> bool:
        """Whether this object holds the lock now; False where another one of this process does.

        Raises:
          CheckpointError: another process holds the lock.
        """
        if self._held:
            return True
        file = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(file, 1000, 0).decode(errors="replace")
            os.close(file)
            if who == _me():
                return False
            raise CheckpointError(
                f"another run writes to {self._directory} ({who or 'unknown process'}): give this "
                "one a folder of its own, or stop the other; to read only, "
                "Checkpointer(..., read_only=True)"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, _me().encode(), 0)
        self._held = weakref.finalize(self, os.close, file)
        return True

    def release(self) -> None:
        """Lets the lock go."""
        if self._held:
            self._held()
            self._held = None


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
