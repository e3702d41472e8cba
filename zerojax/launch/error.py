"""The error of a launch that cannot begin."""

from __future__ import annotations


class UsageError(ValueError):
    """The options, the hostfile or this machine do not allow the launch; the message says why."""


def in_a_line(error: Exception) -> str:
    """What went wrong with a file, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    return " ".join(str(error).split())
