"""The tables of largest batches: GPT-2 XL on one GPU, an encoder on two.

Both are of Hugging Face's "Accelerate Large Model Training using DeepSpeed" (2022,
https://huggingface.co/blog/accelerate-deepspeed), whose commands give the batch of each GPU. A
batch that is named the largest was compiled and fits; one row more was compiled and does not.
"""

import dataclasses
from collections.abc import Mapping

from benchmarks.published_steps import gpt2_xl
from benchmarks.published_tables import (
    Opener,
    Row,
    Section,
    Setup,
    detail,
    figures,
    fits,
    giga,
    states,
)
from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Forecast
from zerojax.tuning.study import Study
from zerojax.tuning.tasks import deberta_v2_xlarge

GUESSES = 6  # after which the interval is halved, whatever the line through the last two says
BLOG = "https://huggingface.co/blog/accelerate-deepspeed"
PLAIN, TWO = Choice(stage=0, micro=1), Choice(stage=2, micro=1)
OFFLOADED = Choice(stage=3, micro=16, offload="optimizer and parameters")
ENCODER_ROWS = 8, 40  # published, without ZeRO and at stage 2
# Bytes a parameter, by count: of torch's AMP, Adam and DDP, and of DeepSpeed's ZeRO-2 on two GPUs.
AMP_BYTES, ZERO2_BYTES = 22, 2 + 14 // 2
AMP = (
    "torch's AMP and DDP hold 22 bytes a parameter by count (fp32 weights, gradients and moments "
    "16, what autocast casts 2, DDP's buckets 4)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """The outcome of a search.

    Attributes:
      micro: the largest micro-batch that fits; 0 where not even one row does.
      fitting: the forecast of that micro-batch; None where nothing fits.
      above: the forecast of a micro-batch with one row more.
      row_bytes: what a row more takes at the peak, from the two compiles farthest apart.
      compiled: the micro-batches that were.
    """

    micro: int
    fitting: Forecast | None
    above: Forecast
    row_bytes: float
    compiled: tuple[int, ...]


def find_largest(study: Study, choice: Choice, *, start: int) -> Largest:
    """Searches the largest micro-batch, with all else as chosen.

    Args:
      study: a study of the model on the devices.
      choice: the choice of all else; its micro-batch does not matter.
      start: the first micro-batch to compile; the second is twice or half of it.

    Raises:
      ValueError: ``start`` is below 1.
    """
    if start < 1:
        raise ValueError(f"start={start}: give the micro-batch to begin with, 1 or more")
    known: dict[int, Forecast] = {}
    wanted = start
    while True:
        known[wanted] = study.forecast(dataclasses.replace(choice, micro=wanted))
        low = max((n for n, forecast in known.items() if forecast.fits), default=0)
        high = min((n for n, forecast in known.items() if not forecast.fits), default=None)
        if high is not None and high - low <= 1:
            break
        wanted = _next(known, low, high)
    return Largest(
        micro=low,
        fitting=known.get(low),
        above=known[high],
        row_bytes=_slope(min(known), max(known), known) if len(known) > 1 else 0.0,
        compiled=tuple(known),
    )


def _next(known: Mapping[int, Forecast], low: int, high: int | None) -> int:
    """A size between the largest that fits and the smallest that does not."""
    if len(known) < 2 or (high is not None and len(known) > GUESSES):
        return 2 * low if high is None else (low + high) // 2
    room = next(iter(known.values())).rates.room
    near = sorted(known, key=lambda n: abs(known[n].peak.bytes - room))[:2]
    slope = _slope(min(near), max(near), known)
    if slope <= 0:
        return 2 * low if high is None else (low + high) // 2
    guess = near[0] + int((room - known[near[0]].peak.bytes) // slope)
    return max(low + 1, min(guess, 4 * max(low, 1) if high is None else high - 1))


def _slope(less: int, more: int, known: Mapping[int, Forecast]) -> float:
    return (known[more].peak.bytes - known[less].peak.bytes) / (more - less)


def gpt2(opened: Opener) -> Section:
    """GPT-2 XL in blocks of 128 on one 24 GB GPU."""
    study = opened(Setup(function=gpt2_xl, devices="titan-rtx:1", seq=128))
    plain, offloaded = study.forecast(PLAIN), study.forecast(OFFLOADED)
    largest = find_largest(study, OFFLOADED, start=OFFLOADED.micro)
    torch = AMP_BYTES * plain.parameters
    rows = (
        Row(
            "data parallelism (stage 0), batch 1",
            "does not fit",
            fits(plain),
            detail(plain),
            f"{AMP}, {giga(torch)} GB; here it is fp32 masters and moments, fp16 weights and "
            f"gradients, 16 bytes, {giga(states(plain))} GB: either is too much",
        ),
        Row(
            "ZeRO-3, optimizer and parameters offloaded, batch 16",
            "fits",
            fits(offloaded),
            f"{detail(offloaded)}; {giga(offloaded.host_bytes)} GB of host memory",
            "with the state in host memory the device holds a layer and the activations; the "
            "Adam of the published run ran on the CPU, here it streams through the GPU",
        ),
        Row(
            "the same, largest batch",
            "16",
            str(largest.micro),
            largest_detail(largest),
            "whether more than 16 was tried is not said. Activations decide; beside them DeepSpeed "
            "keeps up to 10^9 gathered parameters (2 GB), its buckets and dropout's masks",
        ),
    )
    return Section(
        title="GPT-2 XL (1.5B) on one 24 GB GPU, blocks of 128",
        source=f"{BLOG}, table 3: fp16, AdamW, one Titan RTX.",
        ours="The same device, fp16, AdamW; no dropout, blocks in a scan, no remat.",
        rows=rows,
        figures={"plain": figures(plain), "offloaded": figures(offloaded)} | _figures(largest),
    )


def classifier(opened: Opener) -> Section:
    """The encoder of 900M parameters on two 24 GB GPUs, by data parallelism and by ZeRO-2."""
    study = opened(Setup(function=deberta_v2_xlarge, devices="titan-rtx:2", seq=128))
    plain, two = (
        find_largest(study, choice, start=published)
        for choice, published in zip((PLAIN, TWO), ENCODER_ROWS, strict=True)
    )
    room, parameters = plain.above.rates.room, plain.above.parameters
    torch, deepspeed = AMP_BYTES * parameters, ZERO2_BYTES * parameters
    rows = (
        Row(
            "data parallelism (stage 0), largest batch a GPU",
            str(ENCODER_ROWS[0]),
            str(plain.micro),
            largest_detail(plain),
            f"{AMP}, {giga(torch)} GB, here {giga(states(plain.above))}. What that leaves is "
            f"{(room - torch) / plain.row_bytes:.0f} of the rows here; its rows are padded "
            "to the longest of a batch only",
        ),
        Row(
            "ZeRO-2, largest batch a GPU",
            str(ENCODER_ROWS[1]),
            str(two.micro),
            largest_detail(two),
            f"DeepSpeed holds 2 + 14/2 bytes a parameter, {giga(deepspeed)} GB, and its buckets; "
            f"here it is {giga(states(two.above))} GB. That leaves the published batch at most "
            f"{(room - deepspeed) / ENCODER_ROWS[1] / 1e6:.0f} MB a row. Rows differ: there "
            "padded to the longest of a batch only and in fp16 throughout",
        ),
    )
    return Section(
        title="900M encoder (DeBERTa-v2 XLarge) on 2 x 24 GB, length 128",
        source=f"{BLOG}, table 1: fp16, Adam, 2 Titan RTX; batches of each GPU, as "
        "per_device_train_batch_size in its commands.",
        ours="The same devices, fp16, AdamW; dropout, blocks in a scan, no remat.",
        rows=rows,
        figures=_figures(plain, "plain") | _figures(two, "zero2"),
    )


def _figures(largest: Largest, name: str = "largest") -> dict[str, object]:
    return {
        name: {
            "micro": largest.micro,
            "row_bytes": largest.row_bytes,
            "compiled": largest.compiled,
            "fitting": figures(largest.fitting) if largest.fitting else None,
            "above": figures(largest.above),
        }
    }


def largest_detail(largest: Largest) -> str:
    """The peak by kind, and the memory of one row more."""
    text = "" if largest.fitting is None else f"{detail(largest.fitting)}; "
    return (
        f"{text}{largest.row_bytes / 1e6:.0f} MB a row; at {largest.micro + 1} it takes "
        f"{giga(largest.above.peak.bytes)}"
    )
