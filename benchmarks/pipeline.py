"""Pipeline stages beside stage 3 and ZeRO++, for Llama 2 70B on 64 absent GPUs; no GPU.

    python -m benchmarks.pipeline                              # 12 compiles, 12 minutes
    python -m benchmarks.pipeline --record benchmarks/records

An update of 128 rows of 8192 tokens, in one case of 256, on H100s with 400 Gb/s for each device
between nodes, and on A100s with 100 Gb/s for each node. Needs ``pip install -e '.[compile]'`` and
no GPU.
"""

import argparse
import functools
from typing import Any, NamedTuple

from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.published_tables import figures, giga
from zerojax.config import load
from zerojax.devices.mesh import laid_out
from zerojax.foresight.choice import Choice
from zerojax.foresight.devices import parse_devices
from zerojax.foresight.forecast import Forecast
from zerojax.models.names import llama_70b
from zerojax.pipeline.schedule import Schedule
from zerojax.tuning.study import Study

SEQ, ROWS, DEVICES, WIDTH = 8192, 128, 64, 8192
BOUNDARY = SEQ * WIDTH * 2
"""Bytes of one row's activations between two stages, in bf16."""
NETWORKS = {"h100": None, "a100": "100gb/host"}
CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "data_types": {"grad_accum_dtype": "bf16"},
}


class Case(NamedTuple):
    """A way to train.

    Attributes:
      stages: Pipeline stages.
      zero: The section ``zero_optimization``.
      rows: Rows an update.
    """

    stages: int
    zero: dict[str, Any]
    rows: int = ROWS

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one row a device; 1 without stages, where a device takes all its
        rows at once."""
        return self.rows * self.stages // DEVICES if self.stages > 1 else 1

    @property
    def schedule(self) -> Schedule | None:
        mesh, _ = parse_devices(f"h100:{DEVICES}")
        return Schedule.of(laid_out(mesh, self.axes), self.micro_batches)

    @property
    def axes(self) -> dict[str, int]:
        return {"stage": self.stages, "data": DEVICES // self.stages}


PLUS_PLUS = {
    "stage": 3,
    "zero_hpz_partition_size": 8,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
}
CASES = {
    "stage 3": Case(1, {"stage": 3}),
    "stage 3, hpZ of 8": Case(1, {"stage": 3, "zero_hpz_partition_size": 8}),
    "ZeRO++ (hpZ, qwZ, qgZ)": Case(1, PLUS_PLUS),
    "8 stages x 8, stage 1": Case(8, {"stage": 1}),
    "16 stages x 4, stage 1": Case(16, {"stage": 1}),
    "8 stages x 8, 256 rows": Case(8, {"stage": 1}, rows=2 * ROWS),
}
NOTE = (
    f"Llama 2 70B, {ROWS} rows (or 256) of {SEQ} tokens an update, {DEVICES} GPUs, bf16, remat, "
    "cuDNN's attention assumed, gradients added up in bf16. With stages a micro-batch is one row a "
    "device, without stages a device takes its two rows at once. Theory: (M + S - 1) ticks, in "
    "each of which a stage sends the boundary and the stream of inputs or outputs, forward and "
    f"backward: 4 (M + S - 1) of {BOUNDARY / 1e6:.0f} MB. Bubble: (S - 1) / (M + S - 1)."
)


def forecast(kind: str, case: Case) -> Forecast:
    """Compiles a case."""
    mesh, rates = parse_devices(f"{kind}:{DEVICES}", NETWORKS[kind])
    mesh = laid_out(mesh, case.axes) if case.stages > 1 else mesh
    config = load(CONFIG | {
        "zero_optimization": case.zero, "gradient_accumulation_steps": case.micro_batches,
        "train_batch_size": case.rows,
    })  # fmt: skip
    model = functools.partial(llama_70b, attention="cudnn")
    study = Study(model, config, mesh, rates, rows=case.rows, seq=SEQ)
    return study.forecast(Choice.of(config, case.rows, study.world, True))


def line(name: str, case: Case, found: Forecast) -> list[str]:
    """Returns the figures of one case."""
    sent = {each.kind: each for each in found.traffic}
    permuted = sent.get("collective-permute")
    schedule = case.schedule
    theory = 0 if schedule is None else 4 * schedule.ticks * BOUNDARY
    return [
        name,
        giga(found.peak.bytes) + ("" if found.fits else ", does not fit"),
        giga(sum(x.bytes for kind, x in sent.items() if kind != "collective-permute")),
        f"{giga(permuted.bytes)} of {giga(theory)}" if permuted else "",
        f"{schedule.bubble:.0%}" if schedule else "",
        f"{found.seconds:.1f}",
        f"{found.tokens_per_second:,.0f}",
        f"{found.mfu:.1%}",
    ]


@question(
    "pipeline",
    "Pipeline stages beside stage 3 and ZeRO++, Llama 2 70B on 64 GPUs",
    argument("--kinds", nargs="+", default=[*NETWORKS], help="kinds of GPUs"),
    argument("--cases", nargs="+", default=[*CASES], help="names of cases"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    results: dict[str, Any] = {}
    tables: list[Table] = []
    for kind in options.kinds:
        lines = [[
            "", "peak GB", "gathered and reduced GB", "permuted GB, of theory", "bubble",
            "forecast s", "tokens/s", "MFU",
        ]]  # fmt: skip
        for name in options.cases:
            say(f"compiling {kind}: {name}")
            found = forecast(kind, CASES[name])
            results[f"{kind}, {name}"] = figures(found) | {"seconds": found.seconds}
            lines.append(line(name, CASES[name], found))
        tables.append(Table(lines, title=f"{kind}, {NETWORKS[kind] or '400 Gb/s a device'}"))
    return Answer(results, [NOTE, *tables])


if __name__ == "__main__":
    main()
