"""Share of the collectives' time that a step hides, with and without ``overlap_comm``; no GPU.

    python -m benchmarks.hidden --only llama-7b --devices h100:64
    python -m benchmarks.hidden --record benchmarks/records       # everything, half an hour

Stage 3, bf16, AdamW, rematerialised blocks. Seconds are those of the forecast's timeline
(zerojax.hlo.timeline) over the compiled schedule. Unrolled models are compiled with a few layers.
Needs ``pip install -e '.[compile,examples]'``.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from flax import linen as nn

from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.published_tables import Setup, open_study
from zerojax.foresight.costs import INWARD, OUTWARD
from zerojax.foresight.forecast import Forecast
from zerojax.models import gpt, llama

MODELS = {"llama-7b": 2048, "gpt2-xl": 1024}  # tokens in a row
MICROS = (1, 4)
DEVICES = ("h100:8", "h100:64", "a100:8", "a100:64")
GROUPS = "groups of 8"
WAYS: dict[str, dict[str, int]] = {
    "stage 3": {},
    "stage 2": {"stage": 2},
    "4 micro-batches": {"gradient_accumulation_steps": 4},
    GROUPS: {},  # replica groups, in the mesh
}
"""Changes of the settings; all but the first for scanned models on 64 GPUs."""
UNROLLED_LAYERS = 8
HEADINGS = [
    "model", "GPUs", "rows a GPU", "overlap_comm", "step ms", "arithmetic ms", "collectives ms",
    "hidden", "exposed ms", "gathered GB", "peak GB",
]  # fmt: skip
NOTE = (
    "Stage 3 and one micro-batch unless said otherwise, bf16, AdamW, rematerialised blocks; rows "
    "of 2048 tokens for Llama 7B, 1024 for GPT-2 XL. Arithmetic is the step without what it waits "
    "for; hidden is the share of the collectives' time that nothing waits for. Milliseconds are "
    "the forecast's, over the schedule that XLA:GPU compiles; unrolled models have "
    f"{UNROLLED_LAYERS} layers. overlap_comm: off leaves the schedule to XLA and gathers layers "
    "where they are used."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step to compile.

    Attributes:
      model: a name in ``MODELS``.
      scan: whether its blocks are stacked; else there are ``UNROLLED_LAYERS`` of them.
      devices: kind and number, as the option ``--devices`` takes them.
      micro: rows of a device in a micro-batch.
      overlap: ``overlap_comm`` of the config.
      way: a name in ``WAYS``.
    """

    model: str
    scan: bool
    devices: str
    micro: int
    overlap: bool
    way: str = next(iter(WAYS))

    @property
    def name(self) -> str:
        way = "" if self.way == next(iter(WAYS)) else f", {self.way}"
        return f"{self.model}, {'scanned' if self.scan else 'unrolled'}{way}"

    def function(self) -> nn.Module:
        depth = {} if self.scan else {"n_layer": UNROLLED_LAYERS}
        if self.model == "gpt2-xl":
            sizes = gpt.SIZES["gpt2-xl"] | depth
            return gpt.GPT(gpt.GPTConfig(**sizes, scan=self.scan, remat=True))
        sizes = llama.SIZES[self.model] | depth
        return llama.Llama(llama.LlamaConfig(**sizes, scan=self.scan, remat=True))

    @property
    def settings(self) -> dict[str, int]:
        """Keywords of :func:`zerojax.zero`."""
        rows = {"train_micro_batch_size_per_gpu": self.micro}
        return {"stage": 3, "overlap_comm": self.overlap, **rows, **WAYS[self.way]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """The collectives of a step, in seconds and bytes of a device.

    Attributes:
      step: seconds of the complete step.
      collectives: seconds for which collectives are under way.
      exposed: seconds for which the step waits for them.
      gathered: bytes sent in all-gathers.
      peak: the most bytes of device memory.
    """

    step: float
    collectives: float
    exposed: float
    gathered: int
    peak: int

    @property
    def hidden(self) -> float:
        return 1 - self.exposed / self.collectives if self.collectives else 1.0


def overlap_of(forecast: Forecast) -> Overlap:
    """Returns the collectives of a forecast."""
    sent = [each for each in forecast.traffic if each.kind not in (INWARD, OUTWARD)]
    return Overlap(
        step=forecast.seconds,
        collectives=sum(each.seconds for each in sent),
        exposed=sum(each.waited for each in sent),
        gathered=sum(each.bytes for each in sent if each.kind == "all-gather"),
        peak=forecast.peak.bytes,
    )


def compile_case(case: Case) -> Overlap:
    """Compiles a case and follows its schedule.

    Raises:
      ImportError: the GPU compiler's wheels are not installed.
    """
    setup = Setup(
        function=case.function,
        devices=case.devices,
        seq=MODELS[case.model],
        precision="bf16",
        replicas=8 if case.way == GROUPS else 1,
        zero=case.settings,
    )
    study = open_study(setup)
    return overlap_of(study.forecast(study.given))


def cases(
    models: Sequence[str], devices: Sequence[str], scans: Sequence[bool] = (True, False)
) -> list[Case]:
    """All cases, each without and with overlap."""
    product = itertools.product(models, scans, devices, WAYS, MICROS, (False, True))
    return [
        Case(model=model, scan=scan, devices=kind, micro=micro, overlap=overlap, way=way)
        for model, scan, kind, way, micro, overlap in product
        if way == next(iter(WAYS)) or (scan and kind.endswith(":64"))
    ]


def table(results: Mapping[Case, Overlap]) -> list[list[str]]:
    """The rows of a table: headings, then one for each case."""
    return [
        HEADINGS,
        *(
            [
                case.name,
                case.devices,
                str(case.micro),
                "on" if case.overlap else "off",
                *(
                    f"{1e3 * seconds:.1f}"
                    for seconds in (each.step, each.step - each.exposed, each.collectives)
                ),
                f"{each.hidden:.0%}",
                f"{1e3 * each.exposed:.1f}",
                f"{each.gathered / 1e9:.2f}",
                f"{each.peak / 1e9:.2f}",
            ]
            for case, each in results.items()
        ),
    ]


@question(
    "hidden",
    "Collectives beside computation",
    argument("--only", action="append", choices=[*MODELS], help="may be repeated"),
    argument("--devices", action="append", metavar="KIND:N", help="may be repeated"),
    argument("--scanned", action="store_true", help="no unrolled models"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    scans = (True,) if options.scanned else (True, False)
    results = {}
    for case in cases(options.only or [*MODELS], options.devices or DEVICES, scans):
        results[case] = found = compile_case(case)
        say(
            f"{case.name}, {case.devices}, micro-batch {case.micro}, overlap {case.overlap}: "
            f"{found.hidden:.1%} hidden, {1e3 * found.exposed:.1f} ms exposed"
        )
    figures = [
        dataclasses.asdict(case) | dataclasses.asdict(each) for case, each in results.items()
    ]
    return Answer({"cases": figures}, [NOTE, Table(table(results), texts=4)])


if __name__ == "__main__":
    main()
