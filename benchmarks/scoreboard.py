"""The scoreboard: forecasts beside published speeds that were registered before.

    python -m benchmarks.scoreboard                              # 65 compiles, half an hour
    python -m benchmarks.scoreboard --only mpt-7b                # rows of one model
    python -m benchmarks.scoreboard --record benchmarks/records

``scoreboard.json`` has the published rows, with their sources and the rule by which they were
chosen. Its first commit is older than the first forecast of a row. Each row is compiled for its
absent devices with the same sizes, batch, remat and devices; no row is left out of the errors.
Needs ``pip install -e '.[compile]'``, and the extra `tpu` for rows of TPUs.
"""

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.published_steps import Keep, fused_llama
from benchmarks.published_tables import Setup, giga, open_study
from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Forecast
from zerojax.models import gpt
from zerojax.models.names import Decoder

REGISTERED = Path(__file__).with_name("scoreboard.json")
NEAR = 0.2
"""The largest error of a forecast that counts as near."""

OTHERS = (
    "What others report of their own forecasts: vTrain 8.4% on 8 GPUs and 14.7% on 512, after "
    "it has timed the operators on a GPU (arXiv:2312.12391); Charon 3.7% (arXiv:2605.17164). Here "
    "no device is used: the rates of all kinds are shares of their data sheets."
)
TPUS = (
    "Rows of v6e: by libtpu, with jax's splash attention. The q, k, v and output projections go to "
    "host memory, and the inputs of layers stay on the device. The time lacks these copies, and "
    "XLA for TPUs compiles programs that do not fit by the sum of their arguments and temporaries."
)
KEPT: Mapping[str, Keep] = {
    "minimal_flash": "products",
    "save_dot_with_context_except_mlp": "projections",
    "custom: inputs of layers, q, k, v and the output projection to the host": "offloaded",
}


@dataclasses.dataclass(frozen=True)
class Score:
    """A published row and its forecast.

    Attributes:
      row: The row of ``scoreboard.json``.
      forecast: None if the row could not be compiled.
      reason: Why not.
    """

    row: Mapping[str, Any]
    forecast: Forecast | None
    reason: str = ""

    @property
    def computed(self) -> float | None:
        """Tokens per second of a device."""
        if self.forecast is None:
            return None
        return self.forecast.tokens_per_second / self.forecast.devices

    @property
    def error(self) -> float | None:
        """The computed speed over the published one, less 1."""
        return None if self.computed is None else self.computed / self.published - 1

    @property
    def published(self) -> float:
        return float(self.row["tokens_per_second"])

    @property
    def name(self) -> str:
        row = self.row
        accumulation = f" x {row['accumulation']}" if row["accumulation"] > 1 else ""
        known = ", known" if row.get("known") else ""
        return (
            f"{row['model']}, {row['devices']}, {row['micro_batch']}{accumulation} x {row['seq']}"
            f", remat {row['remat']}{known}"
        )

    @property
    def cells(self) -> list[str]:
        if self.forecast is None or self.computed is None or self.error is None:
            return [self.name, self.row["framework"], f"{self.published:,.0f}", "", "", self.reason]
        fits = "" if self.forecast.fits else ", does not fit"
        memory = f"{giga(self.forecast.peak.bytes)}{fits}"
        computed = f"{self.computed:,.0f}", f"{self.error:+.1%}", memory
        return [self.name, self.row["framework"], f"{self.published:,.0f}", *computed]


def score(row: Mapping[str, Any], models: Mapping[str, Any]) -> Score:
    """Forecasts one row."""
    setup = Setup(
        function=_function(models[row["model"]], row),
        devices=row["devices"],
        seq=row["seq"],
        precision=row["precision"],
        remat=row["remat"] != "none",
        replicas=row["replicas"],
        shared=row.get("sequence_devices", 1),
        network=row.get("network"),
        zero={"gradient_clipping": 1.0},
    )
    choice = Choice(
        stage=row["stage"],
        micro=row["micro_batch"],
        accumulation=row["accumulation"],
        remat=row["remat"] != "none",
    )
    try:
        return Score(row, open_study(setup).forecast(choice))
    except (ImportError, RuntimeError) as error:
        return Score(row, None, f"not compiled: {str(error).splitlines()[0]:.80}")


def _function(model: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    sizes = {
        "n_layer": model["layers"],
        "n_head": model["heads"],
        "n_embd": model["width"],
        "vocab_size": model["vocabulary"],
        "block_size": row["seq"],
    }
    if "Llama" not in model["kind"]:
        return functools.partial(Decoder(gpt.GPT, gpt.GPTConfig, sizes), attention="cudnn")
    sizes |= {"n_kv_head": model["key_value_heads"], "n_inner": model["inner"]}
    attention = "splash" if row["attention"] == "splash" else "cudnn"
    return fused_llama(sizes, attention, keep=KEPT.get(row["remat"], "nothing"))


def summary(scores: Sequence[Score]) -> list[list[str]]:
    """Returns the errors of all rows, and of those of JAX and of torch alone."""
    groups = {
        "all": scores,
        "JAX": [each for each in scores if "JAX" in each.row["framework"]],
        "torch": [each for each in scores if "torch" in each.row["framework"]],
    }
    rows = [["rows", "forecast", "not", "mean error", "median", "worst", "within 20%"]]
    for name, group in groups.items():
        errors = [abs(each.error) for each in group if each.error is not None]
        counts = [str(len(errors)), str(len(group) - len(errors))]
        if not errors:
            rows.append([name, *counts, "", "", "", ""])
            continue
        mean, median = statistics.mean(errors), statistics.median(errors)
        near = sum(error <= NEAR for error in errors)
        figures = f"{mean:.1%}", f"{median:.1%}", f"{max(errors):.1%}", f"{near} of {len(errors)}"
        rows.append([name, *counts, *figures])
    return rows


def draw(scores: Sequence[Score], path: Path) -> None:
    """Draws the computed speed of each row over the published one, by the number of devices."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, marker in (("torch", "o"), ("JAX", "s")):
        found = [x for x in scores if name in x.row["framework"] and x.forecast is not None]
        devices = [x.forecast.devices for x in found if x.forecast is not None]
        ratios = [1 + x.error for x in found if x.error is not None]
        axes.scatter(devices, ratios, marker=marker, alpha=0.7, label=f"{name}, {len(found)} rows")
    axes.axhline(1, color="gray", linewidth=1)
    axes.axhspan(1 - NEAR, 1 + NEAR, color="gray", alpha=0.15, label="within 20%")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("devices")
    axes.set_ylabel("forecast tokens/s over published")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


@question(
    "scoreboard",
    "Forecasts beside published speeds that were registered before",
    argument("--only", help="a model of scoreboard.json"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    table = json.loads(REGISTERED.read_text())
    rows = [row for row in table["rows"] if options.only in (None, row["model"])]
    scores = []
    for row in rows:
        scores.append(score(row, table["models"]))
        say(" | ".join(scores[-1].cells))
    heads = ["row", "framework", "published", "forecast", "error", "peak GB"]
    return Answer(
        {
            each.name: {"published": each.published, "computed": each.computed, "error": each.error}
            for each in scores
        },
        [
            f"Tokens/s of a device. Registered on {table['registered']}. {table['rule']}",
            Table(summary(scores), title="errors"),
            OTHERS,
            TPUS,
            Table([heads, *(each.cells for each in scores)], title="rows", texts=2),
        ],
        draw=functools.partial(draw, scores),
    )


if __name__ == "__main__":
    main()
