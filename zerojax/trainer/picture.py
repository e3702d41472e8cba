"""Picture of a run as SVG: the training loss, and each figure of the evaluations, by step."""

from __future__ import annotations

import html
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax

from zerojax.distributed import log

FILE = "training.svg"

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 200, 72, 16, 28, 28
_LINE, _GRID, _TEXT = "#2563eb", "#d4d4d8", "#3f3f46"
_SKIPPED = ("_runtime", "_per_second", "_preparation_time")

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
            if drawn and not name.endswith(_SKIPPED) and _is_finite(value):
                found.setdefault(name, []).append((int(entry["step"]), value))
    return {name: curve for name, curve in found.items() if len(curve) > 1}


def write(folder: pathlib.Path, log_history: Sequence[Mapping[str, float]]) -> pathlib.Path | None:
    """Writes the picture into a folder, in process 0.

    Returns:
      Its path; None in other processes, if there is no curve, or if the file cannot be written,
      which a warning states.
    """
    found, path = curves(log_history), folder / FILE
    if not found or jax.process_index() != 0:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(svg(found), encoding="utf-8")
    except OSError as error:
        log.warning("the picture %s was not written: %s", path, error)
        return None
    return path


def svg(found: Mapping[str, Curve]) -> str:
    """Returns the text of the picture, one panel for each curve from top to bottom."""
    panels = [_panel(name, curve, i * _HEIGHT) for i, (name, curve) in enumerate(found.items())]
    height = _HEIGHT * len(panels)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            *panels,
            "</svg>\n",
        ]
    )


def _panel(name: str, curve: Curve, top: int) -> str:
    steps, values = [step for step, _ in curve], [value for _, value in curve]
    low, high = min(values), max(values)
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        inner = _WIDTH - _LEFT - _RIGHT
        return _LEFT + inner * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        inner = _HEIGHT - _TOP - _BOTTOM
        return top + _TOP + inner * ((high - value) / (high - low) if high > low else 0.5)

    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
    parts = [f'<text x="{_LEFT}" y="{top + 18}" fill="{_TEXT}">{html.escape(name)}</text>']
    for value in dict.fromkeys((low, high)):
        parts += [
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="{_GRID}"/>',
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" fill="{_TEXT}" '
            f'text-anchor="end">{value:.4g}</text>',
        ]
    for step, anchor in ((first, "start"), (last, "end")):
        parts.append(
            f'<text x="{x(step):.1f}" y="{top + _HEIGHT - 10}" fill="{_TEXT}" '
            f'text-anchor="{anchor}">step {step}</text>'
        )
    parts.append(f'<polyline points="{points}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>')
    return "\n".join(parts)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
