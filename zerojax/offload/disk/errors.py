"""What can be wrong with the disk that holds a run's state."""

RESTORE = "restore the last checkpoint (Checkpointer.restore)"


class DiskError(RuntimeError):
    """The disk cannot be used; the message says which path, why and what to do."""


class DiskStateError(DiskError):
    """What lies on the disk of a state is lost, damaged or half updated: a checkpoint is needed."""
