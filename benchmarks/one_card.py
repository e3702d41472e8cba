"""Forecasts of fine-tuning a 3B, an 8B and a 70B on an RTX 4090 and on H100s; no GPU.

    python -m benchmarks.one_card                              # some 80 compiles, half an hour
    python -m benchmarks.one_card --size 8B
    python -m benchmarks.one_card --record benchmarks/records

Full fine-tuning, with remat and with parts of the state in host memory, and low-rank adapters
beside a frozen base, as ``examples.finetune`` trains them: memory by kind and the forecast, beside
published figures (``one_card.json``). Needs ``pip install -e '.[compile,text]'`` and no GPU.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.published_tables import figures, giga
from examples.finetune import RANK, Method, planned
from zerojax.cli.plan_picture import draw
from zerojax.config import load
from zerojax.foresight.attribution import EXTRA, GATHERED, GRADIENTS, PARAMETERS, STATE
from zerojax.foresight.choice import Choice
from zerojax.foresight.costs import INWARD, OUTWARD
from zerojax.foresight.devices import parse_devices
from zerojax.foresight.forecast import Forecast
from zerojax.models import llama
from zerojax.models.names import Decoder
from zerojax.tuning.cache import Cache
from zerojax.tuning.study import Study

REGISTERED = json.loads(Path(__file__).with_suffix(".json").read_text())
SEQ, ROWS = 2048, 2
DEVICES = ("rtx-4090:1", "h100:1", "h100:8")
CONFIG: Mapping[str, Any] = {
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}
COLUMNS = {
    "weights": (PARAMETERS, GATHERED),
    "frozen base": (EXTRA,),
    "gradients": (GRADIENTS,),
    "optimizer": (STATE,),
}
"""Kinds of memory by column; the rest are activations and what else a step holds."""
REST = "activations, the rest"
NOTE = (
    f"Compiled by XLA:GPU for absent devices, by the config `{json.dumps(CONFIG)}`: {ROWS} rows of "
    f"{SEQ} tokens a device where a line has no other number, layers in a scan, remat (blocks keep "
    "only their input) except in the first line, cuDNN's attention assumed; LoRA of rank "
    f"{RANK} beside all products of a block. GB a device, tokens/s of all devices. After a program "
    "that does not fit no other is compiled. Copies: seconds in which the device waits for copies "
    "from and to the host, which XLA makes by kernels; the forecast hides them behind nothing. "
    "Recipes without a line do not fit: the state at rest alone exceeds the memory."
)
HEADINGS = ["devices", "recipe", *COLUMNS, REST, "total", "host", "step s", "copies s", "tokens/s"]
BESIDE = "published, devices, rows x accumulation x tokens, GB, tokens/s, recipe, GB, tokens/s, off"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way to fine-tune.

    Attributes:
      choice: Rows, remat and what is in host memory.
      method: As for ``examples.finetune``.
      low: Whether Adam's moments are stored in bf16.
    """

    choice: Choice
    method: Method = Method.full
    low: bool = False


_choice = functools.partial(Choice, stage=3, micro=ROWS, remat=True)
_offloaded = functools.partial(_choice, offload="optimizer and parameters")
RECIPES = {
    "full": Recipe(_choice(remat=False)),
    "full, remat": Recipe(_choice()),
    "bf16 moments": Recipe(_choice(), low=True),
    "optimizer on the host": Recipe(_choice(offload="optimizer")),
    "optimizer on the host, 12 rows": Recipe(_choice(offload="optimizer", micro=12)),
    "both on the host, bf16 moments": Recipe(_offloaded(), low=True),
    "both on the host, bf16 moments, 12 rows": Recipe(_offloaded(micro=12), low=True),
    "LoRA": Recipe(_choice(), Method.lora),
    "QLoRA": Recipe(_choice(), Method.qlora),
}


def forecast(
    size: str, devices: str, recipe: Recipe, seq: int = SEQ, **changed: Any
) -> Forecast | None:
    """Compiles a step for so many tokens a row; ``changed`` are fields of the choice. None if the
    state at rest alone exceeds the memory."""
    mesh, rates = parse_devices(devices)
    decoder = Decoder(llama.Llama, llama.LlamaConfig, REGISTERED["sizes"][size])
    model = functools.partial(planned, decoder, recipe.method, attention="cudnn")
    config = load({**CONFIG, "bf16": {"enabled": True, "bf16_optimizer_states": recipe.low}})
    study = Study(model, config, mesh, rates, rows=None, seq=seq, note=say, measured=Cache())
    choice = dataclasses.replace(recipe.choice, **changed)
    fits = study.plan(choice).bytes_per_device <= rates.room
    return study.forecast(choice) if fits else None


def cells(found: Forecast) -> list[str]:
    """The figures of a forecast, from the memory by column on."""
    kinds = found.peak.memory
    sizes = [sum(kinds.get(kind, 0) for kind in of) for of in COLUMNS.values()]
    memory = [*map(giga, (*sizes, found.peak.bytes - sum(sizes)))]
    memory += [f"{giga(found.peak.bytes)} of {giga(found.rates.room)}", giga(found.host_bytes)]
    if not found.fits:
        return [*memory, "does not fit", "", ""]
    copied = sum(each.waited for each in found.traffic if each.kind in (INWARD, OUTWARD))
    return [*memory, f"{found.seconds:.2f}", f"{copied:.2f}", f"{found.tokens_per_second:,.0f}"]


def beside(row: Mapping[str, Any]) -> list[str]:
    """A published row, and the forecast of the recipe that is nearest to it."""
    recipe, seq, published = row["recipe"], row["seq"], row["tokens_per_second"]
    shape = {"micro": row["micro_batch"], "accumulation": row["accumulation"]}
    found = forecast(row["size"], row["devices"], RECIPES[recipe], seq, **shape)
    assert found is not None, recipe
    return [
        f"{row['framework']}, {row['size']}, {row['published']}", row["devices"],
        f"{row['micro_batch']} x {row['accumulation']} x {seq}", str(row.get("gigabytes", "")),
        f"{published:,}", recipe, giga(found.peak.bytes), f"{found.tokens_per_second:,.0f}",
        f"{found.tokens_per_second / published - 1:+.0%}",
    ]  # fmt: skip


@question(
    "one_card",
    "Fine-tuning on one card: what fits on 24 and 80 GB, and its speed by forecast",
    argument("--size", action="append", choices=[*REGISTERED["sizes"]], help="all by default"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    sizes = options.size or [*REGISTERED["sizes"]]
    rungs = {
        (size, devices, name): found
        for size in sizes
        for devices in DEVICES
        for name, recipe in RECIPES.items()
        if (found := forecast(size, devices, recipe))
    }
    drawn = {f"{key[1]}, {key[2]}": x for key, x in rungs.items() if key[0] == "8B"}
    published = [beside(row) for row in REGISTERED["rows"] if row["size"] in sizes]
    tables = [
        Table([HEADINGS, *([*key[1:], *cells(x)] for key, x in rungs.items() if key[0] == size)],
              title=size, texts=2)
        for size in sizes
    ]  # fmt: skip
    return Answer(
        {", ".join(key): figures(found) for key, found in rungs.items()},
        [
            NOTE,
            *tables,
            Table([BESIDE.split(", "), *published], title="Beside published figures", texts=3),
            REGISTERED["found"],
            REGISTERED["rule"],
        ],
        draw=functools.partial(draw, title="8B, by devices", stages=drawn) if drawn else None,
    )


if __name__ == "__main__":
    main()
