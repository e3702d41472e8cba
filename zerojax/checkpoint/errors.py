"""Errors of checkpoints."""

import re


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which, why and what to do."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, cut or changed; none of its arrays was used.

    Attributes:
      whole: The newest other step that looks whole; None where none does, or none was looked for.
    """

    def __init__(self, message: str, whole: int | None = None) -> None:
        super().__init__(message)
        self.whole = whole


def reason(error: Exception) -> str:
    """The message of tensorstore, without its specification and source locations."""
    return re.split(r" \[(?:tensorstore_spec|source locations)=", str(error))[0]
