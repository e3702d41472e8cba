"""Log messages that the processes of a job print once."""

from __future__ import annotations

import logging

from zerojax.xla import compat


def is_first() -> bool:
    """Returns whether this is process 0, which logs for all; starts no backend of JAX."""
    return compat.process_number() == 0


def warning(text: str, *values: object) -> None:
    """Logs, only in process 0, a warning that holds in every process."""
    if is_first():
        logging.getLogger("zerojax").warning(text, *values, stacklevel=2)


def info(text: str, *values: object) -> None:
    """Logs, only in process 0, a line of information that holds in every process."""
    if is_first():
        logging.getLogger("zerojax").info(text, *values, stacklevel=2)
