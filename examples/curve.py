"""The loss curve of a run as a picture.

Example::

    draw(pathlib.Path("runs/clm/loss.png"), History(train=[5.5, 3.9], held_out=[(0, 5.5)]), "mini")
"""

import math
import pathlib
from typing import Any

import matplotlib
import numpy as np

from examples.run_folder import History

matplotlib.use("Agg")
from matplotlib import pyplot as plt

INK, FAINT, TRAIN, HELD_OUT = "#22272e", "#d8dce2", "#3b6fb6", "#d9622b"


def draw(path: pathlib.Path, history: History, title: str) -> None:
    """Write a PNG: training loss (raw and smoothed) and held-out loss over steps, in nats."""
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    steps = np.arange(len(history.train))  # each loss is of the parameters before its update
    axes.plot(steps, history.train, color=TRAIN, alpha=0.25, linewidth=0.9)
    axes.plot(steps, _smooth(history.train), color=TRAIN, linewidth=2, label="training (smoothed)")
    at, losses = zip(*history.held_out, strict=True)
    axes.plot(at, losses, color=HELD_OUT, linewidth=2, marker="o", markersize=5, label="held out")
    axes.annotate(
        f"{losses[-1]:.3f}",
        (at[-1], losses[-1]),
        xytext=(8, 0),
        textcoords="offset points",
        color=HELD_OUT,
        fontweight="bold",
        va="center",
    )
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold", pad=12)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("cross-entropy (nats per byte)", color=INK)
    bits = axes.secondary_yaxis("right", functions=(_nats_to_bits, _bits_to_nats))
    bits.set_ylabel("bits per byte", color=INK)
    for side in (axes, bits):
        side.tick_params(colors=INK, length=0)
        for spine in side.spines.values():
            spine.set_visible(False)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, labelcolor=INK)
    axes.margins(x=0.06)
    figure.savefig(path)
    plt.close(figure)


def _smooth(losses: list[float]) -> Any:
    """Weighted mean over neighbours on both sides, so that the curve does not lag behind."""
    steps = np.arange(len(losses))
    width = max(1.0, len(losses) / 80)
    return [np.average(losses, weights=np.exp(-(((steps - i) / width) ** 2) / 2)) for i in steps]


def _nats_to_bits(nats: Any) -> Any:
    return nats / math.log(2)


def _bits_to_nats(bits: Any) -> Any:
    return bits * math.log(2)
