"""XLA's own rematerialisation, which computes values again to save memory.

XLA computes temporaries a second time where a program needs more than
:func:`zerojax.xla.compiler.memory_limit`.
"""

import re

from zerojax.hlo.program import HloProgram, Instruction

_AGAIN = re.compile(r"\.remat\d*(\.\d+)?$")
_NAMES = ("bitcast", "get-tuple-element", "tuple")  # compute nothing


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
