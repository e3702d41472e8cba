"""The relation of the batch sizes: train = micro * accumulation * world."""

from typing import NamedTuple

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


BATCH_SIZES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
"""The JSON keys of the fields of `BatchSizes`, in the same order."""


def solve(train: int | None, micro: int | None, accumulation: int | None, world: int) -> BatchSizes:
    """Computes the missing sizes such that train = micro * accumulation * world.

    If only `train` or only `micro` is given, the accumulation is 1. If neither is given, both stay
    None, and the batch that arrives decides.

    Args:
      train: `train_batch_size`.
      micro: `train_micro_batch_size_per_gpu`.
      accumulation: `gradient_accumulation_steps`.
      world: The number of data-parallel devices.

    Raises:
      ConfigError: No integers satisfy the equation; the message suggests sizes that do.

    Example:
      >>> solve(64, None, 4, world=8)
      BatchSizes(train=64, micro=2, accumulation=4)
    """
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ConfigError(
            f"world: expected an integer number of devices, at least 1, got {world!r}"
        )
    if train is None:
        steps = accumulation or 1
        return BatchSizes(micro * steps * world if micro else None, micro, steps)
    if micro is None:
        steps = accumulation or 1
        size, remainder = divmod(train, steps * world)
        sizes = BatchSizes(train, size, steps)
    elif accumulation is None:
        steps, remainder = divmod(train, micro * world)
        sizes = BatchSizes(train, micro, steps)
    else:
        remainder = train - micro * accumulation * world
        sizes = BatchSizes(train, micro, accumulation)
    if remainder or not sizes.micro or not sizes.accumulation:
        raise ConfigError(_mismatch(train, micro, accumulation, world))
    return sizes


def _mismatch(train: int, micro: int | None, accumulation: int | None, world: int) -> str:
    unit = (micro or 1) * (accumulation or 1) * world
    below, above = train // unit * unit, (train // unit + 1) * unit
    if micro and accumulation:
        below = above = unit
    joined = " or ".join(str(size) for size in sorted({below, above}) if size)
    suggestions = [f"train_batch_size {joined}"]
    if micro and accumulation:
        if train % (micro * world) == 0:
            suggestions.append(f"gradient_accumulation_steps {train // (micro * world)}")
        if train % (accumulation * world) == 0:
            suggestions.append(f"train_micro_batch_size_per_gpu {train // (accumulation * world)}")
        if train % (micro * accumulation) == 0:
            suggestions.append(f"{train // (micro * accumulation)} devices")
    return (
        "the batch sizes do not multiply out: train_batch_size "
        f"{train} = train_micro_batch_size_per_gpu {_given(micro)} * gradient_accumulation_steps "
        f"{_given(accumulation)} * {world} device{'s' if world > 1 else ''} does not hold for "
        f"integers; these would do: {', or '.join(suggestions)}"
    )


def _given(size: int | None) -> str:
    return "(not given)" if size is None else str(size)
