"""What can be wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which, why and what to do."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, cut or changed; nothing of it was used."""
