"""The loss curve of a run as a picture.

Example::

    draw(pathlib.Path("runs/clm/loss.png"), History(train=[5.5, 3.9], held_out=[(0, 5.5)]), "mini")
"""

import math
import pathlib
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt

from examples.run_clm.run_folder import History

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Losses = npt.NDArray[np.float64]
INK, FAINT, TRAIN, HELD_OUT = "#22272e", "#d8dce2", "#3b6fb6", "#d9622b"


def draw(path: pathlib.Path, history: History, title: str) -> None:
    """Write a PNG: training loss (raw and smoothed) and held-out loss over steps, in nats."""
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    losses = np.array([float(loss) for loss in history.train])
    steps = np.arange(len(losses))  # each loss is of the parameters before its update
    axes.plot(steps, losses, color=TRAIN, alpha=0.25, linewidth=0.9)
    axes.plot(steps, _smooth(losses), color=TRAIN, linewidth=2, label="training (smoothed)")
    at, held_out = zip(*history.held_out, strict=True)
    axes.plot(at, held_out, color=HELD_OUT, linewidth=2, marker="o", markersize=5, label="held out")
    axes.annotate(
        f"{held_out[-1]:.3f}",
        (at[-1], held_out[-1]),
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


def _smooth(losses: Losses) -> Losses:
    """Gaussian mean over neighbours on both sides, so that the curve does not lag behind."""
    width = max(1.0, len(losses) / 80)
    reach = math.ceil(3 * width)
    weights = np.exp(-((np.arange(-reach, reach + 1) / width) ** 2) / 2)
    inside = slice(reach, reach + len(losses))
    share = np.convolve(np.ones(len(losses)), weights)[inside]
    return np.convolve(losses, weights)[inside] / share


def _nats_to_bits(nats: Any) -> Any:
    return nats / math.log(2)


def _bits_to_nats(bits: Any) -> Any:
    return bits * math.log(2)
