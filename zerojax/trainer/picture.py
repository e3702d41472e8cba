"""Picture of a run: the training loss, and each figure of the evaluations, by step."""

from __future__ import annotations

import importlib.util
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax

from zerojax.distributed import log

FILE = "training.svg"

SPEED = ("_runtime", "_per_second", "_preparation_time")
"""Ends of the names of figures that say how fast an evaluation was."""

Curve = Sequence[tuple[int, float]]
"""Steps and values."""


def curves(log_history: Sequence[Mapping[str, float]]) -> dict[str, Curve]:
    """Returns the curves of a run by name: those of at least two points.

    Example:
      >>> curves([{"loss": 2.0, "step": 1}, {"loss": 1.0, "step": 2}, {"eval_a": 1.0, "step": 2}])
      {'loss': [(1, 2.0), (2, 1.0)]}
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in log_history:
        for name, value in entry.items():
            drawn = name in ("loss", "learning_rate", "grad_norm") or name.startswith("eval_")
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if drawn and is_number and not name.endswith(SPEED):
                found.setdefault(name, []).append((int(entry["step"]), value))
    return {name: curve for name, curve in found.items() if len(curve) > 1}


def write(folder: pathlib.Path, log_history: Sequence[Mapping[str, float]]) -> pathlib.Path | None:
    """Draws the picture with matplotlib, a panel for each curve, in process 0.

    Returns:
      Its path; None in other processes, without matplotlib (the extra ``examples``), if there is no
      curve, or if the file cannot be written, which a warning states.
    """
    found, path = curves(log_history), folder / FILE
    if not found or jax.process_index() != 0 or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), sharex=True, squeeze=False)
    for axes, (name, curve) in zip(panels[:, 0], found.items(), strict=True):
        axes.plot(*zip(*curve, strict=True))
        axes.set_title(name, loc="left", fontsize="medium")
        axes.grid(alpha=0.3)
    panels[-1, 0].set_xlabel("step")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        log.warning("the picture %s was not written: %s", path, error)
        return None
    return path
