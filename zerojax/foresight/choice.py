"""The settings that decide what fits, separate from the rest of a config."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from zerojax.config import (
    ConfigError,
    OffloadOptimizer,
    OffloadParam,
    ZeroConfig,
)
from zerojax.config.batch import BATCH_SIZES

Offload = Literal["none", "optimizer", "parameters", "optimizer and parameters"]
# Whether (optimizer state, parameters) are offloaded, in ascending order of traffic.
_OFFLOADED: dict[Offload, tuple[bool, bool]] = {
    "none": (False, False),
    "optimizer": (True, False),
    "parameters": (False, True),
    "optimizer and parameters": (True, True),
}
OFFLOADS = tuple(_OFFLOADED)
TRIED: tuple[Offload, ...] = ("none", "optimizer", "optimizer and parameters")
"""The offloads that a search tries; offload of only parameters moves much and frees little."""

Remat = bool | str | None
"""The values that blocks keep for the backward pass: False for all; True for only their input; the
name of a policy for ``zerojax.remat_policy``; None for a model without the option."""

SECTIONS = ("offload_optimizer", "offload_param")
LIVE = "stage3_max_live_parameters"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One choice of the settings that decide how much memory a step takes.

    Attributes:
      stage: The ZeRO stage, 0 to 3.
      micro: Rows of a device in a micro-batch.
      accumulation: Micro-batches per update.
      remat: The values that a block keeps for the backward pass.
      offload: The parts of the state that are offloaded.
      live: The most elements of parameters that stay gathered over an update; 0 below stage 3 and
        for offloaded parameters.
      pipeline: The pipeline stages into which a search divides the hosts; 1 for the given mesh.
    """

    stage: int
    micro: int
    accumulation: int = 1
    remat: Remat = None
    offload: Offload = "none"
    live: int = 0
    pipeline: int = 1

    def __post_init__(self) -> None:
        if not self.drops:
            object.__setattr__(self, "live", 0)

    def __str__(self) -> str:
        words = [f"stage {self.stage}", f"micro-batch {self.micro}"]
        words += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        words += ["remat" if self.remat is True else f"remat {self.remat}"] if self.remat else []
        words += [f"{self.offload} offloaded"] if self.offload != "none" else []
        words += [f"{self.live:,} elements gathered"] if self.live else []
        words += [f"{self.pipeline} pipeline stages"] if self.pipeline > 1 else []
        return ", ".join(words)

    @property
    def possible(self) -> bool:
        """True if the stage allows the offload: stage 1 or higher, and stage 3 for parameters."""
        optimizer, params = self.held
        return self.stage >= (3 if params else 1 if optimizer else 0)

    @property
    def drops(self) -> bool:
        """True if a step gathers parameters for each use and then drops all that do not stay."""
        return self.stage == 3 and not self.held[1]

    @property
    def held(self) -> tuple[bool, bool]:
        """A pair of bools: the optimizer's state is offloaded, the parameters are offloaded."""
        return _OFFLOADED[self.offload]

    def keeps_no_more(self, other: Choice) -> bool:
        """Returns whether blocks keep at most as much as those of the other choice; False for two
        different policies, which cannot be compared."""
        return self.remat == other.remat or _kept_less(self.remat) > _kept_less(other.remat)

    @classmethod
    def of(cls, config: ZeroConfig, rows: int, world: int, remat: Remat = None) -> Choice:
        """Returns the choice of a config for ``rows`` rows per update, on ``world`` devices.

        Raises:
          ConfigError: The rows do not divide into the config's batch sizes.
        """
        sizes = dataclasses.replace(config, train_batch_size=rows).batch(world)
        assert sizes.micro
        held = (config.offload_optimizer is not None, config.offload_param is not None)
        return cls(
            stage=config.stage,
            micro=sizes.micro,
            accumulation=sizes.accumulation,
            remat=remat,
            offload=next(name for name, each in _OFFLOADED.items() if each == held),
            live=config.stage3_max_live_parameters,
        )

    def config(self, before: ZeroConfig, world: int) -> ZeroConfig:
        """Returns ``before`` with these settings."""
        optimizer, param = self.held
        return dataclasses.replace(
            before,
            stage=self.stage,
            stage3_max_live_parameters=self.live,
            **self._batch(world),
            offload_optimizer=(before.offload_optimizer or OffloadOptimizer())
            if optimizer
            else None,
            offload_param=(before.offload_param or OffloadParam()) if param else None,
        )

    def json(self, before: Mapping[str, Any], world: int) -> dict[str, Any]:
        """Returns the DeepSpeed JSON ``before`` with these settings."""
        zero = {**(before.get("zero_optimization") or {}), "stage": self.stage}
        for name, is_offloaded in zip(SECTIONS, self.held, strict=True):
            section = zero.pop(name, None) or {}
            device = section.get("device")
            if is_offloaded:
                zero[name] = {**section, "device": device if device in ("cpu", "nvme") else "cpu"}
        if self.drops and self.live != zero.get(LIVE, 0):
            zero[LIVE] = self.live
        return {**before, **self._batch(world), "zero_optimization": zero}

    def rows(self, world: int) -> int:
        """Returns the rows of an update on ``world`` devices, which stages divide."""
        return self.micro * self.accumulation * world // self.pipeline

    def _batch(self, world: int) -> dict[str, Any]:
        """Returns the batch sizes, by the names that a JSON and a config share."""
        sizes = self.rows(world), self.micro, self.accumulation
        return dict(zip(BATCH_SIZES, sizes, strict=True))


def _kept_less(remat: Remat) -> int:
    """Ranks values of ``remat``, higher for blocks that keep less."""
    return 1 if isinstance(remat, str) else 2 * bool(remat)


def requested_rows(rows: int | None, given: int | None) -> int | None:
    """Returns the requested rows of an update, else those of the config.

    Raises:
      ConfigError: The two numbers differ.
    """
    if rows is not None and given not in (None, rows):
        raise ConfigError(f"train_batch_size: {given} in the config, {rows} asked for: remove one")
    return given if rows is None else rows


def changes(before: Choice, after: Choice) -> Iterator[str]:
    """Yields the settings that lead from one choice to the other, as in the JSON."""
    if after.remat != before.remat:
        if isinstance(after.remat, str):
            yield f"remat_policy: {after.remat} (an option of the model)"
        else:
            yield f"remat: {str(bool(after.remat)).lower()} (an option of the model)"
    was = before.json({}, 1)
    now = after.json(was, 1)
    was_zero, now_zero = (each["zero_optimization"].items() for each in (was, now))
    if zero := dict(each for each in now_zero if each not in was_zero):
        yield f'"zero_optimization": {json.dumps(zero)}'
    for key in BATCH_SIZES[1:]:  # the rows of an update do not change
        if now[key] != was[key]:
            yield f'"{key}": {now[key]}'
