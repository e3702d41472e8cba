"""What a training step sends inside nodes and between them, by stage and setting; no GPU.

    python -m benchmarks.node_traffic                       # Llama 7B on 64 H100s, two minutes
    python -m benchmarks.node_traffic --record benchmarks/records    # with a picture

Bytes are the compiled program's, by the links that NCCL's rings cross (zerojax.hlo.links). Needs
``pip install 'zerojax[compile,examples]'``.
"""

import argparse
import dataclasses
import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.published_steps import llama_of
from benchmarks.published_tables import GIGA, Setup, open_study
from benchmarks.report import console, console_table, heading, markdown_table, write_json
from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Forecast

MODEL, DEVICES, SEQ, MICRO = "llama-7b", "h100:64", 2048, 4
HOST = 8
INSIDE, BETWEEN, INK, FAINT = "#8fb3e0", "#d9622b", "#22272e", "#d8dce2"
NOTE = (
    f"{MODEL}, {DEVICES}, {MICRO} rows of {SEQ} tokens a GPU, bf16, AdamW, rematerialised, one "
    "micro-batch. GB of 10^9 bytes that a GPU sends in a step. A ring over whole hosts sends an "
    "eighth of its bytes between them, one over a GPU of each host all of them. Theory: in units "
    "of the bf16 parameters a gather or a scatter over n sends (n-1)/n, an all-reduce twice that."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One bar.

    Attributes:
      name: its name.
      stage: the ZeRO stage.
      replicas: groups of devices, each of which holds the whole state.
      zero: further keywords of :func:`zerojax.zero`.
      units: what theory sends inside nodes and between them, in units of the bf16 parameters.
    """

    name: str
    stage: int
    replicas: int = 1
    zero: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    units: tuple[float, float]


RING = 63 / 64  # over all 64
NODE, CARD = 7 / 8, 1 / 8  # shares of a ring over whole hosts
SETTINGS = (
    Setting(name="stage 0", stage=0, units=(2 * RING * NODE, 2 * RING * CARD)),
    Setting(name="stage 1", stage=1, units=(2 * RING * NODE, 2 * RING * CARD)),
    Setting(name="stage 2", stage=2, units=(2 * RING * NODE, 2 * RING * CARD)),
    Setting(name="stage 3", stage=3, units=(3 * RING * NODE, 3 * RING * CARD)),
    # A host's gathers and scatter, and an all-reduce of its pieces over 8 hosts.
    Setting(
        name="stage 2, a replica group a host",
        stage=2,
        replicas=8,
        units=(2 * NODE, 2 * NODE / HOST),
    ),
    Setting(
        name="stage 3, a replica group a host",
        stage=3,
        replicas=8,
        units=(3 * NODE, 2 * NODE / HOST),
    ),
)
HEADINGS = ["setting", "inside", "theory", "between nodes", "theory", "predicted step"]


def compiled(setting: Setting) -> Forecast:
    """The forecast of a setting, compiled for the absent GPUs."""
    setup = Setup(
        function=llama_of(MODEL),
        devices=DEVICES,
        seq=SEQ,
        precision="bf16",
        remat=True,
        replicas=setting.replicas,
        zero=setting.zero,
    )
    return open_study(setup).forecast(Choice(stage=setting.stage, micro=MICRO, remat=True))


def sent(forecast: Forecast) -> tuple[int, int]:
    """Bytes that a device sends in a step, inside its node and to others."""
    collectives = [each for each in forecast.traffic if each.dtypes]  # the others are copies
    between = sum(each.between_nodes for each in collectives)
    return sum(each.bytes for each in collectives) - between, between


def table(forecasts: Mapping[str, Forecast]) -> list[list[str]]:
    rows = [HEADINGS]
    for setting in SETTINGS:
        forecast = forecasts[setting.name]
        unit = 2 * forecast.parameters
        cells = (
            text
            for bytes_sent, units in zip(sent(forecast), setting.units, strict=True)
            for text in (f"{bytes_sent / GIGA:.2f}", f"{units * unit / GIGA:.2f}")
        )
        rows.append([setting.name, *cells, f"{forecast.seconds:.3f} s"])
    return rows


def draw(path: Path, bars: Sequence[tuple[str, int, int]]) -> None:
    """Write the picture.

    Args:
      path: A path that ends in ".png" or ".svg".
      bars: The name of each bar, from the top, and its bytes inside nodes and between them.
    """
    from matplotlib.figure import Figure

    names = [name for name, _, _ in bars]
    inside = [bytes_sent / GIGA for _, bytes_sent, _ in bars]
    between = [bytes_sent / GIGA for _, _, bytes_sent in bars]
    figure = Figure(figsize=(9, 0.6 * len(bars) + 1.6), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, widths, colour, title in (
        (left, inside, INSIDE, "inside nodes, over NVLink"),
        (right, between, BETWEEN, "between nodes, over the network"),
    ):
        axes.barh(names, widths, height=0.6, color=colour)
        for row, width in enumerate(widths):
            axes.text(width, row, f" {width:.1f}", va="center", color=INK, fontweight="bold")
        axes.set_title(title, loc="left", color=INK, fontsize=10, fontweight="bold")
        axes.set_xlim(0, max(widths) * 1.15)
        axes.set_xlabel("GB that a GPU sends in a step", color=INK)
        axes.tick_params(colors=INK, length=0)
        axes.grid(axis="x", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)
    left.invert_yaxis()
    title = f"{MODEL} on {DEVICES}, by stage and setting"
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11, fontweight="bold")
    figure.savefig(path)


def markdown(rows: Sequence[Sequence[str]], picture: str) -> str:
    """The record."""
    title = heading("Traffic inside nodes and between them", ", no GPU")
    return "\n\n".join([title, NOTE, markdown_table(rows), f"![The same]({picture})"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.node_traffic", description="Traffic by link."
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write a record here")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # compiling for an absent GPU works only so
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    forecasts = {setting.name: compiled(setting) for setting in SETTINGS}
    rows = table(forecasts)
    console().print(console_table(rows, caption=NOTE, caption_justify="left"))
    if options.record:
        stem = options.record / f"{datetime.date.today()}-node_traffic"
        settings = {
            name: [dataclasses.asdict(each) for each in forecast.traffic]
            for name, forecast in forecasts.items()
        }
        write_json(stem.with_suffix(".json"), {"settings": settings})
        picture = stem.with_suffix(".png")
        draw(picture, [(name, *sent(forecast)) for name, forecast in forecasts.items()])
        stem.with_suffix(".md").write_text(markdown(rows, picture.name))


if __name__ == "__main__":
    main()
