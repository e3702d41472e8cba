"""Whether a step fits, before it runs for the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.config import ZeroConfig
from zerojax.foresight.choice import Choice, changes
from zerojax.foresight.forecasts import Built, Forecasts
from zerojax.foresight.rates import rates_of
from zerojax.foresight.remedies import remedies
from zerojax.plan import Plan
from zerojax.report import size

Build = Callable[[ZeroConfig], tuple[Plan, Iterable[tuple[str, jax.stages.Lowered]]]]


class OutOfMemoryError(MemoryError):
    """A step that has not run, because the devices' memory does not hold what it needs."""


def free_bytes(mesh: Mesh) -> int | None:
    """Bytes that are free in the fullest of this process's devices; None where none can say."""
    found = []
    for device in mesh.local_devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            found.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return min(found, default=None)


def check(
    lowered: jax.stages.Lowered,
    there: int,
    free: int | None,
    config: ZeroConfig,
    mesh: Mesh,
    world: int,
    rows: int,
    build: Build,
) -> None:
    """Compile a program and compare what it takes with what is free.

    jax keeps what is compiled here for the run, so that this costs no second compile. Where it
    does not fit, settings that would are looked for with the compiler, which may take minutes.

    Args:
      lowered: the program that makes the gradients.
      there: bytes of its arguments that are on a device already, and so not free.
      free: as :func:`free_bytes` finds it.
      config, mesh, world, rows: of the step; rows of the batch of all devices.
      build: plan and programs of the same step under another config.

    Raises:
      OutOfMemoryError: it does not fit; the message says by how much, what takes the memory and
        what would fit.
    """
    if free is None:
        return
    memory: Any = lowered.compile().memory_analysis()
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    taken += memory.output_size_in_bytes - memory.alias_size_in_bytes
    room = free + there
    if taken <= room:
        return

    def built(choice: Choice) -> Built:
        plan, programs = build(choice.config(config, world))
        return Built(plan, lambda: programs, 0)

    given = Choice.of(config, rows, world)
    study = Forecasts(built, given, rates_of(mesh.devices.flat[0], room))
    kinds = study.forecast(given).peak.memory
    listed = sorted(kinds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind} {size(n)}" for kind, n in listed if n >= taken / 100)
    found = [
        f"  {', '.join(changes(given, remedy.choice))} ({size(remedy.forecast.peak.bytes)})"
        for remedy in remedies(study)
    ]
    advice = [
        "These settings fit, each compiled, fastest first by prediction:" if found else
        "No stage, micro-batch or offload of the same batch was found that fits: rematerialise "
        "the model's blocks (jax.checkpoint, nn.remat), or take more devices or a smaller batch.",
        *found,
    ]  # fmt: skip
    raise OutOfMemoryError(
        "\n".join(
            [
                f"the step takes {size(taken)} of each device's memory, of which {size(room)} are "
                f"there for it, and was not run. It takes {parts}.",
                *advice,
            ]
        )
    )
