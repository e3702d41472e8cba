"""Llamas of 7B, 8B and 70B with fused attention: forecasts beside published steps on H100s."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping

from benchmarks.published_steps import Keep, fused_llama
from benchmarks.published_tables import GIGA, Opener, Row, Section, Setup, figures
from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Forecast
from zerojax.models import llama

WAYS = {"plain": "written out", "mosaic_gpu": "tokamax's kernel", "cudnn": "cuDNN's, assumed"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A published step.

    Attributes:
      title: The step's name in the table.
      sizes: Keywords of a `LlamaConfig`.
      devices, seq, micro: GPUs, tokens in a row, rows a GPU.
      tokens: Published tokens/s of a GPU, by who published it.
      keep: What blocks keep, see `fused_llama`.
      beat: What would have to change for a faster step.
      ways: The implementations that are compiled.
    """

    title: str
    sizes: Mapping[str, int | float]
    devices: int
    seq: int
    micro: int
    tokens: Mapping[str, float]
    keep: Keep
    beat: str
    ways: tuple[str, ...] = ("plain", "mosaic_gpu", "cudnn")


CASES = (
    Case(
        "Llama 2 7B, 8 GPUs, 2 x 4096",
        llama.SIZES["llama-7b"],
        8,
        4096,
        2,
        {"MaxText (JAX-Toolbox), 0.72 s a step": 22.2 * 4096 / 8},
        "products",
        "what is waited for is a fifteenth of the step at the most, so that beyond hiding it only "
        "faster products and attention help",
    ),
    Case(
        "Llama 3 8B, 8 GPUs, 1 x 8192",
        llama.SIZES["llama3-8b"],
        8,
        8192,
        1,
        {"torchtitan, bf16, compiled": 6667, "Megatron-Bridge, FP8": 14451},
        "products",
        "14,451 needs more of the bf16 peak than products are assumed to reach: products in FP8, "
        "of twice the peak, would have to come first (zerojax has none); then two rows a GPU, with "
        "the loss over 128256 words in tiles to make room for them",
    ),
    Case(
        "Llama 2 70B, 64 GPUs, 2 x 4096",
        llama.SIZES["llama-70b"],
        64,
        4096,
        2,
        {"MaxText (NGC, DGXC Benchmarking), 7.908 s a step": 1035.97},
        "attention",
        "each layer gathers 1.7 GB in each pass, and 6% of the step wait for collectives; larger "
        "micro-batches, or a secondary shard inside the node (hpZ), hide more",
    ),
    Case(
        "Llama 3 70B, 128 GPUs, 2 x 8192",
        llama.SIZES["llama-70b"] | {"vocab_size": 128256, "block_size": 8192},
        128,
        8192,
        2,
        {"MaxText (NGC, DGXC Benchmarking), 15.57 s a step": 1052.266},
        "attention",
        "twice the tokens of a row hide the gathers that 4096 left",
        ways=("cudnn",),
    ),
)


def attention(opened: Opener) -> Section:
    """Each case with each implementation that this machine can compile."""
    rows, by_case = [], {}
    tokamax = importlib.util.find_spec("tokamax") is not None
    for case in CASES:
        for way in case.ways:
            if way == "mosaic_gpu" and not tokamax:
                continue
            forecast = _forecast(opened, case, way)
            rows.append(_row(case, way, forecast))
            by_case[f"{case.title}, {way}"] = figures(forecast) | {"seconds": forecast.seconds}
    return Section(
        title="Llama 7B, 8B and 70B with fused attention on H100s, tokens/s of each",
        source="7B: https://github.com/NVIDIA/JAX-Toolbox, MaxText (22.2 sequences/s). 8B: "
        "https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (2 "
        "rows a GPU, GPUs of 96 GB at 500 W), and Megatron-Bridge's performance summary (FP8, "
        "FSDP, 128 rows an update). 70B: NGC, MaxText Llama2 70B 25.01.1, FSDP over 64 GPUs, "
        "and MaxText Llama3 70B 25.02, FSDP over 128.",
        ours="Stage 3, bf16, AdamW, layers in a scan. Blocks of 7B and 8B keep the results of "
        "attention and of products with weights, those of 70B only those of attention. The rates "
        "are those of the instructions of two steps on an H200 (records/2026-11-27-gpu_day.md), "
        "those of cuDNN's attention for tokamax's as well, whose backward kernels compute the "
        "scores twice (7 products), cuDNN's once (5). "
        + ("" if tokamax else "tokamax is not installed here, so that its rows are missing."),
        rows=tuple(rows),
        figures=by_case,
    )


def _forecast(opened: Opener, case: Case, way: str) -> Forecast:
    setup = Setup(
        function=fused_llama(case.sizes, way, keep=case.keep),
        devices=f"h100:{case.devices}",
        seq=case.seq,
        precision="bf16",
        remat=True,
    )
    return opened(setup).forecast(Choice(stage=3, micro=case.micro, remat=True))


def _row(case: Case, way: str, forecast: Forecast) -> Row:
    own = forecast.tokens_per_second / forecast.devices
    waited = sum(each.waited for each in forecast.traffic)
    published = "; ".join(f"{tokens:,.0f} ({who})" for who, tokens in case.tokens.items())
    ratios = " and ".join(f"{tokens / own:.2f}" for tokens in case.tokens.values())
    needed = " and ".join(f"{forecast.mfu * tokens / own:.0%}" for tokens in case.tokens.values())
    room = "" if forecast.fits else ", does not fit"
    why = f"published over computed {ratios}, an MFU of {needed} of the bf16 peak; {case.beat}"
    return Row(
        f"{case.title}: attention {WAYS[way]}",
        published,
        f"{own:,.0f}",
        f"{forecast.seconds:.2f} s a step, {waited * 1e3:.0f} ms of them waiting; MFU "
        f"{forecast.mfu:.0%}; {forecast.peak.bytes / GIGA:.0f} GB{room}",
        why,
    )
