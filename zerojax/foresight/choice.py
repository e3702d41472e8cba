"""The settings that decide what fits, apart from the rest of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from zerojax.config import ConfigError, OffloadOptimizer, OffloadParam, ZeroConfig

Offload = Literal["none", "optimizer", "parameters", "optimizer and parameters"]
# Whether the optimizer's state and the parameters are; what moves more comes later.
_HELD: dict[Offload, tuple[bool, bool]] = {
    "none": (False, False),
    "optimizer": (True, False),
    "parameters": (False, True),
    "optimizer and parameters": (True, True),
}
OFFLOADS = tuple(_HELD)
TRIED: tuple[Offload, ...] = ("none", "optimizer", "optimizer and parameters")
"""Those that a search tries: parameters alone move much and leave most."""

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SECTIONS = ("offload_optimizer", "offload_param")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a step on a number of devices.

    Attributes:
      stage: of ZeRO.
      micro: rows of a device in a micro-batch.
      accumulation: micro-batches an update.
      remat: a block keeps its input only; None where the model has no such option.
      offload: what lies in host memory.
    """

    stage: int
    micro: int
    accumulation: int = 1
    remat: bool | None = None
    offload: Offload = "none"

    def __str__(self) -> str:
        words = [f"stage {self.stage}", f"micro-batch {self.micro}"]
        words += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        words += ["remat"] if self.remat else []
        words += [f"{self.offload} offloaded"] if self.offload != "none" else []
        return ", ".join(words)

    @property
    def possible(self) -> bool:
        """Whether ZeRO knows it: offload needs stages 1 to 3, that of parameters stage 3."""
        optimizer, params = self.held
        return self.stage >= (3 if params else 1 if optimizer else 0)

    @property
    def held(self) -> tuple[bool, bool]:
        """Whether the optimizer's state, and the parameters, are offloaded."""
        return _HELD[self.offload]

    @classmethod
    def of(cls, config: ZeroConfig, rows: int, world: int, remat: bool | None = None) -> Choice:
        """What a config chooses for so many rows an update.

        Raises:
          ConfigError: the rows do not divide as the config wants.
        """
        filled = dataclasses.replace(config, train_batch_size=rows)
        sizes = filled.batch(world)
        assert sizes.micro
        held = (config.offload_optimizer is not None, config.offload_param is not None)
        return cls(
            stage=config.stage,
            micro=sizes.micro,
            accumulation=sizes.accumulation,
            remat=remat,
            offload=next(name for name, each in _HELD.items() if each == held),
        )

    def config(self, before: ZeroConfig, world: int) -> ZeroConfig:
        """A config with these settings, everything else as it was."""
        optimizer, param = self.held
        return dataclasses.replace(
            before,
            stage=self.stage,
            **self._batch(world),
            offload_optimizer=(before.offload_optimizer or OffloadOptimizer())
            if optimizer
            else None,
            offload_param=(before.offload_param or OffloadParam()) if param else None,
        )

    def json(self, before: Mapping[str, Any], world: int) -> dict[str, Any]:
        """A DeepSpeed JSON with these settings, everything else as it was."""
        zero = {**(before.get("zero_optimization") or {}), "stage": self.stage}
        for name, there in zip(SECTIONS, self.held, strict=True):
            section = zero.pop(name, None) or {}
            device = section.get("device")
            if there:
                zero[name] = {**section, "device": device if device in ("cpu", "nvme") else "cpu"}
        return {
            **before,
            **self._batch(world),
            "zero_optimization": zero,
        }

    def _batch(self, world: int) -> dict[str, Any]:
        """The batch sizes, called alike in a JSON and in a config."""
        rows = self.micro * self.accumulation * world
        return dict(zip(BATCH, (rows, self.micro, self.accumulation), strict=True))


def agreed(rows: int | None, given: int | None) -> int | None:
    """The rows of an update that were asked for, or else those that the config gives.

    Raises:
      ConfigError: there are both, and they are not the same.
    """
    if rows is not None and given not in (None, rows):
        raise ConfigError(f"train_batch_size: {given} in the config, but {rows} were asked for")
    return given if rows is None else rows


def changes(before: Choice, after: Choice) -> Iterator[str]:
    """What is to be set, in the words of the JSON, to get from one to the other."""
    if after.remat != before.remat:
        yield f"remat: {str(bool(after.remat)).lower()} (an option of the model)"
    zero = [f'"stage": {after.stage}'] if after.stage != before.stage else []
    for key, was, there in zip(SECTIONS, before.held, after.held, strict=True):
        if there and not was:
            zero.append(f'"{key}": {{"device": "cpu"}}')
    if zero:
        yield f'"zero_optimization": {{{", ".join(zero)}}}'
    if after.micro != before.micro:
        yield f'"train_micro_batch_size_per_gpu": {after.micro}'
    if after.accumulation != before.accumulation:
        yield f'"gradient_accumulation_steps": {after.accumulation}'
