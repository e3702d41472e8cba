"""Steps written through orbax, one at a time in the background, and removed again."""

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
from zerojax.checkpoint.disk_arrays import CHUNK_BYTES, DiskHandler
from zerojax.checkpoint.errors import CheckpointError, reason
from zerojax.checkpoint.pending import Pending
from zerojax.checkpoint.retention import Retention
from zerojax.offload.disk.array import DiskArray

DELETED = ".deleted"
LOCK = ".writer"


class Writer:
    """Writes to ``directory``, which nobody else does, and retires steps as ``retention`` says.

    A step that is to go is first moved to ``.deleted``: a removal that is cut short must not look
    like a step.
    """

    def __init__(self, directory: epath.Path, retention: Retention) -> None:
        self._directory, self._retention = directory, retention
        self._pending: Pending | None = None
        self._sweeper: threading.Thread | None = None
        self._disk = DiskHandler()
        self._manager = self._fresh_manager()
        self._sweep()

    def _fresh_manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            **self._retention.options(),
            todelete_subdir=DELETED,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._finish),
        )
        # Trained floats hardly compress: it would take most of the time.
        handler = ocp.PyTreeCheckpointHandler(
            use_compression=False,
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (DiskArray, self._disk),
                (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),
            ),
        )
        return ocp.CheckpointManager(
            self._directory, options=options, item_handlers={saved.STATE: handler}
        )

    def begin(self, pending: Pending) -> None:
        """Begins to write a step; the one before must have been settled.

        Returns when the state's arrays are copied, and those that lie on a disk written.
        """
        # Beside the writing; another step's removal takes its time.
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
            self._disk.wait()

    def _finish(self) -> None:
        """All arrays are on disk, and orbax has still to commit them."""
        if jax.process_index() == 0 and self._pending is not None:
            self._pending.finish(self._disk.sums)

    def settle(self, *, swept: bool = False) -> None:
        """Returns when the step that was begun is there.

        Raises:
          CheckpointError: it failed. What was written of it is gone, and the next can be begun.
        """
        with self._telling():
            self._manager.wait_until_finished()
        self._pending = None
        if swept and self._sweeper:
            self._sweeper.join()
            self._sweep()

    def delete(self, step: int) -> None:
        """Removes a step."""
        # The first process deletes: not before the others have seen that the step is there.
        ocp.multihost.sync_global_processes("zerojax:delete")
        self._manager.delete(step)
        self._sweep()

    def close(self) -> None:
        with contextlib.suppress(Exception):  # settle has told it
            self._manager.close()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """What goes wrong, as a CheckpointError."""
        try:
            yield
        except Exception as error:
            step = self._pending.step if self._pending else None
            self._pending = None
            self._make_room(step)
            there = saved.steps(self._directory)
            kept = f"step {there[-1]} is the last good one" if there else "there is none yet"
            raise CheckpointError(
                f"step {step} was not saved in {self._directory} ({kept}): {reason(error)}"
            ) from error

    def _make_room(self, step: int | None) -> None:
        """Removes what was written of a step, and starts anew."""
        self.close()
        if jax.process_index() == 0:
            for left in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(left, ignore_errors=True)
        self._manager = self._fresh_manager()

    def _sweep(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self._directory / DELETED, ignore_errors=True)


class Lock:
    """The right to write to a folder, until :meth:`release`, or until this object or its process
    is no more."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._held: weakref.finalize | None = None

    def take(self) -> bool:
        """Whether it is held now; False where another object of this process has it.

        Raises:
          CheckpointError: another process has it.
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
        if self._held:
            self._held()
            self._held = None


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
