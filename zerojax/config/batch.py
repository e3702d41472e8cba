"""The batch triangle: train = micro * accumulation * world."""

from typing import NamedTuple

from zerojax.config.errors import ConfigError


class BatchSizes(NamedTuple):
    """Rows per update and how they are cut.

    Attributes:
      train: rows of the whole batch, over all devices, for one update; None: whatever comes.
      micro: rows of one device in one micro-batch; None: whatever comes.
      accumulation: micro-batches per update.
    """

    train: int | None
    micro: int | None
    accumulation: int


def solve(train: int | None, micro: int | None, accumulation: int | None, world: int) -> BatchSizes:
    """Fills in the sizes that are missing, so that train = micro * accumulation * world.

    With `train` or `micro` alone the accumulation is 1. With neither, the batch that comes decides.

    Args:
      train: `train_batch_size`.
      micro: `train_micro_batch_size_per_gpu`.
      accumulation: `gradient_accumulation_steps`.
      world: the number of data-parallel devices.

    Raises:
      ConfigError: no whole numbers fit; the message gives some that do.

    Example:
      >>> solve(64, None, 4, world=8)
      BatchSizes(train=64, micro=2, accumulation=4)
    """
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ConfigError(f"world: expected a whole number of devices, at least 1, got {world!r}")
    if train is None:
        steps = accumulation or 1
        return BatchSizes(micro * steps * world if micro else None, micro, steps)
    if micro is None:
        steps = accumulation or 1
        size, rest = divmod(train, steps * world)
        found = BatchSizes(train, size, steps)
    elif accumulation is None:
        steps, rest = divmod(train, micro * world)
        found = BatchSizes(train, micro, steps)
    else:
        rest = train - micro * accumulation * world
        found = BatchSizes(train, micro, accumulation)
    if rest or not found.micro or not found.accumulation:
        raise ConfigError(_mismatch(train, micro, accumulation, world))
    return found


def _mismatch(train: int, micro: int | None, accumulation: int | None, world: int) -> str:
    unit = (micro or 1) * (accumulation or 1) * world
    below, above = train // unit * unit, (train // unit + 1) * unit
    if micro and accumulation:
        below = above = unit
    sizes = " or ".join(str(size) for size in sorted({below, above}) if size)
    fits = [f"train_batch_size {sizes}"]
    if micro and accumulation:
        if train % (micro * world) == 0:
            fits.append(f"gradient_accumulation_steps {train // (micro * world)}")
        if train % (accumulation * world) == 0:
            fits.append(f"train_micro_batch_size_per_gpu {train // (accumulation * world)}")
        if train % (micro * accumulation) == 0:
            fits.append(f"{train // (micro * accumulation)} devices")
    return (
        "the batch sizes do not multiply out: train_batch_size "
        f"{train} = train_micro_batch_size_per_gpu {_told(micro)} * gradient_accumulation_steps "
        f"{_told(accumulation)} * {world} device{'s' if world > 1 else ''} does not hold in whole "
        f"numbers; these would do: {', or '.join(fits)}"
    )


def _told(size: int | None) -> str:
    return "(not given)" if size is None else str(size)
