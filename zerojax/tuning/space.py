"""What a config leaves open: the settings among which the fastest are searched."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zerojax.config import ConfigError
from zerojax.config.keys.old_names import OLD_SWITCHES, rename
from zerojax.foresight.choice import BATCH, OFFLOADS, SECTIONS, TRIED, Choice, Offload, agreed

LARGEST = 1024  # rows of a device in a micro-batch

_ZERO = ("stage", *SECTIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """Settings that may be chosen.

    Attributes:
      stages, remats, offloads: to be tried in every combination that there is.
      micro: rows of a device in a micro-batch, where that is given.
      accumulation: micro-batches an update, where that is given.
      rows: of a device in an update, where that is given; micro-batches divide it.
    """

    stages: Sequence[int] = (0, 1, 2, 3)
    remats: Sequence[bool | None] = (None,)
    offloads: Sequence[Offload] = TRIED
    micro: int | None = None
    accumulation: int | None = None
    rows: int | None = None

    def sizes(self) -> list[int]:
        """Micro-batches that may be chosen, rising; powers of two where nothing says more."""
        if self.micro is not None:
            return [self.micro]
        if self.rows is None:
            return [2**n for n in range(LARGEST.bit_length())]
        if self.accumulation is not None:
            return [self.rows // self.accumulation]
        return [n for n in range(1, self.rows + 1) if self.rows % n == 0]

    def choice(self, mode: Choice, micro: int) -> Choice:
        """A mode with a micro-batch, and the accumulation that follows."""
        accumulation = self.accumulation or (1 if self.rows is None else self.rows // micro)
        return dataclasses.replace(mode, micro=micro, accumulation=accumulation)

    def modes(self) -> Iterator[Choice]:
        """Every combination of the other settings, those that cost least first."""
        for offload, remat, stage in itertools.product(self.offloads, self.remats, self.stages):
            mode = Choice(stage=stage, micro=1, remat=remat, offload=offload)
            if mode.possible:
                yield mode

    def furthest(self, config: Mapping[str, Any], world: int) -> dict[str, Any]:
        """A config with the last of the modes: it keeps what a section says beside its device."""
        modes = list(self.modes())
        if not modes:
            return dict(config)  # whoever reads it says what contradicts what
        zero = modes[-1].json(config, world)["zero_optimization"]
        return {**config, "zero_optimization": zero}


def left_open(
    config: Mapping[str, Any], rows: int | None, world: int, remats: Sequence[bool | None]
) -> tuple[Space, dict[str, Any]]:
    """What a DeepSpeed config leaves open, and the config without it.

    Batch sizes, the stage and the two offload sections are open where the config has "auto" or
    nothing; what it gives is kept.

    Args:
      config: as read from JSON.
      rows: of an update over all devices, if the caller knows.
      world: devices.
      remats: the model's choices.

    Raises:
      ConfigError: the rows do not divide among the devices, or the config has others.

    Example:
      >>> space, _ = left_open({"zero_optimization": {"stage": 2}}, 64, 8, [None])
      >>> space.stages, space.sizes(), space.offloads
      ((2,), [1, 2, 4, 8], ('none', 'optimizer', 'optimizer and parameters'))
    """
    rest = copy.deepcopy(dict(config))
    if problems := list(rename(rest)):
        raise ConfigError(problems)
    zero = rest.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    for section, keys in ((rest, BATCH), (zero, _ZERO)):
        for key in keys:
            if section.get(key) == "auto" or section.get(key, 0) is None:
                del section[key]
    total = rest.get("train_batch_size")
    total = agreed(rows, total)
    if isinstance(total, int) and total % world:
        raise ConfigError(
            f"train_batch_size: {total} rows do not divide among {world} devices; take "
            f"{total - total % world or world} or {total - total % world + world}"
        )
    space = Space(
        stages=(zero["stage"],) if "stage" in zero else (0, 1, 2, 3),
        remats=remats,
        offloads=_offloads(zero),
        micro=rest.get("train_micro_batch_size_per_gpu"),
        accumulation=rest.get("gradient_accumulation_steps"),
        rows=total // world if isinstance(total, int) else None,
    )
    return space, rest


def _offloads(zero: dict[str, Any]) -> tuple[Offload, ...]:
    """Those that agree with the sections, or their old switches, that are there."""
    wanted = []
    for section in SECTIONS:
        old = [bool(zero.pop(name)) for name in OLD_SWITCHES[section] if name in zero]
        if any(old) and section not in zero:
            zero[section] = {"device": "cpu"}
        found = zero.get(section)
        if isinstance(found, dict) and found.get("device") == "auto":
            del found["device"]
            found = None
        given = found.get("device", "none") != "none" if isinstance(found, dict) else None
        wanted.append(any(old) if old and given is None else given)
    tried = OFFLOADS if wanted[1] and not wanted[0] else TRIED
    return tuple(
        each
        for each in tried
        if all(
            want in (None, held)
            for want, held in zip(wanted, Choice(stage=3, micro=1, offload=each).held, strict=True)
        )
    )
