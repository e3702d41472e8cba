"""The folder of a run: its checkpoints, and what must agree for a run to go on from them.

    OUT/checkpoints/STEP/    orbax: the state, and beside it the loss history and the run's identity
    OUT/loss.png             the curve

Example::

    with RunFolder(out, identity) as folder:
        history = folder.history()                     # empty in a fresh folder
        state = folder.restore(abstract_state)         # sharded as abstract_state says
        folder.save(step, state, history)              # returns once it is written
"""

import dataclasses
import pathlib
from types import TracebackType
from typing import Any, Self

import orbax.checkpoint as ocp

CHECKPOINTS_KEPT = 2


@dataclasses.dataclass
class History:
    """Training loss of every step, and (step, loss) of every evaluation; nats."""

    train: list[Any] = dataclasses.field(default_factory=list)
    held_out: list[tuple[int, float]] = dataclasses.field(default_factory=list)


class RunFolder:
    """Checkpoints of one run. `identity` is JSON: the settings that a continued run must share."""

    def __init__(self, out: pathlib.Path, identity: dict[str, Any], *, restart: bool) -> None:
        self.out = out.absolute()
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out {out} is a file; name a folder")
        self.identity = identity
        self.checkpoints = self.out / "checkpoints"
        self.curve = self.out / "loss.png"
        # In the background orbax would hold the old state while the next step makes a new one.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=CHECKPOINTS_KEPT, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(self.checkpoints, options=options)

        if restart:
            for step in self._manager.all_steps():
                self._manager.delete(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._manager.close()

    @property
    def step(self) -> int | None:
        """Steps done by the newest checkpoint, None where there is none."""
        return self._manager.latest_step()

    def history(self) -> History:
        """The loss history up to the newest checkpoint, after checking that it is this run's."""
        if self.step is None:
            return History()
        if not (self.checkpoints / str(self.step) / "run").is_dir():
            raise ValueError(
                f"{self.checkpoints} holds checkpoints of something else: choose --out"
            )
        kept = self._manager.restore(self.step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))
        run = kept["run"]
        differences = [
            f"  {name}: {run['identity'].get(name)} there, {value} now"
            for name, value in self.identity.items()
            if run["identity"].get(name) != value
        ]
        if differences:
            raise ValueError(
                f"{self.out} holds a checkpoint of another run:\n"
                + "\n".join(differences)
                + "\nUse the same settings to continue it, another --out to keep both, or "
                "--restart to begin again there"
            )
        return History(run["train"], [(step, loss) for step, loss in run["held_out"]])

    def restore(self, abstract_state: Any) -> Any:
        """The newest checkpoint's state, with the shardings of `abstract_state`."""
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        return self._manager.restore(self.step, args=wanted)["state"]

    def save(self, step: int, state: Any, history: History) -> None:
        """Write a checkpoint; `step` steps are done."""
        run = {
            "identity": self.identity,
            "train": [float(loss) for loss in history.train],
            "held_out": history.held_out,
        }
        self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run)),
        )
