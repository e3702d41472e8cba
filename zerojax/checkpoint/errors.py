"""What can be wrong with a checkpoint."""

import re


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which, why and what to do."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, cut or changed; nothing of it was used.

    Attributes:
      whole: the newest other step that looks whole, where one was looked for and found.
    """

    def __init__(self, message: str, whole: int | None = None) -> None:
        super().__init__(message)
        self.whole = whole


def reason(error: Exception) -> str:
    """What tensorstore says of it, without the specification and the places in its source."""
    return re.split(r" \[(?:tensorstore_spec|source locations)=", str(error))[0]
