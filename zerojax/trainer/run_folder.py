"""Folder of a run: its checkpoints, the one to resume from, and the position in the data."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import jax

from zerojax.api import Zero
from zerojax.checkpoint import Checkpointer, CheckpointError, Preemption, steps_folder
from zerojax.distributed import log
from zerojax.trainer.arguments import TrainingArguments
from zerojax.trainer.callbacks import TrainerState
from zerojax.trainer.data import Epochs
from zerojax.xla.types import PyTree

Resume = bool | str | os.PathLike[str] | None


class StartingPoint(NamedTuple):
    """Training state, progress, and losses since the last log, from which a run starts."""

    train_state: PyTree
    state: TrainerState
    losses: list[float]


class RunFolder:
    """Folder ``output_dir/checkpoints``, with as many steps as the arguments keep.

    Args:
      args: The arguments of the run.
      zero: The ``Zero`` of the run.
      epochs: The division of its data into updates.
      model: The model's config; checkpoints store its fields, which determine the names of exported
        weights.
    """

    def __init__(
        self, args: TrainingArguments, zero: Zero, epochs: Epochs, model: object = None
    ) -> None:
        self._about = model_fields(model)
        self._args, self._zero, self._epochs = args, zero, epochs
        self._metric = args.metric_for_best_model if args.load_best_model_at_end else None
        keep = args.save_total_limit
        if self._metric:
            # The best checkpoint counts towards the limit; under "best" the newest is the best.
            beside = 0 if args.save_strategy == "best" else 1
            keep = sys.maxsize if keep is None else max(1, keep - beside)
        self.checkpoints: Checkpointer = Checkpointer(
            pathlib.Path(args.output_dir, "checkpoints"),
            zero,
            keep=keep,
            keep_best=1 if self._metric else 0,
            metric=self._metric,
            mode="max" if args.greater_is_better else "min",
        )

    def __enter__(self) -> Self:
        self.checkpoints.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.checkpoints.__exit__(*error)

    def begin(
        self, resume: Resume, fresh: Callable[[], PyTree], abstract: Callable[[], PyTree]
    ) -> StartingPoint:
        """Creates a new state, or restores a saved one.

        Raises:
          CheckpointError: As for ``Trainer.train``.
        """
        directory, steps = self.checkpoints.directory, self._epochs.steps
        if resume is None or resume is False:
            with self._replacing(after=-1):
                return StartingPoint(fresh(), TrainerState(max_steps=steps), [])
        folder, step = (
            (directory, None) if resume is True else _folder_and_step(pathlib.Path(resume))
        )
        with contextlib.ExitStack() as stack:
            source = self.checkpoints
            if pathlib.Path(folder).resolve() != pathlib.Path(directory).resolve():
                source = stack.enter_context(Checkpointer(folder, self._zero, read_only=True))
            step = source.latest_step() if step is None else step
            if step is None:
                problem = "has no checkpoint" if folder.exists() else "does not exist: nothing"
                raise CheckpointError(
                    f"{folder} {problem} to resume from: remove resume_from_checkpoint for a new "
                    "run"
                )
            extra = source.extra(step, process=0)
            self._check(extra, f"{folder}/{step}")
            with self._replacing(step if source is self.checkpoints else -1):
                restored = source.restore(abstract(), step)
        state = TrainerState(**{**extra["trainer"], "max_steps": steps})
        return StartingPoint(restored, state, extra["losses"])

    def save(
        self,
        train_state: PyTree,
        state: TrainerState,
        losses: list[float],
        scores: Mapping[str, float],
    ) -> None:
        """Saves the state in the background, with the information to resume the run."""
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = self.path(state.global_step)
        extra = {
            "trainer": dataclasses.asdict(state), "data": self._data(), "losses": losses,
            "model": self._about,
        }  # fmt: skip
        unknown = {self._metric: math.nan} if self._metric else {}
        scores = {**unknown, **{k: v for k, v in scores.items() if isinstance(v, int | float)}}
        self.checkpoints.save(state.global_step, train_state, extra=extra, metrics=scores or None)

    def path(self, step: int) -> str:
        """Returns the path of a step's checkpoint."""
        return str(self.checkpoints.directory / str(step))

    def _data(self) -> dict[str, int | str]:
        """Returns the values that a resumed run is compared by, by their names in messages.

        All but "steps" must be equal.
        """
        epochs, strategy = self._epochs, self._args.train_sampling_strategy
        order = {} if strategy == "random" else {"train_sampling_strategy": strategy}
        return order | {
            "rows of train_dataset": epochs.rows,
            "rows per update": epochs.batch,
            "updates per epoch": epochs.updates,
            "seed of the order": epochs.seed,
            "seed": self._args.seed,
            "steps": epochs.steps,
        }

    def _check(self, extra: object, where: str) -> None:
        if not isinstance(extra, Mapping) or not {"trainer", "data", "losses"} <= extra.keys():
            raise CheckpointError(
                f"{where} was not saved by a Trainer: pass its parameters, Trainer(params=...)"
            )
        previous, current = dict(extra["data"]), self._data()
        steps = previous.pop("steps"), current.pop("steps")
        names = dict.fromkeys([*current, *previous])
        differences = [f"{k} ({previous.get(k)} there, {current.get(k)} here)" for k in names
                       if previous.get(k) != current.get(k)]  # fmt: skip
        if differences:
            raise CheckpointError(
                f"{where} was trained on other data: {', '.join(differences)}. Resume with the "
                "same data, or start a new run from its parameters, Trainer(params=...)"
            )
        if steps[0] != steps[1]:
            log.warning(
                "%s is of a run of %d steps, and this one has %d: from here on the schedule is "
                "that of %d steps", where, *steps, steps[1],
            )  # fmt: skip

    @contextlib.contextmanager
    def _replacing(self, after: int) -> Iterator[None]:
        """Returns a context that removes the steps later than ``after``, unless it fails.

        Raises:
          CheckpointError: There are such steps, and ``overwrite_output_dir`` is False.
        """
        later = [step for step in self.checkpoints.all_steps() if step > after]
        if later and not self._args.overwrite_output_dir:
            raise CheckpointError(
                f"{self.checkpoints.directory} has checkpoints of steps {later[0]} to "
                f"{later[-1]}: resume from the last with train(resume_from_checkpoint=True), "
                "choose another output_dir, or remove them with overwrite_output_dir=True"
            )
        yield
        for step in reversed(later):
            self.checkpoints.delete(step)


@contextlib.contextmanager
def temporary_checkpoint(
    args: TrainingArguments, zero: Zero, train_state: PyTree, step: int, model: object
) -> Iterator[str]:
    """Saves a state beside the run's checkpoints, and removes it at the end of the context.

    The context's value is the path of the checkpoint.

    Args:
      args, zero, model: As for :class:`RunFolder`.
      train_state: The training state.
      step: Its number of updates.
    """
    folder = pathlib.Path(args.output_dir, ".saving-model")
    try:
        with Checkpointer(folder, zero, keep=1) as checkpoints:
            if step in checkpoints.all_steps():  # of a process that was killed
                checkpoints.delete(step)
            checkpoints.save(step, train_state, extra={"model": model_fields(model)})
            checkpoints.wait()
            yield str(checkpoints.directory / str(step))
    finally:
        if jax.process_index() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def preemption_notice() -> contextlib.AbstractContextManager[Preemption | None]:
    """Returns a context that records SIGTERM; only the main thread can handle Python signals."""
    is_main = threading.current_thread() is threading.main_thread()
    return Preemption() if is_main else contextlib.nullcontext()


def model_fields(config: object) -> dict[str, object] | None:
    """Returns the fields of a config that JSON can store; None if it is not a dataclass."""
    if not dataclasses.is_dataclass(config):
        return None
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {k: v for k, v in values.items() if isinstance(v, int | float | str | tuple)}


def _folder_and_step(path: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """Splits the path of a run, of its checkpoints or of a step into steps folder and step."""
    if (step := steps_folder.number(path.name)) is not None:
        return path.parent, step
    inner = path / "checkpoints"
    return (inner if inner.exists() else path), None
