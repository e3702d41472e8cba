"""What the processes of a job say once."""

from __future__ import annotations

import logging

from zerojax.xla import compat


def is_first() -> bool:
    """Whether this is the process that speaks for all; starts no backend of JAX."""
    return compat.process_number() == 0


def warning(text: str, *values: object) -> None:
    """Logs what every process finds, in the first."""
    if is_first():
        logging.getLogger("zerojax").warning(text, *values, stacklevel=2)
