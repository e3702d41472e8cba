"""Traffic of a training step inside hosts and between them, by stage and setting; no GPU.

    python -m benchmarks.node_traffic                       # Llama 7B on 64 H100s, two minutes
    python -m benchmarks.node_traffic --gpus 24 --record benchmarks/records    # with a picture

Bytes are the compiled program's, by the links that NCCL's rings cross (zerojax.hlo.links). Needs
``pip install -e '.[compile,examples]'``.
"""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.measure import MASTER_BYTES
from benchmarks.published_steps import llama_of
from benchmarks.published_tables import GIGA, Setup, open_study
from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Forecast

MODEL, SEQ, MICRO = "llama-7b", 2048, 4
GPUS = 64
HOST = 8
RESTING, INSIDE, BETWEEN = "#8a94a3", "#5b8fd1", "#d9622b"
INK, GREY, FAINT = "#22272e", "#6b7480", "#d8dce2"
NOTE = (
    f"{MODEL}, H100s, {MICRO} rows of {SEQ} tokens a GPU, bf16, AdamW, rematerialised, one "
    "micro-batch. GB of 10^9 bytes that a GPU holds between steps and that it sends in a step. A "
    "ring over complete hosts sends an eighth of its bytes between them, one over a GPU of each "
    "host all of them. Theory: 12 bytes a parameter over the devices that share the state; in "
    "units of the bf16 parameters a gather or a scatter over n sends (n-1)/n, an all-reduce twice "
    "that."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the step, which is one bar of the picture.

    Attributes:
      stage: the ZeRO stage.
      near: the setting that keeps gathers inside a host.
      replicated: every host is a replica group, which holds the complete state.
      zero: further keywords of :func:`zerojax.zero`.
    """

    stage: int
    near: str = ""
    replicated: bool = False
    zero: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"stage {self.stage}" + f", {self.near}" * bool(self.near)

    def expected_resting(self, devices: int) -> float:
        """Bytes of state on a device, for each parameter."""
        return MASTER_BYTES / (HOST if self.replicated else devices if self.stage else 1)

    def expected_sent(self, devices: int) -> tuple[float, float]:
        """Traffic of a device inside its host and to others, in units of the bf16 parameters."""
        passes = 3 if self.stage == 3 else 2
        if self.near:
            # All passes inside. Between hosts an all-reduce of the gradient's shards; with hpZ a
            # gather of the secondary shards and a scatter of the shards.
            return passes * (1 - 1 / HOST), 2 * (1 - HOST / devices) / HOST
        ring = passes * (1 - 1 / devices)
        return ring * (1 - 1 / HOST), ring / HOST


REPLICATED = "a replica group in each host"
SETTINGS = (
    *(Setting(stage=stage) for stage in range(4)),
    Setting(
        stage=3,
        near="a secondary shard in each host (hpZ)",
        zero={"stage": 3, "zero_hpz_partition_size": HOST},
    ),
    *(Setting(stage=stage, near=REPLICATED, replicated=True) for stage in (2, 3)),
)
HEADINGS = [
    "setting", "at rest", "theory", "inside", "theory", "between hosts", "theory", "predicted step"
]  # fmt: skip


def compiled(setting: Setting, gpus: int) -> Forecast:
    """The forecast of a setting, compiled for so many absent H100s."""
    setup = Setup(
        function=llama_of(MODEL),
        devices=f"h100:{gpus}",
        seq=SEQ,
        precision="bf16",
        remat=True,
        replicas=gpus // HOST if setting.replicated else 1,
        zero=setting.zero,
    )
    return open_study(setup).forecast(Choice(stage=setting.stage, micro=MICRO, remat=True))


def sent(forecast: Forecast) -> tuple[int, int]:
    """Bytes that a device sends in a step, inside its host and to others."""
    collectives = [each for each in forecast.traffic if each.dtypes]  # the others are copies
    between = sum(each.between_nodes for each in collectives)
    return sum(each.bytes for each in collectives) - between, between


def table(forecasts: Mapping[str, Forecast]) -> list[list[str]]:
    rows = [HEADINGS]
    for setting in SETTINGS:
        forecast = forecasts[setting.name]
        n, parameters = forecast.devices, forecast.parameters
        figures = (forecast.plan.bytes_per_device, *sent(forecast))
        theory = (setting.expected_resting(n), *(2 * unit for unit in setting.expected_sent(n)))
        cells = (
            f"{number / GIGA:.2f}"
            for figure, expected in zip(figures, theory, strict=True)
            for number in (figure, expected * parameters)
        )
        rows.append([setting.name, *cells, f"{forecast.seconds:.3f} s"])
    return rows


def draw(gpus: int, bars: Sequence[tuple[str, int, int, int]], path: Path) -> None:
    """Write the picture.

    Args:
      gpus: Their number.
      bars: The name of each bar, from the top; a GPU's bytes at rest, and those that it sends
        inside hosts and between them.
      path: A path that ends in ".png" or ".svg".
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.55 * len(bars) + 1.1), dpi=150, layout="constrained")
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(3, 4, 4))
    for axes, column, colour, title in (
        (panels[0], 0, RESTING, "holds between steps"),
        (panels[1], 1, INSIDE, "sends inside its host"),
        (panels[2], 2, BETWEEN, "sends to other hosts"),
    ):
        widths = [sizes[column] / GIGA for _, *sizes in bars]
        axes.barh(range(len(bars)), widths, height=0.62, color=colour)
        for row, width in enumerate(widths):
            axes.text(width, row, f" {width:.1f} GB", va="center", color=INK, fontweight="bold")
        axes.set_title(title, loc="left", color=colour, fontsize=11, fontweight="bold")
        axes.set_xlim(0, max(widths) * 1.35)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_color(FAINT)
    panels[0].invert_yaxis()
    for row, (name, *_) in enumerate(bars):
        stage, _, near = name.partition(", ")
        for text, raised, look in (
            (stage, 5 if near else 0, {"color": INK, "fontweight": "bold"}),
            (near, -6, {"color": GREY, "fontsize": 8.5}),
        ):
            panels[0].annotate(
                text, (0, row), (-8, raised), textcoords="offset points", ha="right", va="center",
                **look,
            )  # fmt: skip
    title = f"A step of Llama 7B on {gpus} H100s, {HOST} in a host: what each GPU holds and sends"
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    figure.savefig(path)


@question(
    "node_traffic",
    "Traffic inside hosts and between them",
    argument("--gpus", type=int, default=GPUS, help="in complete hosts; 64 by default"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    forecasts = {}
    for setting in SETTINGS:
        say(f"compiling {setting.name}")
        forecasts[setting.name] = compiled(setting, options.gpus)
    bars = [
        (name, forecast.plan.bytes_per_device, *sent(forecast))
        for name, forecast in forecasts.items()
    ]
    settings = {
        name: {"resting_bytes": forecast.plan.bytes_per_device, "traffic": forecast.traffic}
        for name, forecast in forecasts.items()
    }
    return Answer(
        {"settings": settings},
        [f"{options.gpus} GPUs. {NOTE}", Table(table(forecasts))],
        draw=functools.partial(draw, options.gpus, bars),
        name="node_traffic" + f"-{options.gpus}" * (options.gpus != GPUS),
    )


if __name__ == "__main__":
    main()
