"""Metrics in a run of wandb."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from zerojax.config import WandbConfig
from zerojax.monitor.tags import Event


class WandbRun:
    """Logs to the run that is there, or begins one, which :meth:`close` then finishes.

    wandb's step is the number of global samples, as with DeepSpeed.
    """

    def __init__(self, config: WandbConfig) -> None:
        import wandb

        self.where = f"wandb project {config.project}"
        self._wandb = wandb
        self._began = getattr(wandb, "run", None) is None
        if self._began:
            wandb.init(project=config.project, entity=config.team, group=config.group)

    def write(self, events: Sequence[Event]) -> None:
        for samples, together in groupby(events, key=lambda event: event[2]):
            self._wandb.log({tag: value for tag, value, _ in together}, step=samples)

    def close(self) -> None:
        if self._began:
            self._wandb.finish()
