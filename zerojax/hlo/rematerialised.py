"""What XLA computes again by itself, to save memory.

XLA for GPUs leaves a fifth of a device's memory for others, takes off the arguments and results of
a program, and of the rest 5% for what its estimate misses. Where the temporaries need more, it
computes some of them a second time (``GetSchedulerMemoryLimit`` in XLA's ``gpu_hlo_schedule.cc``).
"""

import re

from zerojax.hlo.program import HloProgram

_AGAIN = re.compile(r"\.remat\d*(\.\d+)?$")
_NAMES = ("bitcast", "get-tuple-element", "tuple")  # compute nothing
_BASE, _SLOP = 0.8, 0.95


def begins_above(memory: int, arguments: int) -> int:
    """Bytes of a program's arguments and temporaries above which XLA computes some again.

    Args:
      memory: Bytes of the device's memory.
      arguments: Bytes of the program's arguments, whose place its results take.

    Example:
      >>> begins_above(80_000_000_000, 4_000_000_000)
      61000000000
    """
    return arguments + round(_SLOP * max(_BASE * memory - arguments, 0))


def computed_again(program: HloProgram) -> int:
    """How many instructions XLA has made to compute a value again."""
    return sum(
        each.opcode not in _NAMES and bool(_AGAIN.search(each.name))
        for computation in program.computations.values()
        for each in computation.instructions
    )
