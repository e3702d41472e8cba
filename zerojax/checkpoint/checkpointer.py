"""``Checkpointer``: a folder of steps, written while training goes on."""

from __future__ import annotations

import operator
import os
import pathlib
import re
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import jax
from etils import epath

from zerojax.api import Zero
from zerojax.checkpoint import record as records
from zerojax.checkpoint import saved, state_tree
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError
from zerojax.checkpoint.pending import Pending
from zerojax.checkpoint.record import decoded, encoded
from zerojax.checkpoint.restore import restore
from zerojax.checkpoint.retention import Retention
from zerojax.checkpoint.saved import SavedStep
from zerojax.checkpoint.writer import Lock, Writer


class Checkpointer:
    """Saves training states in a folder and restores them on any mesh, at any stage.

    ``DIRECTORY/STEP/state`` is what orbax writes of the state, uncompressed, and
    ``DIRECTORY/STEP/zerojax.json`` the record beside it: config, mesh, the spec and checksum of
    every array, sizes and digests of the files, and what the caller adds. A step appears whole or
    not at all, and disappears likewise, whenever the process is killed.

    Args:
      directory: of the steps, local or mounted; made if need be. A bucket (``gs://``) is an error.
      zero: gives config and mesh; shardings too where an abstract state has none.
      keep: the newest steps that stay; None keeps all.
      keep_best: steps that stay for their ``metric``, besides the newest.
      metric: the entry of ``metrics`` by which steps are compared.
      mode: "min" where a smaller one is better.
      read_only: never writes, not even a lock, so that it can look at a running job's folder.

    Raises:
      CheckpointError: the folder cannot be written, or another run writes to it.

    Example:
      >>> import jax, jax.numpy as jnp, optax, tempfile, zerojax
      >>> from flax.training.train_state import TrainState
      >>> from zerojax.checkpoint import Checkpointer
      >>> def create_state(key):
      ...     params = {"w": jax.random.normal(key, (8, 4))}
      ...     return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
      >>> zero = zerojax.zero(stage=2)
      >>> state = zero.init(create_state, jax.random.key(0))
      >>> folder = tempfile.TemporaryDirectory()
      >>> with Checkpointer(folder.name, zero, keep=3) as checkpointer:
      ...     checkpointer.save(100, state, extra={"epoch": 1})

      Later, at another stage, on other devices:

      >>> zero = zerojax.zero(stage=3, mesh=zerojax.mesh(4))
      >>> with Checkpointer(folder.name, zero) as checkpointer:
      ...     abstract = zero.abstract_state(create_state, jax.random.key(0))
      ...     state = checkpointer.restore(abstract)
      ...     checkpointer.latest_step(), checkpointer.extra()
      (100, {'epoch': 1})
      >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        zero: Zero,
        *,
        keep: int | None = None,
        keep_best: int = 0,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
        read_only: bool = False,
    ) -> None:
        if not isinstance(zero, Zero):
            raise CheckpointError(
                f"zero: expected what zerojax.zero(...) returns, got {type(zero).__name__}"
            )
        self.directory = _local(directory)
        self.zero = zero
        self._retention = Retention(keep, keep_best, metric, mode)
        self._read_only, self._closed = read_only, False
        self._writer: Writer | None = None
        self._alone = threading.RLock()
        self._lock = None if read_only else self._claim()

    def _claim(self) -> Lock | None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index():
                return None
            lock = Lock(pathlib.Path(self.directory))
            lock.take()
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} cannot be written: {error}. Choose another folder; to read "
                "only, Checkpointer(..., read_only=True)"
            ) from None
        return lock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(str(failed))  # and let the caller's own be seen

    def save(
        self,
        step: int,
        state: Any,
        *,
        extra: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves a state, in the background: returns when it is copied from the devices.

        Waits for the save before it. The state may be donated to the next step at once. What lies
        in host memory is copied there until it is saved; what lies on a disk is in the step when
        this returns, with less than 1 GB of it in memory at a time.

        Args:
          step: updates done.
          state: a ``TrainState``, or a tuple of an ``nnx.Module``, its ``nnx.Optimizer`` and more.
          extra: what else a continued run needs (data position, keys, history): JSON, in which
            PRNG keys may stand.
          metrics: numbers by name, for ``keep_best`` and to look at.

        Raises:
          CheckpointError: the save before it failed (this one is not begun then, a further call
            tries it); the step or a later one is there already; the state is no state, or was
            donated; extra or metrics cannot be written.
        """
        with self._alone:
            writer = self._writing()
            writer.settle()
            step = _whole(step)
            self._check(step, state)
            numbers = self._retention.checked(step, metrics)
            pending = Pending(self.directory, step, state, self.zero, encoded(extra), numbers)
            writer.begin(pending)

    def wait(self) -> None:
        """Returns when the last save is on disk.

        Raises:
          CheckpointError: it failed; the steps before it are as they were.
        """
        with self._alone:
            if self._writer:
                self._writer.settle(swept=True)

    def restore(self, abstract_state: Any, step: int | None = None) -> Any:
        """A saved state, sharded as ``abstract_state`` says, every array checked.

        Stage, mesh and precision may differ from those that saved it. A loss scale that was not
        saved starts as the config has it, one that is not wanted is dropped. A ``TrainState``
        that plain orbax saved gets its optimizer wrapped.

        Args:
          abstract_state: of ``zero.abstract_state(...)``; or parameters alone, such as
            ``.params`` of it, an ``nnx.Module`` or its ``nnx.state``.
          step: which; the newest by default.

        Raises:
          CheckpointError: no such step (the message has those that there are), or one of another
            model (it has the arrays that differ).
          DamagedCheckpointError: it is not what was saved; the message names what is damaged, and
            the newest other step that looks whole.
        """
        return self._read(step, lambda there: restore(there, abstract_state, self.zero))

    def extra(self, step: int | None = None) -> Any:
        """What :meth:`save` was given as ``extra``; None for a step of plain orbax."""
        return self._read(step, lambda there: decoded(there.record.extra if there.record else None))

    def _read(self, step: int | None, act: Callable[[SavedStep], Any]) -> Any:
        step = None if step is None else _whole(step)
        with self._alone:
            self.wait()
            while True:
                folder = saved.at(self.directory, step)[-1]
                try:
                    return act(SavedStep(folder))
                except DamagedCheckpointError as error:
                    if folder.exists():
                        raise self._with_offer(error, folder) from error
                # The run that writes there has retired it.
                if step is not None:
                    raise CheckpointError(
                        f"step {step} was removed while it was read; there are {self.all_steps()}"
                    )

    def _with_offer(
        self, error: DamagedCheckpointError, damaged: epath.Path
    ) -> DamagedCheckpointError:
        others = [(n, f) for n, f in saved.folders(self.directory).items() if f != damaged]
        whole = next((n for n, folder in reversed(others) if _looks_whole(folder)), None)
        offer = (
            "No other step is whole."
            if whole is None
            else f"Step {whole} looks whole: restore(abstract_state, step={whole}). To go on "
            "saving from there delete later ones first."
        )
        return DamagedCheckpointError(f"{error}\n{offer}", whole)

    def all_steps(self) -> list[int]:
        """The steps that are there, oldest first; one that is still being saved is not."""
        return saved.steps(self.directory)

    def latest_step(self) -> int | None:
        """The newest of them, None where there is none."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The one with the best ``metric``, None where none has it."""
        recorded = {n: records.read(f) for n, f in saved.folders(self.directory).items()}
        scores = {n: self._retention.score(r.metrics or {}) for n, r in recorded.items() if r}
        return self._retention.best(scores)

    def delete(self, step: int) -> None:
        """Removes a step, as after going back to an earlier one."""
        with self._alone:
            writer = self._writing()
            self.wait()
            saved.at(self.directory, _whole(step))
            writer.delete(step)

    def close(self) -> None:
        """Waits for the last save, and lets the folder go."""
        with self._alone:
            try:
                self.wait()
            finally:
                self._closed = True
                if self._writer:
                    self._writer.close()
                    self._writer = None
                if self._lock:
                    self._lock.release()

    def _writing(self) -> Writer:
        if self._read_only:
            raise CheckpointError(f"{self.directory} was opened with read_only=True")
        if self._closed:
            raise CheckpointError(f"this Checkpointer of {self.directory} was closed")
        if self._lock and not self._lock.take():
            raise CheckpointError(
                f"another Checkpointer of this process writes to {self.directory}: close it first"
            )
        self._writer = self._writer or Writer(self.directory, self._retention)
        return self._writer

    def _check(self, step: int, state: Any) -> None:
        if state_tree.form_of(state) is None:
            raise CheckpointError(
                f"save takes a TrainState, or a tuple (model, optimizer, ...) of NNX, not "
                f"{type(state).__name__}"
            )
        later = [s for s in self.all_steps() if s >= step]
        if later:
            raise CheckpointError(
                f"{self.directory} has step {later[-1]} already, and {step} was to be saved: "
                "restore the newest step to go on from it, delete(step) those that shall go, or "
                "choose another folder"
            )


def _local(directory: str | os.PathLike[str]) -> epath.Path:
    """An absolute path; :class:`CheckpointError` for none, and for the URL of a bucket."""
    path = os.fspath(directory)
    if not path:
        raise CheckpointError("directory: the empty path names no folder")
    # pathlib makes "gs:/" of "gs://".
    if url := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", path):
        scheme = url[1].lower()
        instead = f"a mounted folder: {_MOUNTS.get(scheme, 'mount the store as a file system')}"
        if scheme == "file":
            instead = f"the path alone: {path.partition(':')[2].replace('//', '', 1)}"
        raise CheckpointError(
            f"directory: {path} is a URL ({scheme}://), and checkpoints are written to local "
            f"folders only. Give a local folder, or {instead}. (A folder of that name is "
            f"./{path}.)"
        )
    return epath.Path(path).expanduser().absolute()


_MOUNTS = {
    "gs": "gcsfuse mounts a bucket of Google Cloud",
    "s3": "mount-s3 mounts a bucket of S3",
    "az": "blobfuse2 mounts a container of Azure",
}


def _whole(step: Any) -> int:
    """A step's number; of NumPy and JAX too."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise CheckpointError(f"step {step!r}: a whole number of updates, 0 or more")
    return number


def _looks_whole(folder: epath.Path) -> bool:
    try:
        SavedStep(folder)
    except CheckpointError:
        return False
    return True
