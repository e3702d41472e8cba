"""The tables of Llamas on more and more hosts: MaxText's on 8 to 128 GPUs, torchtitan's on two.

What grows with the hosts is what crosses the network between them, so these curves are a test of
the links in a forecast; their level is one of the roofline's shares.
"""

import dataclasses
from collections.abc import Mapping

from benchmarks.published_steps import fused_llama
from benchmarks.published_tables import GIGA, Opener, Row, Section, Setup, figures
from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Forecast
from zerojax.models import llama

HOST = 8
TERA = 1e12
# GPUs and TFLOP/s of each.
MAXTEXT = {8: 492, 16: 422, 32: 407, 64: 409, 128: 375}
# GPUs, and tokens/s of each without and with torch.compile.
TORCHTITAN = {8: (5762, 6667), 128: (5605, 6514)}
MORE = {
    16: ". The published network is TCP (GPUDirect-TCPX), of which the roofline expects 80% of the "
    "cards' peak; its scripts pipeline all-reduces and combine them up to 67 MB",
    64: ". The published scripts combine all-reduces up to 1 GB from here on and pipeline them; "
    "here XLA's defaults leave most of them behind the backward pass",
    128: ". Every step waits for the slowest of 16 hosts, which no roofline knows",
}
LLAMA_2 = llama.SIZES["llama-7b"]
LLAMA_3 = llama.SIZES["llama3-8b"]
GRAND_TETON = {"bandwidth": 2.4e12, "memory": 96 * 2**30}
NVL = 835e12
"""Dense bf16 of an H100 NVL: the published GPUs' peak is between the NVL's and the SXM's."""


def maxtext(opened: Opener) -> Section:
    """Llama 2 7B on 1 to 16 hosts of Google's A3, a replica group each."""
    forecasts = {}
    for devices in MAXTEXT:
        setup = Setup(
            function=fused_llama(LLAMA_2),
            devices=f"h100:{devices}",
            seq=4096,
            precision="bf16",
            remat=True,
            replicas=devices // HOST,
            network="a3-high",
        )
        forecasts[devices] = opened(setup).forecast(Choice(stage=3, micro=4, remat=True))
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


def _maxtext_why(devices: int, forecasts: Mapping[int, Forecast]) -> str:
    forecast, one = forecasts[devices], forecasts[HOST]
    if devices == HOST:
        share, slower = forecast.rates.matrix_share, MAXTEXT[HOST] / _teraflops(forecast)
        return (
            f"collectives stay inside the host and {_waited(forecast) * 1e3:.0f} ms of them are "
            "waited for, so that the difference is not of links: it is as if products reached "
            f"{share * slower:.0%} of their peak, for which the roofline has {share:.0%}"
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
    """Llama 3.1 8B, its state cut over 8 and over 128 GPUs."""
    forecasts, slower = {}, {}
    for devices in TORCHTITAN:
        setup = Setup(
            function=fused_llama(LLAMA_3),
            # The 96 GB of the published GPUs are nearer to an H200's; the figures are set below.
            devices=f"h200:{devices}",
            seq=8192,
            precision="bf16",
            remat=True,
            rates=GRAND_TETON,
        )
        choice = Choice(stage=3, micro=2, remat=True)
        forecasts[devices] = opened(setup).forecast(choice)
        matrix = dict.fromkeys(("bf16", "f32"), NVL)
        nvl = dataclasses.replace(setup, rates={**GRAND_TETON, "matrix": matrix})
        slower[devices] = opened(nvl).forecast(choice)
    rows = tuple(
        Row(
            f"{devices} GPUs",
            f"{eager:,}; {compiled:,} with torch.compile",
            f"{_tokens(forecasts[devices]):,.0f}; {_tokens(slower[devices]):,.0f} at an H100 "
            "NVL's matrix peak",
            _detail(forecasts[devices]),
            _torchtitan_why(devices, forecasts),
        )
        for devices, (eager, compiled) in TORCHTITAN.items()
    )
    return Section(
        title="torchtitan's Llama 3.1 8B on 8 and 128 H100s, tokens/s of each",
        source="https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
        ": FSDP, 2 rows of 8192 tokens a GPU, selective activation checkpointing, bf16. Hosts of 8 "
        "with 400 Gb/s a GPU between them; H100s of 96 GB and 2.4 TB/s at 500 W, whose matrix peak "
        'is "between SXM and NVL".',
        ours="Stage 3 over all GPUs; the same rows, 2.4 TB/s and 96 GiB, 400 Gb/s; cuDNN's "
        "attention; blocks keep what attention and the products with weights make; layers in a "
        "scan.",
        rows=rows,
        figures=_figures(forecasts) | {f"{n} nvl": each for n, each in _figures(slower).items()},
    )


def _torchtitan_why(devices: int, forecasts: Mapping[int, Forecast]) -> str:
    forecast = forecasts[devices]
    waited = f"{_waited(forecast) * 1e3:.0f} ms"
    if devices == HOST:
        return (
            f"{waited} of the collectives are waited for, so that the difference is not of links: "
            "the GPUs ran at 500 W of 700; selective checkpointing computes every second product "
            "again, here all are kept; without torch.compile norms, rotations and activations are "
            "kernels of their own"
        )
    shares = (now / one for now, one in zip(TORCHTITAN[devices], TORCHTITAN[HOST], strict=True))
    published = " and ".join(f"{share:.1%}" for share in shares)
    return (
        f"of the rate on {HOST}: published {published}, computed "
        f"{_tokens(forecast) / _tokens(forecasts[HOST]):.1%}. At 50 GB/s a GPU {waited} are waited "
        "for, and the update of a sixteenth of the state takes as much less; what the slowest of "
        "128 GPUs costs no roofline knows"
    )


def _teraflops(forecast: Forecast) -> float:
    return forecast.mfu * max(forecast.rates.matrix.values()) / TERA


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


def _figures(forecasts: dict[int, Forecast]) -> dict[str, object]:
    return {
        str(devices): figures(each)
        | {
            "seconds": each.seconds,
            "network": each.rates.network,
            "traffic": [dataclasses.asdict(kind) for kind in each.traffic],
        }
        for devices, each in forecasts.items()
    }
