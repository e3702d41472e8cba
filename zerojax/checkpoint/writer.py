"""Steps written through orbax, one at a time in the background, and removed again."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator

import jax
import orbax.checkpoint as ocp
from etils import epath

from zerojax.checkpoint import record as records
from zerojax.checkpoint import saved
from zerojax.checkpoint.disk import CHUNK_BYTES, DiskHandler
from zerojax.checkpoint.errors import CheckpointError, reason
from zerojax.checkpoint.pending import Pending
from zerojax.checkpoint.retention import Retention
from zerojax.offload.disk.array import DiskArray

DELETED = ".deleted"


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
