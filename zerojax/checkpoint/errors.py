"""What can be wrong with a checkpoint."""


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
