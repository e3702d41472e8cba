"""The relation of the batch sizes: train = micro * accumulation * world.

Under pipeline stages, world is the number of devices of one stage.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from zerojax.config.errors import ConfigError


class BatchSizes(NamedTuple):
    """The sizes of a batch.

    Attributes:
      train: Rows per update, over all devices; None if the batch that arrives decides.
      micro: Rows of one device in one micro-batch; None if the batch that arrives decides.
      accumulation: Micro-batches per update.
    """

    train: int | None
    micro: int | None
    accumulation: int


BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""The JSON keys of the fields of `BatchSizes`, in the same order."""


def solve(
    train: int | None, micro: int | None, accumulation: int | None, world: int, stages: int = 1
) -> BatchSizes:
    """Computes the missing sizes such that train = micro * accumulation * world.

    If only `train` or only `micro` is given, the accumulation is 1. If neither is given, both stay
    None, and the batch that arrives decides.

    Args:
      train: `train_batch_size`.
      micro: `train_micro_batch_size_per_gpu`.
      accumulation: `gradient_accumulation_steps`.
      world: The number of data-parallel devices, of one pipeline stage.
      stages: Pipeline stages, whose devices share the rows of a batch equally.

    Raises:
      ConfigError: No integers satisfy the equation, and the message suggests sizes that do; or the
        devices of all stages cannot share the rows.

    Example:
      >>> solve(64, None, 4, world=8)
      BatchSizes(train=64, micro=2, accumulation=4)
    """
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ConfigError(
            f"world: expected an integer number of devices, at least 1, got {world!r}"
        )
    if train is None:
        steps, remainder = accumulation or 1, 0
        sizes = BatchSizes(micro * steps * world if micro else None, micro, steps)
    elif micro is None:
        steps = accumulation or 1
        size, remainder = divmod(train, steps * world)
        sizes = BatchSizes(train, size, steps)
    elif accumulation is None:
        steps, remainder = divmod(train, micro * world)
        sizes = BatchSizes(train, micro, steps)
    else:
        remainder = train - micro * accumulation * world
        sizes = BatchSizes(train, micro, accumulation)
    if train is not None and (remainder or not sizes.micro or not sizes.accumulation):
        raise ConfigError(_mismatch(train, micro, accumulation, world, stages))
    if sizes.train is not None and sizes.train % (world * stages):
        raise ConfigError(
            f"train_batch_size = {sizes.train} ({sizes.micro} in each of {sizes.accumulation} "
            f"micro-batches on each of {world} devices of a stage) does not divide among the "
            f"{world * stages} devices of {stages} pipeline stages; make "
            f"gradient_accumulation_steps a multiple of {stages}"
        )
    return sizes


def devices_of_stage(devices: int, stages: int, words: str = "") -> int:
    """Returns the number of devices of each pipeline stage.

    Args:
      devices: The number of all devices.
      stages: `pipeline.stages`.
      words: The config's key and value, for a message.

    Raises:
      ConfigError: The stages do not divide the devices.

    >>> devices_of_stage(8, 4)
    2
    """
    if devices % stages:
        fits = [n for n in range(1, devices + 1) if devices % n == 0]
        raise ConfigError(
            f"{words or f'pipeline.stages = {stages}'} does not divide the {devices} data-parallel "
            f"devices; use one of {fits}"
        )
    return devices // stages


def stages_of(raw: Mapping[str, Any]) -> int | None:
    """Returns `pipeline.stages` of a config that is not checked yet; None without a number."""
    section = raw.get("pipeline")
    stages = section.get("stages") if isinstance(section, Mapping) else None
    return stages if type(stages) is int and stages > 0 else None


def _mismatch(
    train: int, micro: int | None, accumulation: int | None, world: int, stages: int
) -> str:
    each = (micro or 1) * (accumulation or 1)
    unit = math.lcm(each, stages) * world
    below, above = train // unit * unit, (train // unit + 1) * unit
    if micro and accumulation:
        below = above = each * world
    joined = " or ".join(str(size) for size in sorted({below, above}) if size)
    suggestions = [f"train_batch_size {joined}"]
    if micro and accumulation:
        if train % (math.lcm(micro, stages) * world) == 0:
            suggestions.append(f"gradient_accumulation_steps {train // (micro * world)}")
        if train % (math.lcm(accumulation, stages) * world) == 0:
            suggestions.append(f"train_micro_batch_size_per_gpu {train // (accumulation * world)}")
        if train % each == 0 and each % stages == 0:
            suggestions.append(f"{train // each * stages} devices")
    factors = [f"{world} device{'s' if world > 1 else ''}"]
    if accumulation:
        factors.insert(0, f"gradient_accumulation_steps {accumulation}")
    if micro:
        factors.insert(0, f"train_micro_batch_size_per_gpu {micro}")
    relation = "is not" if micro and accumulation else "is not a multiple of"
    pipeline = f" of each of {stages} pipeline stages" if stages > 1 else ""
    return (
        f"train_batch_size = {train} {relation} {' * '.join(factors)}{pipeline}; use "
        f"{', or '.join(suggestions)}"
    )
