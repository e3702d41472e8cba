"""What stays gathered, what it saves, and what stage 1 sends under accumulation; no GPU.

    python -m benchmarks.policies --record benchmarks/records      # ten minutes on two cores

Llama 7B on 64 absent H100s, compiled and forecast. Needs
``pip install -e '.[compile,examples]'``.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.published_steps import llama_of
from benchmarks.published_tables import GIGA, Setup, open_study
from benchmarks.report import console, console_table, markdown_table, write_dated
from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Forecast
from zerojax.foresight.gathered import with_room_filled
from zerojax.tuning.study import Study

MODEL, DEVICES, SEQ = "llama-7b", "h100:64", 2048
ACCUMULATIONS = (1, 4)
SOME = 3 * 10**9
HEADINGS = [
    "stage", "stays gathered", "micro-batches", "kept GB", "gathered", "theory", "reduced",
    "theory", "DeepSpeed, in all", "peak GB", "step ms",
]  # fmt: skip
NOTE = (
    f"{MODEL}, {DEVICES.replace(':', ' x ')}, a row of {SEQ} tokens a GPU and micro-batch, bf16, "
    "AdamW, rematerialised and scanned blocks. Gathered and reduced: payloads of an update over "
    "the bf16 parameters. DeepSpeed: its own count of passes an update, 2 at stage 1, which "
    "reduces at the boundary alone, 3 a micro-batch at stage 3 (Rajbhandari et al. 2020, section "
    "7). Kept: stage3_max_live_parameters as a GPU holds them. For "
    '"auto" the fastest is taken. Step: the forecast.'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """The costs of an update under one policy.

    Attributes:
      name: What stays gathered.
      stage, accumulation: The ZeRO stage and the micro-batches.
      kept: Bytes that a GPU holds gathered over an update at stage 3.
      gathered, reduced: Passes over the parameters.
      peak: Bytes of device memory.
      seconds: The forecast of the step.
      share: Of the parameters, that which stays gathered.
    """

    name: str
    stage: int
    accumulation: int
    kept: int
    gathered: float
    reduced: float
    peak: int
    seconds: float
    share: float

    @property
    def expected(self) -> tuple[float, float]:
        """Gathers and reductions of an update, in passes."""
        k = self.accumulation
        gathers = 2 * k * (1 - self.share) + self.share if self.stage == 3 else 1
        return gathers, 1 if self.stage == 1 else k

    @property
    def deepspeed(self) -> int:
        """Passes of an update in DeepSpeed."""
        return 2 if self.stage == 1 else 3 * self.accumulation


def policy(name: str, choice: Choice, forecast: Forecast) -> Policy:
    """What a forecast says of one policy."""
    n, live = forecast.devices, forecast.plan.live
    once = 2 * forecast.parameters * (n - 1) / n

    def passes(word: str) -> float:
        return sum(each.bytes for each in forecast.traffic if word in each.kind) / once

    return Policy(
        name=name,
        stage=choice.stage,
        accumulation=choice.accumulation,
        kept=live.bytes,
        gathered=passes("gather"),
        reduced=passes("reduce"),
        peak=forecast.peak.bytes,
        seconds=forecast.seconds,
        share=live.elements / forecast.parameters,
    )


def compiled(study: Study, k: int) -> list[Policy]:
    """All policies with ``k`` micro-batches."""
    three = Choice(stage=3, micro=1, accumulation=k, remat=True)
    choices = {
        "all": dataclasses.replace(three, stage=1),
        "nothing": three,
        f"{SOME:,} elements": dataclasses.replace(three, live=SOME),
    }
    found = [policy(name, each, study.forecast(each)) for name, each in choices.items()]
    filled = with_room_filled(study, three)
    if filled is not None:
        found.append(policy("all that fit", filled.choice, filled.forecast))
    return found


def table(policies: Sequence[Policy]) -> list[list[str]]:
    rows = [HEADINGS]
    for each in policies:
        gathers, reductions = each.expected
        rows.append([
            str(each.stage),
            each.name,
            str(each.accumulation),
            f"{each.kept / GIGA:.2f}" if each.stage == 3 else "",
            f"{each.gathered:.2f}",
            f"{gathers:.2f}",
            f"{each.reduced:.2f}",
            f"{reductions:.2f}",
            str(each.deepspeed),
            f"{each.peak / GIGA:.2f}",
            f"{1e3 * each.seconds:.0f}",
        ])  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies", description="What stays gathered, and what it saves."
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write a record here")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # compiling for an absent GPU works only so
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    settings: dict[str, Any] = {"devices": DEVICES, "seq": SEQ, "precision": "bf16", "remat": True}
    study = open_study(Setup(function=llama_of(MODEL), zero={"stage": 3}, **settings))
    out, found = console(), []
    for k in ACCUMULATIONS:
        found += compiled(study, k)
        out.print(console_table(table(found), caption=NOTE))
    if options.record:
        figures = {"policies": [*map(dataclasses.asdict, found)]}
        title, rows = "What stays gathered over an update", markdown_table(table(found), texts=2)
        write_dated(options.record, "policies", title, figures, NOTE, rows)


if __name__ == "__main__":
    main()
