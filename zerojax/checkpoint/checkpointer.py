"""``Checkpointer``: a folder of steps, written while training goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import jax
import orbax.checkpoint as ocp
from etils import epath

from zerojax.api import Zero
from zerojax.checkpoint import layout, saved
from zerojax.checkpoint import record as records
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError
from zerojax.checkpoint.extra import decoded, encoded
from zerojax.checkpoint.lock import Lock
from zerojax.checkpoint.pending import Pending
from zerojax.checkpoint.restore import restore
from zerojax.checkpoint.saved import Saved

DELETED = "deleted"
_CHUNK_BYTES = 64 * 2**20
"""Of what an array is cut into on disk at most, so that a small piece is read for a small shard."""


class Checkpointer:
    """Saves training states in a folder and restores them on any mesh, at any stage.

    ``DIRECTORY/STEP/state`` is what orbax writes of the state, uncompressed, and
    ``DIRECTORY/STEP/zerojax.json`` the record beside it: config, mesh, the spec and checksum of
    every array, sizes and digests of the files, and what the caller adds. A step appears whole or
    not at all, and disappears likewise, whenever the process is killed.

    Args:
      directory: of the steps; made if need be. Object stores (``gs://``) are orbax's matter and
        untested here.
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
        if (keep is not None and keep < 1) or keep_best < 0:
            raise CheckpointError(
                f"keep={keep}, keep_best={keep_best}: keep at least 1 step, or None for all"
            )
        if bool(keep_best) != (metric is not None) or (keep_best and keep is None):
            raise CheckpointError(
                f"keep={keep}, keep_best={keep_best}, metric={metric!r}: the best steps are kept "
                "besides the newest, by a metric: give all three"
            )
        self.directory = epath.Path(directory).absolute()
        self.zero = zero
        self._keep, self._keep_best, self._metric, self._mode = keep, keep_best, metric, mode
        self._manager: ocp.CheckpointManager | None = None
        self._pending: Pending | None = None
        self._sweeper: threading.Thread | None = None
        self._lock = None if read_only else self._claim()
        if self._lock and self._lock.held:
            self._sweep()

    def _claim(self) -> Lock | None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            remote = "://" in str(self.directory)
            return None if remote or jax.process_index() else Lock(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} cannot be written: {error}. Choose another folder; to read "
                "only, Checkpointer(..., read_only=True)"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def save(
        self,
        step: int,
        state: Any,
        *,
        extra: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Saves a state, in the background: returns when it is copied from the devices.

        Waits for the save before it. The state may be donated to the next step at once.

        Args:
          step: updates done.
          state: a ``TrainState``, or a pair of an ``nnx.Module`` and its ``nnx.Optimizer``.
          extra: what else a continued run needs (data position, keys, history): JSON, in which
            PRNG keys may stand.
          metrics: for ``keep_best``.

        Raises:
          CheckpointError: the save before it failed (this one is not begun then; the folder is
            as it was before both, and a further call tries anew); the step or a later one is there
            already; the state is no state, or was donated.
        """
        self.wait()
        self._check(step, state, metrics)
        pending = Pending(self.directory, step, state, self.zero, encoded(extra), metrics)
        manager = self._writer()
        self._sweeper = threading.Thread(target=self._sweep, daemon=True)
        self._sweeper.start()
        self._pending = pending
        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), pending.tree)
        args = ocp.args.PyTreeSave(pending.tree, save_args=chunks, custom_metadata=records.MARK)
        try:
            manager.save(
                step,
                args=ocp.args.Composite(**{saved.STATE: args}),
                metrics=dict(metrics) if metrics else None,
                force=True,
            )
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Returns when the last save is on disk.

        Raises:
          CheckpointError: it failed; the steps before it are as they were.
        """
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        if self._sweeper:
            self._sweeper.join()
        self._pending = None
        self._sweep()

    def restore(self, abstract_state: Any, step: int | None = None) -> Any:
        """A saved state, sharded as ``abstract_state`` says, every array checked.

        Stage, mesh and precision may differ from those that saved it. A loss scale that was not
        saved starts as the config has it, one that is not wanted is dropped. A ``TrainState``
        that plain orbax saved gets its optimizer wrapped.

        Args:
          abstract_state: of ``zero.abstract_state(...)``; or parameters alone, such as
            ``.params`` of it.
          step: which; the newest by default.

        Raises:
          CheckpointError: no such step (the message has those that there are), or one of another
            model (it has the arrays that differ).
          DamagedCheckpointError: it is not what was saved; the message names what is damaged, and
            the newest step before it that looks whole.
        """
        self.wait()
        with self._offering(step):
            return restore(saved.find(self.directory, step), abstract_state, self.zero)

    @contextlib.contextmanager
    def _offering(self, step: int | None) -> Iterator[None]:
        """Where a step is damaged, looks for another one."""
        try:
            yield
        except DamagedCheckpointError as error:
            there = self.all_steps()
            asked = there[-1] if step is None else step
            whole = next((s for s in reversed(there) if s != asked and self._looks_whole(s)), None)
            offer = (
                "No other step is whole."
                if whole is None
                else f"Step {whole} looks whole: restore(abstract_state, step={whole}). To go on "
                "saving from there delete later ones first."
            )
            raise DamagedCheckpointError(f"{error}\n{offer}", whole) from error

    def _looks_whole(self, step: int) -> bool:
        try:
            Saved(self.directory / str(step))
        except CheckpointError:
            return False
        return True

    def extra(self, step: int | None = None) -> Any:
        """What :meth:`save` was given as ``extra``; None for a step of plain orbax."""
        self.wait()
        with self._offering(step):
            record = saved.find(self.directory, step).record
        return None if record is None else decoded(record.extra)

    def all_steps(self) -> list[int]:
        """The steps that are there, oldest first; one that is still being saved is not."""
        return saved.steps(self.directory)

    def latest_step(self) -> int | None:
        """The newest of them, None where there is none."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The one with the best ``metric``, None where none has it."""
        found = {}
        for step in self.all_steps():
            record = records.read(self.directory / str(step))
            if record and record.metrics and self._metric in record.metrics:
                found[step] = record.metrics[self._metric]
        best = min if self._mode == "min" else max
        return best(found, key=found.__getitem__, default=None)

    def delete(self, step: int) -> None:
        """Removes a step, as after going back to an earlier one."""
        self.wait()
        if step not in self.all_steps():
            raise CheckpointError(f"{self.directory} has no step {step}: {self.all_steps()}")
        self._writer().delete(step)
        self._sweep()

    def close(self) -> None:
        """Waits for the last save, and lets the folder go."""
        try:
            self.wait()
        finally:
            if self._manager:
                self._manager.close()
                self._manager = None
            if self._lock:
                self._lock.release()

    def _check(self, step: int, state: Any, metrics: Mapping[str, float] | None) -> None:
        if layout.form_of(state) is None:
            raise CheckpointError(
                f"save takes a TrainState, or a pair (model, optimizer) of NNX, not "
                f"{type(state).__name__}"
            )
        for name, x in layout.named(layout.tree_of(state)).items():
            if isinstance(x, jax.Array) and x.is_deleted():
                raise CheckpointError(
                    f"{name} was donated to a step: save the state that the step returned"
                )
        if self._metric and self._metric not in (metrics or {}):
            raise CheckpointError(
                f"step {step} has no metric {self._metric!r}, by which the best are kept: "
                f"save(..., metrics={{{self._metric!r}: ...}})"
            )
        later = [s for s in self.all_steps() if s >= step]
        if later:
            raise CheckpointError(
                f"{self.directory} has step {later[-1]} already, and {step} was to be saved: "
                "restore the newest step to go on from it, delete(step) those that shall go, or "
                "choose another folder"
            )

    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is not None:
            return self._manager
        if self._lock is None and "://" not in str(self.directory) and not jax.process_index():
            raise CheckpointError(f"{self.directory} was opened with read_only=True")
        if self._lock and not self._lock.held:
            raise CheckpointError(
                f"another Checkpointer of this process writes to {self.directory}: close it first"
            )
        policies: list[Any] = [ocp.checkpoint_managers.LatestN(self._keep)]
        by = self._metric
        if by is not None:
            policies.append(
                ocp.checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: metrics[by],
                    reverse=self._mode == "min",
                    n=self._keep_best,
                )
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
            best_fn=None if by is None else lambda metrics: metrics[by],
            best_mode=self._mode,
            # Renamed, then removed: a removal that is cut short must not look like a step.
            todelete_subdir=DELETED,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._finish),
        )
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._manager = ocp.CheckpointManager(
            self.directory, options=options, item_handlers={saved.STATE: handler}
        )
        return self._manager

    def _finish(self) -> None:
        """All arrays are on disk, and orbax has still to commit them."""
        if jax.process_index() == 0 and self._pending is not None:
            self._pending.finish()

    def _failed(self, error: Exception) -> CheckpointError:
        """Makes room again and starts with a fresh manager, so that saving can go on."""
        step = self._pending.step if self._pending else None
        manager, self._manager, self._pending = self._manager, None, None
        if manager is not None:
            with contextlib.suppress(Exception):  # the same error again
                manager.close()
        for left in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(left, ignore_errors=True)
        last = self.latest_step()
        kept = f"step {last} is the last good one" if last is not None else "there is none yet"
        return CheckpointError(f"step {step} was not saved in {self.directory} ({kept}): {error}")

    def _sweep(self) -> None:
        shutil.rmtree(self.directory / DELETED, ignore_errors=True)
