"""Choices of what the blocks of Llama 3 8B keep for the backward pass, on 8 H100s; no GPU.

    python -m benchmarks.remat                              # some 25 compiles, a quarter of an hour
    python -m benchmarks.remat --record benchmarks/records

Stage 3, rows of 8192 tokens, one and two a device: blocks keep everything, only their input,
results of products, these in host memory, and the named values that save the most time for their
memory, as ``zerojax fit`` tries them. Needs ``pip install -e '.[compile]'`` and no GPU.
"""

import argparse
import functools
import json
from collections.abc import Sequence

from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.published_tables import figures, giga
from zerojax.config import load
from zerojax.foresight.by_value import by_value
from zerojax.foresight.choice import Choice, Remat
from zerojax.foresight.devices import parse_devices
from zerojax.foresight.forecast import Forecast
from zerojax.foresight.trials import Trial
from zerojax.models.names import llama3_8b
from zerojax.tuning.cache import Cache
from zerojax.tuning.search import ranked
from zerojax.tuning.space import POLICIES
from zerojax.tuning.study import Study

SEQ, DEVICES = 8192, 8
CONFIG = {
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 0},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
CHOICES: tuple[Remat, ...] = (False, True, *POLICIES)
NAMES: dict[Remat, str] = {False: "everything", True: "only the input (remat)"}
NOTE = (
    f"{DEVICES} H100s, {SEQ} tokens in a row, the config C = `{json.dumps(CONFIG)}`, layers in a "
    "scan, cuDNN's attention assumed. Compiled by XLA:GPU for absent devices. XLA repeats: "
    "instructions, bytes and time of the values that XLA computes again by itself in a step, where "
    "its own estimate of a program exceeds the limit, which the peak then need not; the forecast "
    "has that time. Programs with loops that gather a layer ahead leave that pass of XLA out. "
    "Saved: time, beside blocks that keep only their input, for the memory that is kept. "
    f"`python -m zerojax fit --model llama3-8b --devices h100:{DEVICES} --batch {DEVICES} "
    f"--seq {SEQ} --attention cudnn --config C` tries and proposes those of one row."
)
HEADINGS = [
    "blocks keep", "peak GB", "host GB", "forecast s", "tokens/s", "MFU", "XLA repeats",
    "saved ms a GB", "",
]  # fmt: skip


def trials(study: Study, rows: int, choices: Sequence[Remat]) -> list[Trial]:
    """The trials of every choice with so many rows a device, those that do not fit included."""
    by_hand = [Choice(stage=3, micro=rows, remat=remat) for remat in choices]
    compiled = {choice: study.forecast(choice) for choice in by_hand}
    by_value(study, Choice(stage=3, micro=rows, remat=True))
    compiled |= {each: study.forecast(each) for each in study.asked if each.micro == rows}
    return [Trial(choice, forecast) for choice, forecast in compiled.items()]


def table(rows: int, found: Sequence[Trial]) -> Table:
    """A line for each trial; the proposed one is marked."""
    least = next(each.forecast for each in found if each.choice.remat is True)
    proposed = ranked(each for each in found if each.forecast.fits)[0]
    lines = [HEADINGS, *(_line(each, least, each is proposed) for each in found)]
    limit = least.recomputes_above
    title = f"{rows} of {SEQ} tokens a device; XLA "
    title += f"repeats above {giga(limit)} GB" if limit else "repeats nothing"
    return Table(lines, title=title)


def _line(trial: Trial, least: Forecast, is_proposed: bool) -> list[str]:
    forecast, remat = trial.forecast, trial.choice.remat
    saved = least.seconds - forecast.seconds
    added = forecast.peak.bytes - least.peak.bytes
    count = forecast.peak.again.instructions
    repeated = f"{count}, {giga(forecast.bytes_again)} GB, {forecast.seconds_again * 1e3:.0f} ms"
    return [
        NAMES.get(remat, str(remat)),
        giga(forecast.peak.bytes) + ("" if forecast.fits else ", does not fit"),
        giga(forecast.host_bytes),
        f"{forecast.seconds:.3f}",
        f"{forecast.tokens_per_second:,.0f}",
        f"{forecast.mfu:.1%}",
        repeated if count else "",
        f"{saved * 1e3 / added * 1e9:.1f}" if forecast.fits and added > 0 else "",
        "proposed" if is_proposed else "",
    ]


@question(
    "remat",
    "What the blocks of Llama 3 8B keep, on 8 H100s",
    argument("--rows", type=int, nargs="+", default=[1, 2], help="rows of a device"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    mesh, rates = parse_devices(f"h100:{DEVICES}")
    model = functools.partial(llama3_8b, attention="cudnn")
    study = Study(model, load(CONFIG), mesh, rates, rows=None, seq=SEQ, note=say, measured=Cache())
    found = {rows: trials(study, rows, CHOICES) for rows in options.rows}
    by_name = {f"{rows} rows, {x.choice}": x.forecast for rows in found for x in found[rows]}
    return Answer(
        {name: figures(x) | {"again": x.peak.again.instructions, "bytes_again": x.bytes_again,
                             "seconds": x.seconds, "seconds_again": x.seconds_again}
         for name, x in by_name.items()},
        [NOTE, *(table(rows, each) for rows, each in found.items())],
    )  # fmt: skip


if __name__ == "__main__":
    main()
