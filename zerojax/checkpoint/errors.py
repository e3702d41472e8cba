"""Errors of checkpoints."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from collections.abc import Iterator, Sequence


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message states which, why and what to do."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, truncated or changed; none of its arrays was used.

    Attributes:
      newest_intact: The newest other step that appears intact; None if no step does, or none was
        searched.
    """

    def __init__(self, message: str, newest_intact: int | None = None) -> None:
        super().__init__(message)
        self.newest_intact = newest_intact


UNREADABLE = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError,
    OSError,
)  # fmt: skip
"""Exceptions that reading a file with JSON of an unexpected form may raise."""

_MAX_QUOTED = 1000
"""Maximum number of characters quoted from another library's message."""

_MISSING_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""Numbers of operating system errors caused by a missing file, or by a non-file in its place."""

_REFUSALS = (
    errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOMEM,
)  # fmt: skip
"""Numbers of errors with which the operating system refuses to read."""

_REMEDY = "check permissions, open files (ulimit -n), memory and the file system"


def reason(error: BaseException) -> str:
    """Returns tensorstore's message without its specification and source locations."""
    return re.split(r" \[(?:tensorstore_spec|source locations)=", str(error))[0]


def cannot_be_read(what: object, error: BaseException) -> CheckpointError:
    """Returns the error for unreadable data: damage, unless the operating system refused to read.

    Example:
      >>> cannot_be_read("1/zerojax.json", KeyError("format"))
      DamagedCheckpointError("1/zerojax.json cannot be read: KeyError: 'format'")
      >>> type(cannot_be_read("1/zerojax.json", PermissionError(13, "Permission denied")))
      <class 'zerojax.checkpoint.errors.CheckpointError'>
    """
    summary = f"{what} cannot be read"
    for cause in _causes(error):
        if _is_refusal(cause):
            return CheckpointError(
                f"{summary} on {socket.gethostname()}: {reason(cause)[:_MAX_QUOTED]}. The "
                f"system refused to read, so this is no sign of damage: {_REMEDY}, and try "
                "again"
            )
    return DamagedCheckpointError(
        f"{summary}: {type(error).__name__}: {reason(error)[:_MAX_QUOTED]}"
    )


@contextlib.contextmanager
def reading(what: object, caught: tuple[type[Exception], ...] = UNREADABLE) -> Iterator[None]:
    """Raises the errors ``caught`` in its block as :func:`cannot_be_read` describes them."""
    try:
        yield
    except caught as error:
        raise cannot_be_read(what, error) from None


def together(errors: Sequence[CheckpointError]) -> CheckpointError:
    """Combines several errors into one; the result is of damage if any of them is."""
    damaged = any(isinstance(error, DamagedCheckpointError) for error in errors)
    kind = DamagedCheckpointError if damaged else CheckpointError
    return kind("\n".join(map(str, errors)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_refusal(error: BaseException) -> bool:
    """Returns whether an error is the operating system's, and not a sign of damage.

    Tensorstore reports the operating system's error only as text in its message.
    """
    if isinstance(error, OSError):
        return error.errno is not None and error.errno not in _MISSING_FILE_ERRNOS
    return any(os.strerror(number) in str(error) for number in _REFUSALS)
