"""The tables of Llamas on more and more hosts: MaxText's on 8 to 128 GPUs, torchtitan's on two.

What grows with the hosts is what crosses the network between them, so these curves are a test of
the links in a forecast; their level is one of the roofline's shares.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.published_steps import fused_llama
from benchmarks.published_tables import GIGA, Opener, Row, Section, Setup, figures
from zerojax.devices.rates import rates
from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Forecast
from zerojax.models import llama

HOST = 8
TERA = 1e12
# GPUs and TFLOP/s of each.
MAXTEXT = {8: 492, 16: 422, 32: 407, 64: 409, 128: 375}
MORE = {
    16: ". The published network is TCP (GPUDirect-TCPX), of which the roofline expects 80% of the "
    "cards' peak; its scripts pipeline all-reduces and combine them up to 67 MB",
    64: ". The published scripts combine all-reduces up to 1 GB from here on and pipeline them; "
    "here XLA's defaults leave most of them behind the backward pass",
    128: ". Every step waits for the slowest of 16 hosts, which no roofline knows",
}
LLAMA_2 = llama.SIZES["llama-7b"]
LLAMA_3 = llama.SIZES["llama3-8b"]
LLAMA_3_70B = llama.SIZES["llama-70b"] | {"vocab_size": 128256, "block_size": 8192}
POWER = (500 / 700) ** (1 / 3)
"""The clock, of that at 700 W, of an H100 with 500 W."""
GRAND_TETON = {
    "bandwidth": 2.4e12,
    "memory": 96 * 2**30,
    "matrix": {kind: peak * POWER for kind, peak in rates("h100").matrix.items()},
}
EIGHT = "8B, 8 H100s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A published rate.

    Attributes:
      setup: The model and the devices.
      rows: Rows of a device.
      published: Tokens/s of a device.
      also: Further figures, as text.
    """

    setup: Setup
    rows: int
    published: int
    also: str = ""


def _torchtitan(sizes: Mapping[str, Any], devices: str, **more: Any) -> Setup:
    function = fused_llama(sizes, keep=more.pop("keep", "selective"))
    return Setup(function=function, devices=devices, seq=8192, precision="bf16", remat=True, **more)


TORCHTITAN = {
    # The 96 GB of the published GPUs are nearer to an H200's.
    EIGHT: Published(
        setup=_torchtitan(LLAMA_3, "h200:8", rates=GRAND_TETON),
        rows=2,
        published=6667,
        also="; 5,762 without torch.compile",
    ),
    "8B, 128 H100s": Published(
        setup=_torchtitan(LLAMA_3, "h200:128", rates=GRAND_TETON),
        rows=2,
        published=6514,
        also="; 5,605 without torch.compile",
    ),
    "8B, 64 A100s": Published(setup=_torchtitan(LLAMA_3, "a100:64"), rows=1, published=2973),
    "70B, 64 A100s": Published(
        setup=_torchtitan(LLAMA_3_70B, "a100:64", keep="nothing"),
        rows=1,
        published=331,
    ),
}


def maxtext(opened: Opener) -> Section:
    """Llama 2 7B on 1 to 16 hosts of Google's A3, a replica group each."""
    forecasts = {}
    for devices in MAXTEXT:
        opened_study = opened(_maxtext(devices))
        forecasts[devices] = opened_study.forecast(Choice(stage=3, micro=4, remat=True))
    rows = tuple(
        Row(
            f"{devices} GPUs",
            str(published),
            f"{_teraflops(forecasts[devices]):.0f}",
            _detail(forecasts[devices]),
            _maxtext_why(devices, forecasts),
        )
        for devices, published in MAXTEXT.items()
    )
    return Section(
        title="MaxText's Llama 2 7B on 8 to 128 H100s, TFLOP/s of each",
        source="https://github.com/AI-Hypercomputer/maxtext, MaxText/configs/a3/llama_2_7b: "
        "README.md and the scripts beside it. Google A3 (h100-80gb-8); FSDP over a host's 8 GPUs, "
        "data parallelism over hosts; 4 rows of 4096 tokens a GPU, cuDNN's attention, remat policy "
        "minimal_flash, layers unrolled.",
        ours="Stage 3 inside a host, a replica group each; 12.5 GB/s a GPU between hosts "
        "(a3-high: 4 cards of 200 Gb/s for 8 GPUs); the same rows, attention and kept arrays, "
        "layers in a scan, XLA's default flags. TFLOP/s as MaxText counted them: 3 times the "
        "forward pass's products, scores behind the mask included.",
        rows=rows,
        figures=_figures(forecasts),
    )


def _maxtext(devices: int) -> Setup:
    return Setup(
        function=fused_llama(LLAMA_2),
        devices=f"h100:{devices}",
        seq=4096,
        precision="bf16",
        remat=True,
        replicas=devices // HOST,
        network="a3-high",
    )


def _maxtext_why(devices: int, forecasts: Mapping[int, Forecast]) -> str:
    forecast, one = forecasts[devices], forecasts[HOST]
    if devices == HOST:
        shares, slower = forecast.rates.reached.shares, MAXTEXT[HOST] / _teraflops(forecast)
        return (
            f"collectives stay inside the host and {_waited(forecast) * 1e3:.0f} ms of them are "
            "waited for, so that the difference is not of links: it is as if products reached "
            f"{shares['matrix'] * slower:.0%} of their peak, not {shares['matrix']:.0%}"
        )
    of_one = MAXTEXT[devices] / MAXTEXT[HOST], _teraflops(forecast) / _teraflops(one)
    reduced = next(each for each in forecast.traffic if each.kind == "all-reduce")
    text = (
        f"of the rate on {HOST}: published {of_one[0]:.0%}, computed {of_one[1]:.0%}. Of the "
        f"all-reduce between hosts {reduced.waited * 1e3:.0f} of {reduced.seconds * 1e3:.0f} ms "
        "are waited for"
    )
    return text + MORE.get(devices, "")


def torchtitan(opened: Opener) -> Section:
    """Llamas by FSDP, their state cut over 8 to 128 GPUs."""
    forecasts = {
        name: opened(case.setup).forecast(Choice(stage=3, micro=case.rows, remat=True))
        for name, case in TORCHTITAN.items()
    }
    rows = tuple(
        Row(
            name,
            f"{case.published:,}{case.also}",
            f"{_tokens(forecasts[name]):,.0f}",
            _detail(forecasts[name]),
            f"{_tokens(forecasts[name]) / case.published:.2f} of the published rate"
            + _torchtitan_why(name, forecasts),
        )
        for name, case in TORCHTITAN.items()
    )
    return Section(
        title="torchtitan's Llama 3 on 8 to 128 GPUs, tokens/s of each",
        source="https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md "
        "and, for A100s, docs/performance.md of 2024: FSDP, rows of 8192 tokens, 2 of them on an "
        "H100, 1 on an A100, bf16; selective activation checkpointing, full for 70B. Hosts of 8 "
        "H100s with 400 Gb/s a GPU between them; H100s of 96 GB and 2.4 TB/s at 500 W of 700.",
        ours="Stage 3 over all GPUs; the same rows; for H100s 2.4 TB/s, 96 GiB, 400 Gb/s, and a "
        "matrix peak lower by the cube root of 500 W / 700 W, as power grows with the clock and "
        "the square of a voltage that grows with it; cuDNN's attention; blocks keep the results of "
        "attention and of every second product, for 70B only their input; layers in a scan. On one "
        "H200, FSDP2 with compiled blocks took 1.10 of zerojax's time for a Llama 8B of 8 layers "
        "(records/2026-11-27-gpu_day.md): torch's share of what is left.",
        rows=rows,
        figures=_figures(forecasts),
    )


def _torchtitan_why(name: str, forecasts: Mapping[str, Forecast]) -> str:
    waited = f"; {_waited(forecasts[name]) * 1e3:.0f} ms of the collectives are waited for"
    if "H100" not in name:
        return waited
    if name == EIGHT:
        return waited + (
            "; without torch.compile norms, rotations and activations are kernels of their own"
        )
    share = TORCHTITAN[name].published / TORCHTITAN[EIGHT].published
    return (
        f"{waited}; of the rate on {HOST}: published {share:.1%}, computed "
        f"{_tokens(forecasts[name]) / _tokens(forecasts[EIGHT]):.1%}; what the slowest of 128 GPUs "
        "costs no roofline knows"
    )


def _teraflops(forecast: Forecast) -> float:
    return forecast.mfu * forecast.rates.peak / TERA


def _tokens(forecast: Forecast) -> float:
    return forecast.tokens_per_second / forecast.devices


def _waited(forecast: Forecast) -> float:
    return sum(each.waited for each in forecast.traffic)


def _detail(forecast: Forecast) -> str:
    between = sum(each.between_nodes for each in forecast.traffic)
    inside = sum(each.bytes for each in forecast.traffic) - between
    return (
        f"{forecast.seconds:.2f} s a step, {_waited(forecast) * 1e3:.0f} ms of them waiting; sends "
        f"{inside / GIGA:.1f} GB inside its node, {between / GIGA:.1f} GB to others; "
        f"{forecast.peak.bytes / GIGA:.0f} GB"
    )


def _figures(forecasts: Mapping[Any, Forecast]) -> dict[str, object]:
    return {
        str(devices): figures(each)
        | {
            "seconds": each.seconds,
            "network": each.rates.links.between,
            "traffic": [dataclasses.asdict(kind) for kind in each.traffic],
        }
        for devices, each in forecasts.items()
    }
