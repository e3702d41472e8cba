"""Error of a launch that cannot begin."""

from __future__ import annotations


class UsageError(ValueError):
    """Error for options, a hostfile or a machine that do not allow the launch; states why."""


def in_a_line(error: Exception) -> str:
    """Describes an error of reading or writing a file in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    return " ".join(str(error).split())
