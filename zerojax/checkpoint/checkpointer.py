"""``Checkpointer``: a folder of steps, written while training continues."""

from __future__ import annotations

import json
import operator
import os
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn, Self, SupportsIndex

import jax
from etils import epath

from zerojax.api import Zero
from zerojax.checkpoint import record as records
from zerojax.checkpoint import saved, state_tree, steps_folder
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError
from zerojax.checkpoint.pending import PendingSave
from zerojax.checkpoint.processes import (
    call_and_gather,
    call_on_all,
    call_on_first,
    gather_strings,
    share_a_folder,
)
from zerojax.checkpoint.record import encode_json
from zerojax.checkpoint.restore import restore
from zerojax.checkpoint.retention import Retention
from zerojax.checkpoint.saved import SavedStep
from zerojax.checkpoint.writer import Lock, Writer
from zerojax.distributed.join import require_same
from zerojax.distributed.lockstep import lockstep
from zerojax.distributed.roll_call import by_value
from zerojax.distributed.watchdog import paused
from zerojax.train_state.pytree import is_array
from zerojax.xla.types import PyTree


class Checkpointer:
    """Saves training states in a folder and restores them on any mesh, at any stage.

    ``DIRECTORY/STEP/state`` holds the state, which orbax writes uncompressed, and
    ``DIRECTORY/STEP/zerojax.json`` the record: config, mesh, the spec and checksum of every array,
    sizes and digests of the files, and the caller's additions. Steps appear and disappear
    atomically, even if the process is killed.

    With several processes, every process creates a ``Checkpointer`` on the same folder and calls
    :meth:`save`, :meth:`restore`, :meth:`delete` and :meth:`close`. A failure in one process is
    raised in all.

    Args:
      directory: The folder of the steps, created if it does not exist. Local, mounted, or in a
        Google Cloud bucket (``gs://``, with ``gcsfs``), which has no lock.
      zero: Provides config and mesh, and the shardings for an abstract state without any.
      keep: The number of newest steps to keep; None keeps all.
      keep_best: The number of best steps to keep in addition.
      metric: The entry of ``metrics`` by which steps are compared.
      mode: "min" if a smaller metric is better, or "max".
      read_only: Write nothing, not even a lock: for the folder of a running job.

    Raises:
      CheckpointError: the folder cannot be written, another run writes to it, or the processes do
        not share it (the message names those processes).

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
            raise CheckpointError(f"zero: expected zerojax.zero(...), got {type(zero).__name__}")
        self.directory: epath.Path = steps_folder.opened(directory)
        self.zero = zero
        self._retention = Retention(keep, keep_best, metric, mode)
        self._read_only, self._closed = read_only, False
        self._writer: Writer | None = None
        self._call_lock = threading.RLock()
        self._lock: Lock | None = None
        self._name = "checkpoints, read"
        if not read_only:
            self._note("a Checkpointer")
            try:
                self._name = share_a_folder(self.directory, self._claim)
            except CheckpointError:
                if self._lock:
                    self._lock.release()
                raise

    def _claim(self) -> None:
        """Creates the folder and takes its lock, in process 0."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if steps_folder.in_bucket(self.directory):
                return
            lock = Lock(pathlib.Path(self.directory))
            lock.take()
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} cannot be written: {error}. Name another, or pass read_only=True"
            ) from None
        self._lock = lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _tb: object) -> None:
        try:
            self.close()
        except CheckpointError as close_error:
            if error is None:
                raise
            error.add_note(str(close_error))  # the caller's error propagates

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        extra: PyTree = None,
        metrics: Mapping[str, object] | None = None,
        frozen: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Saves a state in the background; returns once the state is copied from the devices.

        The call first waits for the earlier save. On return, the state may be donated to the next
        step. Arrays in host memory are copied, and the copies stay in host memory until they are
        saved. Arrays on a disk are already saved on return, with less than 1 GB of them in memory
        at a time.

        Args:
          step: The number of updates done.
          state: A ``TrainState``, or a tuple of an ``nnx.Module``, its ``nnx.Optimizer`` and more.
          extra: Anything else that a continued run needs (data position, keys, history): JSON,
            which may contain PRNG keys. If the processes pass different values, each gets its own
            back.
          metrics: Numbers by name, for ``keep_best`` and for readers.
          frozen: ``frozen(name)`` returns whether to leave out an array, by orbax's name such as
            ``"base.kernel.qvalue"``, and to record its checksum: for the base of adapters.

        Raises:
          CheckpointError: the earlier save failed (this save has not begun then; call again); this
            step or a later one exists; the state has no arrays, was donated, or differs between
            the processes; extra or metrics cannot be written; the folder was removed or replaced.
        """

        def prepare() -> PendingSave:
            writer = self._writing()
            writer.settle()
            number = _step_number(step)
            self._check(number, state)
            checked_metrics = self._retention.checked(number, metrics)
            given = encode_json(extra), checked_metrics, frozen
            pending = PendingSave(number, state, self.zero, *given)
            writer.make(pending)
            return pending

        self._note(f"a save of step {step}")
        with self._call_lock, paused("a save"):
            pending, digests = call_and_gather(self._name, prepare, lambda p: p.word)
            if not pending.compare(digests):
                self._writing().discard(pending)
                self._refuse(gather_strings(self._name, lambda: json.dumps(pending.replicated)))
            self._writing().begin(pending)

    def _refuse(self, replicated: list[str]) -> NoReturn:
        """Raises CheckpointError with the arrays that differ between the processes."""
        digests: list[dict[str, str]] = [json.loads(text) for text in replicated]
        names = [name for name in digests[0] if len({each.get(name) for each in digests}) > 1]
        values = by_value({i: each.get(names[0], "none") for i, each in enumerate(digests)})
        summary = "; ".join(f"{value} in {processes}" for value, processes in values.items())
        more = f" ({len(names) - 1} more arrays do too)" if names[1:] else ""
        raise CheckpointError(
            f"{names[0]} of the state differs between the processes: {summary}{more}. Change it "
            "alike in all, as by state.replace(step=...)"
        )

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
          CheckpointError: the save failed; earlier steps are unchanged.
        """
        with self._call_lock, paused("a save"):
            if self._writer:
                self._writer.settle(swept=True)

    def restore(self, abstract_state: PyTree, step: int | None = None) -> PyTree:
        """Restores a saved state with the shardings of ``abstract_state``; checks every array.

        Stage, mesh and precision may differ from those of the save. A loss scale that was not
        saved starts at the config's initial value; a saved loss scale that the state lacks is
        dropped. If plain orbax saved a ``TrainState``, its optimizer is wrapped.

        Arrays that the save left out as ``frozen`` are those of ``abstract_state``, placed as
        ``zero.init`` places them; their checksums must be the recorded ones.

        Args:
          abstract_state: The result of ``zero.abstract_state(...)``; or only parameters, such as
            its ``.params``, an ``nnx.Module`` or its ``nnx.state``.
          step: The step; the newest by default.

        Raises:
          LaunchError: the processes' configs differ.
          CheckpointError: the step does not exist (the message lists the existing steps), or holds
            another model (the message lists the arrays that differ).
          DamagedCheckpointError: the step differs from the saved one; the message names the damage
            and the newest other step that appears intact.
        """
        self._note("a restore")
        require_same(self.zero.config, self.zero.mesh)
        return self._read(
            step,
            lambda folder: restore(folder, abstract_state, self.zero, self._name),
            lambda act: call_on_first(self._name, act),
        )

    def extra(self, step: int | None = None, process: int | None = None) -> PyTree:
        """Returns the ``extra`` that was passed to :meth:`save`; None for a step of plain orbax.

        Args:
          step: The step; the newest by default.
          process: The index of the process that saved the ``extra``; by default this process's.

        Raises:
          CheckpointError: the step does not exist; or each process saved a different ``extra``,
            and the number of processes has changed.
        """

        def read(folder: epath.Path) -> PyTree:
            saved_step = SavedStep(folder)
            if process is not None:
                return saved_step.extra(process)
            saved_step.require_processes(jax.process_count())
            return saved_step.extra(jax.process_index())

        return self._read(step, read, lambda act: act())

    def _read(
        self,
        step: int | None,
        read: Callable[[epath.Path], object],
        ask: Callable[[Callable[[], str]], str],
    ) -> object:
        """Returns the result of ``read`` for a step's folder.

        ``ask`` calls a function in one process and returns its answer in every process.
        """
        step = None if step is None else _step_number(step)

        def find_relative_path() -> str:
            return os.path.relpath(saved.at(self.directory, step)[-1], self.directory)

        with self._call_lock, paused("a restore"):
            self.wait()
            while True:
                relative_path, root = ask(find_relative_path), self.directory
                folder = {".": root, "..": root.parent}.get(relative_path, root / relative_path)
                try:
                    return read(folder)
                except DamagedCheckpointError as error:
                    if ask(lambda: "exists" if folder.exists() else ""):  # noqa: B023
                        raise self._with_offer(error, folder) from error
                # The run that writes to the folder removed the step.
                if step is not None:
                    raise CheckpointError(
                        f"step {step} was removed: restore one of {self.all_steps()}"
                    )

    def _with_offer(
        self, error: DamagedCheckpointError, damaged: epath.Path
    ) -> DamagedCheckpointError:
        unreadable: list[str] = []
        for step, folder in reversed(steps_folder.folders(self.directory).items()):
            if folder == damaged:
                continue
            try:
                SavedStep(folder)
            except DamagedCheckpointError:
                continue
            except CheckpointError as other:
                unreadable.append(str(other))
                continue
            return DamagedCheckpointError(
                f"{error}\nStep {step} looks complete: restore(abstract_state, step={step}), "
                "and delete later steps before you save again.",
                step,
            )
        offer = "No other step is complete."
        if unreadable:
            more = f"\nand {len(unreadable) - 1} more" if unreadable[1:] else ""
            offer = f"Other steps cannot be read:\n{unreadable[0]}{more}"
        return DamagedCheckpointError(f"{error}\n{offer}")

    def all_steps(self) -> list[int]:
        """Returns the complete steps, oldest first, without a step that is still being saved."""
        return [*steps_folder.folders(self.directory)]

    def latest_step(self) -> int | None:
        """Returns the newest complete step; None if none exists."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the best ``metric``; None if no step has this metric."""
        recorded = {n: records.read(f) for n, f in steps_folder.folders(self.directory).items()}
        scores = {n: self._retention.score(r.metrics or {}) for n, r in recorded.items() if r}
        return self._retention.best(scores)

    def delete(self, step: int) -> None:
        """Removes a step, for example after returning to an earlier one."""

        def ready_writer() -> Writer:
            writer = self._writing()
            writer.settle(swept=True)
            saved.at(self.directory, _step_number(step))
            return writer

        self._note(f"a removal of step {step}")
        with self._call_lock, paused("a removal"):
            writer = call_on_all(self._name, ready_writer)
            call_on_first(self._name, lambda: writer.delete(step))

    def close(self) -> None:
        """Waits for the last save and releases the folder."""
        with self._call_lock, paused("a save"):
            try:
                self.wait()
            finally:
                self._closed = True
                if self._writer:
                    self._writer.close()
                    self._writer = None
                if self._lock:
                    self._lock.release()

    def _note(self, call: str) -> None:
        """Records a call that every process must issue, for the lockstep check."""
        if calls := lockstep(self.zero.mesh):
            calls.note(call)

    def _writing(self) -> Writer:
        if self._read_only or self._closed:
            why = "opened with read_only=True" if self._read_only else "closed"
            raise CheckpointError(f"this Checkpointer of {self.directory} was {why}: make another")
        if self._lock and not self._lock.take():
            raise CheckpointError(f"another Checkpointer here writes to {self.directory}: close it")
        self._writer = self._writer or Writer(self.directory, self._retention, self._name)
        return self._writer

    def _check(self, step: int, state: PyTree) -> None:
        has_arrays = any(map(is_array, jax.tree.leaves(state)))
        if state_tree.form_of(state) == "pytree" and not has_arrays:
            raise CheckpointError(
                f"save takes a TrainState, NNX objects or a pytree of arrays, not {state!r:.100}"
            )
        later = [s for s in self.all_steps() if s >= step]
        if later:
            raise CheckpointError(
                f"{self.directory} has step {later[-1]}, so step {step} cannot be saved: restore "
                "the newest step, delete(step) the later ones, or choose another folder"
            )


def _step_number(step: SupportsIndex) -> int:
    """Returns a step's number as an int; accepts integers of NumPy and JAX too."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    is_large = number.bit_length() > 63
    if number < 0 or is_large or isinstance(step, bool):
        given = repr(step) if isinstance(step, float | int | str) and not is_large else type(step)
        raise CheckpointError(
            f"step: expected an int from 0 to 2**63 - 1, got {given!s:.60}; write save(step, state)"
        )
    return number
