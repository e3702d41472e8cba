"""XLA's own rematerialisation, which computes values again to save memory.

XLA for GPUs reserves a fifth of a device's memory for other uses, subtracts the arguments and
results of a program, and reserves 5% of the rest for errors of its estimate. If the temporaries
need more, XLA computes some of them a second time (``GetSchedulerMemoryLimit`` in XLA's
``gpu_hlo_schedule.cc``).
"""

import re

from zerojax.hlo.program import HloProgram, Instruction

_AGAIN = re.compile(r"\.remat\d*(\.\d+)?$")
_NAMES = ("bitcast", "get-tuple-element", "tuple")  # compute nothing
_BASE, _SLOP = 0.8, 0.95


def begins_above(memory: int, arguments: int) -> int:
    """Returns the bytes of arguments and temporaries above which XLA computes temporaries again.

    Args:
      memory: Bytes of the device's memory.
      arguments: Bytes of the program's arguments, whose buffers its results reuse.

    Example:
      >>> begins_above(80_000_000_000, 4_000_000_000)
      61000000000
    """
    return arguments + round(_SLOP * max(_BASE * memory - arguments, 0))


def is_again(each: Instruction) -> bool:
    """Returns whether XLA added an instruction to compute a value again."""
    return each.opcode not in _NAMES and bool(_AGAIN.search(each.name))


def computed_again(program: HloProgram) -> int:
    """Returns the number of instructions that XLA added to compute a value again."""
    return sum(
        is_again(each)
        for computation in program.computations.values()
        for each in computation.instructions
    )
