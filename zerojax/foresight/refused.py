"""What XLA says of a program that needs more memory than the devices have.

XLA for TPUs refuses to make such a program; XLA for GPUs makes it.
"""

from __future__ import annotations

import re

_SAYS = "RESOURCE_EXHAUSTED"
_WANTED = re.compile(r"(?:Used |temporaries \()(\d+(?:\.\d+)?)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def refused(message: str) -> int | None:
    """The bytes that a program wants at the least; 0 where that is not said.

    Args:
      message: of the error.

    Returns:
      None where it is another error.

    Example:
      >>> refused("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
      ...         "temporaries (2.00G) exceeds available HBM (1.75G).")
      2147483648
    """
    if not message.startswith(_SAYS):
        return None
    found = _WANTED.search(message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0
