"""The folder of a run: its checkpoints, and what must agree to continue a run from them.

    OUT/checkpoints/STEP/    the state, and in its record the loss history and the run's identity
    OUT/loss.png             the curve

Example::

    with RunFolder(out, zero, identity) as folder:
        history, key = folder.history(), folder.key()  # empty and None in a fresh folder
        state = folder.restore(abstract_state)         # sharded as abstract_state says
        folder.save(step, state, history, key)         # written in the background
"""

import dataclasses
import pathlib
from types import TracebackType
from typing import Any, Self

import jax

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedCheckpointError

CHECKPOINTS_KEPT = 2


@dataclasses.dataclass
class History:
    """Training loss of every step, and (step, loss) of every evaluation; nats."""

    train: list[Any] = dataclasses.field(default_factory=list)
    held_out: list[tuple[int, float]] = dataclasses.field(default_factory=list)


class RunFolder:
    """Checkpoints of one run.

    Args:
      identity: JSON: the settings that a continued run must share.
      model: JSON: what an export has to know of the model.
      restart: remove the checkpoints that are there.
      from_step: go on from this one instead of the newest, and remove those after it.
    """

    def __init__(
        self,
        out: pathlib.Path,
        zero: zerojax.Zero,
        identity: dict[str, Any],
        model: dict[str, Any],
        *,
        restart: bool = False,
        from_step: int | None = None,
    ) -> None:
        self.out = out.absolute()
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--output_dir {out} is a file; name a folder")
        self.identity, self.model = identity, model
        self.checkpoints = self.out / "checkpoints"
        self.curve = self.out / "loss.png"
        self._checkpointer = Checkpointer(self.checkpoints, zero, keep=CHECKPOINTS_KEPT)
        steps = self._checkpointer.all_steps()
        if restart:
            for step in steps:
                self._checkpointer.delete(step)
        elif from_step is not None and from_step not in steps:
            raise ValueError(f"--from_step {from_step}: {self.checkpoints} has {steps}")
        self._from_step = from_step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._checkpointer.close()

    @property
    def step(self) -> int | None:
        """Steps done by the checkpoint to continue from; None without one."""
        return self._from_step if self._from_step else self._checkpointer.latest_step()

    def history(self) -> History:
        """The loss history up to that checkpoint, after checking that it is this run's."""
        if self.step is None:
            return History()
        run = self._extra().get("run")
        if run is None:
            raise ValueError(
                f"{self.checkpoints} holds checkpoints of another program: choose another "
                "--output_dir"
            )
        differences = [
            f"  {name}: {run['identity'].get(name)} there, {value} now"
            for name, value in self.identity.items()
            if run["identity"].get(name) != value
        ]
        if differences:
            raise ValueError(
                f"{self.out} holds a checkpoint of another run:\n"
                + "\n".join(differences)
                + "\nUse the same settings to continue it, another --output_dir to keep both, or "
                "--restart to begin again there"
            )
        return History(run["train"], [(step, loss) for step, loss in run["held_out"]])

    def key(self) -> jax.Array | None:
        """The key that was saved."""
        return None if self.step is None else self._extra()["key"]

    def restore(self, abstract_state: Any) -> Any:
        """The state of that checkpoint, with the shardings of `abstract_state`."""
        try:
            state = self._checkpointer.restore(abstract_state, self.step)
        except DamagedCheckpointError as error:
            raise ValueError(_offer(error)) from error
        for step in self._checkpointer.all_steps():
            if self._from_step is not None and step > self._from_step:
                self._checkpointer.delete(step)
        self._from_step = None
        return state

    def save(self, step: int, state: Any, history: History, key: jax.Array) -> str:
        """Begin to write a checkpoint; `step` steps are done, so `step` batches were read.

        Returns what went wrong, with the checkpoint before this one or with the beginning of
        this: training goes on all the same.
        """
        run = {
            "identity": self.identity,
            "train": [float(loss) for loss in history.train],
            "held_out": history.held_out,
        }
        extra = {"run": run, "key": key, "batches": step, "model": self.model}
        trouble = []
        for act in (self.wait, lambda: self._checkpointer.save(step, state, extra=extra)):
            try:
                act()
            except CheckpointError as error:
                trouble.append(str(error))
        return "\n".join(trouble)

    def wait(self) -> None:
        """Until it is written. Raises CheckpointError where it cannot be."""
        self._checkpointer.wait()

    def _extra(self) -> dict[str, Any]:
        try:
            return self._checkpointer.extra(self.step, process=0) or {}
        except DamagedCheckpointError as error:
            raise ValueError(_offer(error)) from error


def _offer(error: DamagedCheckpointError) -> str:
    """What the user of the main job can do about damage."""
    if error.newest_intact is None:
        return f"{error}\nNo checkpoint is left to continue from: pass --restart."
    return f"{error}\n--from_step {error.newest_intact} goes on from there."
