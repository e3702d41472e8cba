"""Search space: the settings that a config leaves open."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zerojax.config import ConfigError, load
from zerojax.config.batch import BATCH_SIZES
from zerojax.config.keys import rename
from zerojax.config.sections import AutotuningConfig
from zerojax.config.together import QUANTIZED
from zerojax.devices.mesh import nearest_multiples
from zerojax.foresight.choice import (
    LIVE,
    OFFLOADS,
    SECTIONS,
    TRIED,
    Choice,
    Offload,
    requested_rows,
)

LARGEST = 1024  # rows of a device in a micro-batch
POLICIES = ("dots_no_batch", "dots", "offload_dots_no_batch")
"""Names for ``zerojax.remat_policy`` to try for a model that takes one."""

FILLED = 4
"""Micro-batches for each pipeline stage from which the stages idle for a fifth of the ticks at
most (Huang et al., 2019, arXiv:1811.06965)."""

_ZERO = ("stage", *SECTIONS, LIVE, "stage3_max_reuse_distance")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
    """The batch sizes that may be chosen.

    Attributes:
      micro: Rows of a device in a micro-batch; None if open.
      accumulation: Micro-batches per update; None if open.
      fewest: The fewest micro-batches per update to try, where they are open.
      rows: Rows of a device in an update, a multiple of the micro-batch; None if open.
      bounds: The bounds of the search, from the config's section ``autotuning``; None if absent.
      world: The number of devices that share the rows, for the bounds on the rows of an update.
    """

    micro: int | None = None
    accumulation: int | None = None
    fewest: int = 1
    rows: int | None = None
    bounds: AutotuningConfig | None = None
    world: int = 1

    def sizes(self) -> list[int]:
        """Returns the allowed micro-batches in ascending order; powers of two if all is open.

        Raises:
          ConfigError: No micro-batch is within the bounds.
        """
        if self.micro is not None:
            sizes = [self.micro]
        elif self.rows is None:
            sizes = [2**n for n in range(LARGEST.bit_length())]
        elif self.accumulation is not None:
            sizes = [self.rows // self.accumulation]
        else:
            most = self.rows // self.fewest
            sizes = [n for n in range(1, most + 1) if self.rows % n == 0] or [1]
        within = [n for n in sizes if self._within(n)]
        if not within:
            raise ConfigError(
                f"autotuning: no micro-batch of {', '.join(map(str, sizes))} rows is within "
                "the minima and maxima of the micro-batch and of the batch: widen them"
            )
        return within

    def _within(self, micro: int) -> bool:
        """Returns whether a micro-batch and the rows of its update are within the bounds."""
        if (bounds := self.bounds) is None:
            return True
        choice = self.choice(Choice(stage=0, micro=micro), micro)
        rows = micro * choice.accumulation * self.world
        return (
            bounds.min_train_micro_batch_size_per_gpu <= micro
            and micro <= bounds.max_train_micro_batch_size_per_gpu
            and bounds.min_train_batch_size <= rows <= (bounds.max_train_batch_size or rows)
        )

    def choice(self, mode: Choice, micro: int) -> Choice:
        """Returns a mode with a micro-batch, and the accumulation that follows from it."""
        accumulation = self.accumulation or (
            self.fewest if self.rows is None else self.rows // micro
        )
        return dataclasses.replace(mode, micro=micro, accumulation=accumulation)

    def in_stages(self, choice: Choice, stages: int) -> Choice:
        """Returns a choice in pipeline stages, without offload: of the same rows if the config
        leaves the micro-batches open, in the fewest that fill the stages."""
        rows, n = choice.micro * choice.accumulation * stages, self.accumulation
        if n is None:
            divisors = (n for n in range(1, rows + 1) if rows % n == 0)
            counts = [n for n in divisors if self.micro in (None, rows // n)]
            n = min((n for n in counts if n >= FILLED * stages), default=counts[-1])
        micro = self.micro or rows // n
        staged = dataclasses.replace(choice, pipeline=stages, offload="none")
        return dataclasses.replace(staged, micro=micro, accumulation=n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """The settings that may be chosen.

    Attributes:
      stages, remats, offloads: Values to try in every combination that the stage allows.
      policies: Names for ``zerojax.remat_policy``, to try with the stage and the offload that are
        fastest without them; empty if the model takes no ``remat_policy``.
      batches: The batch sizes.
      live: Elements of parameters that stay gathered over an update; None if open.
      pipelines: Numbers of pipeline stages to try where the fastest choice waits for the network.
    """

    stages: Sequence[int] = (0, 1, 2, 3)
    remats: Sequence[bool | None] = (None,)
    offloads: Sequence[Offload] = TRIED
    policies: Sequence[str] = ()
    batches: Batches = Batches()
    live: int | None = None
    pipelines: Sequence[int] = ()

    def modes(self) -> Iterator[Choice]:
        """Yields every possible combination of stage, remat and offload, the cheapest first."""
        live = self.live or 0
        for offload, remat, stage in itertools.product(self.offloads, self.remats, self.stages):
            mode = Choice(stage=stage, micro=1, remat=remat, offload=offload, live=live)
            if mode.possible:
                yield mode

    def furthest(self, config: Mapping[str, object], world: int) -> dict[str, object]:
        """Returns a config with the last mode, so that the loader reads both offload sections."""
        modes = list(self.modes())
        if not modes:
            return dict(config)  # the loader reports the contradiction
        zero = modes[-1].json(config, world)["zero_optimization"]
        return {**config, "zero_optimization": zero}


def left_open(
    config: Mapping[str, Any], rows: int | None, world: int, remats: Sequence[bool | None]
) -> tuple[Space, dict[str, Any]]:
    """Returns the settings that a DeepSpeed config leaves open, and the config without them.

    Batch sizes, the stage, the two offload sections and ``stage3_max_live_parameters`` are open if
    the config has "auto" or nothing for them. The section ``autotuning``, if enabled, bounds the
    search and is removed from the config.

    Args:
      config: The config, as read from JSON.
      rows: Rows of an update over all devices; None for the config's.
      world: The number of devices.
      remats: The model's choices of ``remat``.

    Raises:
      ConfigError: The rows do not divide among the devices, or differ from the config's.

    Example:
      >>> space, _ = left_open({"zero_optimization": {"stage": 2}}, 64, 8, [None])
      >>> space.stages, space.batches.sizes(), space.offloads
      ((2,), [1, 2, 4, 8], ('none', 'optimizer', 'optimizer and parameters'))
    """
    fixed = copy.deepcopy(dict(config))
    if problems := list(rename(fixed)):
        raise ConfigError(problems)
    bounds = load({"autotuning": fixed.get("autotuning", {})}).autotuning
    if bounds is not None:
        del fixed["autotuning"]
    zero = fixed.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    for section, keys in ((fixed, BATCH_SIZES), (zero, _ZERO)):
        for key in keys:
            if section.get(key) == "auto" or section.get(key, 0) is None:
                del section[key]
    total, micro, accumulation = (fixed.get(key) for key in BATCH_SIZES)
    total = requested_rows(rows, total)
    if isinstance(total, int) and total % world:
        raise ConfigError(
            f"train_batch_size: {total} rows do not divide among {world} devices: write "
            f"{nearest_multiples(total, world)}"
        )
    stages = (1, 2, 3) if any(zero.get(key) for key in QUANTIZED) else (0, 1, 2, 3)
    fp8 = fixed.get("fp8")
    in_fp8 = isinstance(fp8, dict) and fp8.get("enabled") is True  # at stage 3, on the devices
    batches = Batches(
        micro=micro,
        accumulation=accumulation,
        rows=total // world if isinstance(total, int) else None,
        bounds=bounds,
        world=world,
    )
    space = Space(
        stages=(zero["stage"],) if "stage" in zero else (3,) if in_fp8 else stages,
        remats=remats,
        offloads=("none",) if in_fp8 else _offloads(zero),
        batches=batches,
        live=load({"zero_optimization": {"stage": 3, LIVE: zero[LIVE]}}).stage3_max_live_parameters
        if LIVE in zero
        else 0
        if in_fp8
        else None,
    )
    return space, fixed


def _offloads(zero: dict[str, object]) -> tuple[Offload, ...]:
    """Returns the offloads that agree with the config's sections."""
    wanted = []
    for section in SECTIONS:
        entry = zero.get(section)
        if isinstance(entry, dict) and entry.get("device") == "auto":
            del entry["device"]
            entry = None
        is_on = entry.get("device", "none") != "none" if isinstance(entry, dict) else None
        wanted.append(is_on)
    candidates = OFFLOADS if wanted[1] and not wanted[0] else TRIED
    return tuple(
        offload
        for offload in candidates
        if all(
            wish in (None, held)
            for wish, held in zip(
                wanted, Choice(stage=3, micro=1, offload=offload).held, strict=True
            )
        )
    )
