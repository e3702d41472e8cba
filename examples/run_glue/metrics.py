"""Accuracy and F1 as GLUE has them, and the report of a run."""

import dataclasses

import numpy as np
from rich.table import Table


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """The share of rows that are right."""
    return float((predicted == labels).mean())


def f1(predicted: np.ndarray, labels: np.ndarray, classes: int = 2) -> float:
    """2 TP / (2 TP + FP + FN) of label 1; of more than two classes the mean over all.

    >>> round(f1(np.array([1, 1, 0, 0]), np.array([1, 0, 1, 0])), 3)
    0.5
    """

    def one(label: int) -> float:
        both = (predicted == label).sum() + (labels == label).sum()
        return 2 * ((predicted == label) & (labels == label)).sum() / both if both else 0.0

    return float(np.mean([one(label) for label in ([1] if classes == 2 else range(classes))]))


@dataclasses.dataclass(frozen=True)
class Result:
    """What the article's table has of a run, and beside it.

    Attributes:
      chance: the accuracy of the commonest label for all rows.
      samples_per_second: of training, all steps but the first, which compiles.
      loss: the mean of the last epoch.
      skipped: updates that fp16's loss scale skipped.
    """

    batch_per_device: int
    memory: int
    samples_per_second: float
    epoch_seconds: float
    evaluation_seconds: float
    accuracy: float
    f1: float
    chance: float
    loss: float
    skipped: int

    def table(self) -> Table:
        """A line each, in the order of the article's columns."""
        table = Table(box=None, show_header=False)
        for name, figure in {
            "rows of a device and update": str(self.batch_per_device),
            "peak memory a device": f"{self.memory / 1e6:,.2f} MB",
            "samples/s": f"{self.samples_per_second:,.0f}",
            "an epoch": f"{self.epoch_seconds:.2f} s",
            "an evaluation": f"{self.evaluation_seconds:.2f} s",
            "accuracy (chance)": f"{self.accuracy:.3f} ({self.chance:.3f})",
            "F1": f"{self.f1:.3f}",
        }.items():
            table.add_row(name, figure)
        return table
