"""The main job (examples/run_clm) in fp32, bf16 and fp16: distances of losses, and tokens/s.

    python -m benchmarks.precision                             # 1000 steps each, half an hour
    python -m benchmarks.precision --steps 100 --model tiny    # a minute
    python -m benchmarks.precision --json records/precision.json --picture records/precision.png

The same data, seed and devices for each; the config is configs/zero3.json with the precision
switched on. To expect of fp16: held-out loss and mean training loss within 2% of fp32 all along.
"""

import argparse
import dataclasses
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib import pyplot as plt

from benchmarks.frame import Answer, Table, argument, question
from benchmarks.report import console
from examples.run_clm.job import DEFAULT_CONFIG, Job, size_of
from examples.run_clm.train import train

PRECISIONS = ("fp32", "bf16", "fp16")
WINDOW = 20  # steps that a mean of the training loss covers
ALLOWED = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One precision's run; losses in nats a byte.

    Attributes:
      train: the loss of every step.
      held_out: (step, loss) at each evaluation.
    """

    precision: str
    tokens_per_second: float
    train: list[float]
    held_out: list[tuple[int, float]]

    def parts_from(self, other: "Run") -> tuple[float, float]:
        """The largest relative distance of the held-out loss, and of the mean training loss."""
        held_out = [(a[1], b[1]) for a, b in zip(self.held_out, other.held_out, strict=True)]
        means = zip(_means(self.train), _means(other.train), strict=True)
        return _furthest(held_out), _furthest(list(means))


def run(precision: str, steps: int, model: str, folder: Path, evaluations: int = 20) -> Run:
    """Trains the main job in one precision, and evaluates so many times on the way."""
    config: dict[str, Any] = json.loads(DEFAULT_CONFIG.read_text())
    config |= {} if precision == "fp32" else {precision: {"enabled": True}}
    path = folder / f"{precision}.json"
    path.write_text(json.dumps(config))
    job = Job(
        text=[],
        config=path,
        max_train_steps=steps,
        config_name=model,
        block_size=size_of(model)["block_size"],
        scan=False,
        remat=False,
        dropout=0.0,
        kernels=None,
        output_dir=folder / precision,
        seed=0,
        devices=None,
        eval_every=max(1, steps // evaluations),
        save_every=steps,
        restart=False,
        from_step=None,
    )
    outcome = train(job, console())
    return Run(
        precision=precision,
        tokens_per_second=outcome.tokens_per_second,
        train=[float(loss) for loss in outcome.history.train],
        held_out=outcome.history.held_out,
    )


def table(runs: Sequence[Run]) -> list[list[str]]:
    """Headings, and a row for each precision, beside fp32."""
    rows = [["precision", "held-out loss", "differs at most by", "mean training loss by",
             "tokens/s", "of fp32's"]]  # fmt: skip
    for each in runs:
        held_out, training = each.parts_from(runs[0])
        rows.append(
            [
                each.precision,
                f"{each.held_out[-1][1]:.4f}",
                f"{held_out:.2%}",
                f"{training:.2%}",
                f"{each.tokens_per_second:,.0f}",
                f"{each.tokens_per_second / runs[0].tokens_per_second:.2f}",
            ]
        )
    return rows


def draw(runs: Sequence[Run], path: Path) -> None:
    """The held-out curves above, their distance from fp32's below."""
    figure, (top, below) = plt.subplots(
        2, sharex=True, figsize=(8, 6), dpi=120, layout="constrained", height_ratios=(2, 1)
    )
    for each in runs:
        steps = [step for step, _ in each.held_out]
        losses = np.array([loss for _, loss in each.held_out])
        fp32 = np.array([loss for _, loss in runs[0].held_out])
        top.plot(steps, losses, marker="o", markersize=3, label=each.precision)
        below.plot(steps, 100 * (losses / fp32 - 1), marker="o", markersize=3)
    top.set_ylabel("held-out loss (nats per byte)")
    top.legend(frameon=False)
    below.set(xlabel="step", ylabel="% from fp32")
    for sign in (-1, 1):
        below.axhline(sign * 100 * ALLOWED, color="grey", linewidth=0.8, linestyle="--")
    figure.savefig(path)
    plt.close(figure)


@question(
    "precision",
    "The main job in fp32, bf16 and fp16",
    argument("--steps", type=int, default=1000),
    argument("--model", default="mini"),
    argument("--picture", type=Path, metavar="OUT", help="also draw the curves here"),
)
def main(options: argparse.Namespace) -> Answer:
    if options.steps < 1:
        raise SystemExit("--steps: at least 1")
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(p, options.steps, options.model, Path(folder)) for p in PRECISIONS]
    if options.picture:
        draw(runs, options.picture)
    worst = max(runs[PRECISIONS.index("fp16")].parts_from(runs[0]))
    device = jax.devices()[0].device_kind
    return Answer(
        {"device": device, "devices": jax.device_count(), "runs": runs},
        [Table(table(runs), title=f"{options.steps} steps of the main job")],
        draw=functools.partial(draw, runs),
        missed=[f"fp16 differs from fp32 by {worst:.2%}, more than {ALLOWED:.0%}"]
        * (worst > ALLOWED),
        machine=f", {device}",
    )


def _means(losses: list[float]) -> list[float]:
    n = max(1, len(losses) // WINDOW)
    return [float(np.mean(part)) for part in np.array_split(losses, n)]


def _furthest(pairs: list[tuple[float, float]]) -> float:
    return max(abs(a / b - 1) for a, b in pairs)


if __name__ == "__main__":
    main()
