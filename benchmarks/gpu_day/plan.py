"""Every measurement of ``gpu_day``, those first that are worth most for their minutes."""

from typing import Any

from benchmarks import prediction
from benchmarks.gpu_day import models, offload
from benchmarks.gpu_day.measurement import Measurement, by_value
from benchmarks.kernels import CALLS
from zerojax.models.gpt import SIZES

MODULES = ("smoke", "forecasts", "training", "kernels", "offload", "xla_options", "torch_peers")
"""Modules that a worker imports in advance; functions that need torch import it."""

_SMALL: dict[str, Any] = {"family": "gpt", **SIZES["mini"], "block_size": 256}
_FIRST_CASES = (0, 4, 8, 11)
"""Positions in ``prediction.CASES``: small, medium, GPT-2 XL, and both offloads."""
KERNELS = tuple(dict.fromkeys(call.kernel for call in CALLS))
PLAIN = {
    "GPT-2 XL, stage 3": "GPT-2 XL, plain jit",
    "GPT-2 XL, stage 1": "GPT-2 XL, plain jit",
    "GPT-2 XL, Mosaic kernels": "GPT-2 XL, plain jit",
    "GPT-2 XL, torch FSDP2": "GPT-2 XL, plain jit",
    "GPT-2 XL, DeepSpeed": "GPT-2 XL, plain jit",
    "GPT-2 XL, optimizer on the host": "GPT-2 XL, plain jit",
    "GPT-2 XL, both on the host": "GPT-2 XL, plain jit",
    "Llama 8B of 8 layers, stage 3": "Llama 8B of 8 layers, plain jit",
    "Llama 8B of 8 layers, torch FSDP2": "Llama 8B of 8 layers, plain jit",
}
"""The step that another is compared with, by name."""


def measurements(toy: bool = False) -> list[Measurement]:
    """All measurements in the order in which they run; with ``toy`` at sizes for a CPU."""
    chosen = [*_smoke(toy), *_forecasts(toy), *_training(toy), *_kernels(toy), *_offload(toy)]
    return by_value([*chosen, *_xla(toy)])


def _smoke(toy: bool) -> list[Measurement]:
    small: dict[str, Any] = {"size": _SMALL, "rows": 8, "seq": 256}
    if toy:
        small = {"size": models.TOY_GPT, "rows": 2, "seq": 16}
    checked: dict[str, Any] = {"largest": 128, "only": ["rms_norm"]} if toy else {}
    only: dict[str, Any] = {"only": ["fp16, stage 2"]} if toy else {}
    chosen = [
        Measurement(name="report", part=1, tier=1, function="smoke:report", seconds=25),
        Measurement(
            name="losses beside plain jit", part=1, tier=1, function="smoke:losses", seconds=75,
            arguments=small | only,
        ),
        Measurement(
            name="checkpoints", part=1, tier=1, function="smoke:checkpoints", seconds=30,
            arguments=small,
        ),
        Measurement(
            name="kernels beside their references", part=1, tier=1, function="smoke:kernels",
            seconds=90, arguments=checked,
        ),
    ]  # fmt: skip
    tests = Measurement(
        name="tests/kernels", part=1, tier=3, function="smoke:kernel_tests", seconds=240,
        arguments={"seconds": 230},
    )  # fmt: skip
    return chosen if toy else [*chosen, tests]


def _forecasts(toy: bool) -> list[Measurement]:
    rates = Measurement(
        name="rates of the device", part=2, tier=1, function="forecasts:device_rates", seconds=30,
        arguments={"scale": 64} if toy else {},
    )  # fmt: skip
    cases: list[int | None] = [None] if toy else [*range(len(prediction.CASES))]
    steps = [
        Measurement(
            name=prediction.CASES[case].name if case is not None else "toy step",
            part=2,
            tier=1 if case is None or case in _FIRST_CASES else 2,
            function="forecasts:step",
            seconds=25 if case is None or "xl" not in prediction.CASES[case].model else 35,
            arguments={"case": case},
        )
        for case in cases
    ]
    return [rates, *steps]


def _training(toy: bool) -> list[Measurement]:
    xl: dict[str, Any] = {"size": models.GPT2_XL, "rows": 16, "seq": 1024}
    llama: dict[str, Any] = {"size": models.LLAMA_8B, "rows": 1, "seq": 8192}
    if toy:
        xl = {"size": models.TOY_GPT, "rows": 2, "seq": 16, "steps": 2}
        llama = {"size": models.TOY_LLAMA, "rows": 2, "seq": 16, "steps": 2}

    def step(
        name: str, tier: int, function: str, given: dict[str, Any], seconds: float = 40, **more: Any
    ) -> Measurement:
        return Measurement(
            name=name, part=3, tier=tier, function=function, seconds=seconds,
            arguments={**given, **more},
        )  # fmt: skip

    short, deep = "GPT-2 XL", "Llama 8B of 8 layers"
    own = "training:decorated"
    torch: dict[str, Any] = {"compiled": False} if toy else {}
    mosaic = [] if toy else [step(f"{short}, Mosaic kernels", 2, own, xl, layers=models.MOSAIC)]
    return [
        step(f"{short}, stage 3", 1, own, xl),
        step(f"{short}, plain jit", 1, "training:plain", xl),
        step(f"{deep}, stage 3", 1, own, llama),
        step(f"{deep}, plain jit", 1, "training:plain", llama),
        *mosaic,
        step(f"{short}, stage 1", 2, own, xl, stage=1),
        step(f"{short}, torch FSDP2", 2, "torch_peers:fsdp", xl, 90, **torch),
        step(f"{deep}, torch FSDP2", 2, "torch_peers:fsdp", llama, 75, **torch),
        step(f"{short}, DeepSpeed", 3, "torch_peers:deepspeed", xl, 75),
        step(f"{short}, unrolled", 3, own, xl, 120, scan=False),
        step("decorator", 2, "training:decorator", {"calls": 3 if toy else 60}, 30),
        step("checkpoint of 2 GB", 3, "training:saving", {"gigabytes": 0.001 if toy else 2.0}, 40),
        step(
            "precisions", 3, "training:precisions",
            {"steps": 5, "model": "tiny"} if toy else {"steps": 300, "model": "mini"}, 60,
        ),
    ]  # fmt: skip


def _kernels(toy: bool) -> list[Measurement]:
    wanted = ("rms_norm",) if toy else KERNELS
    first = ("layer_norm", "softmax_cross_entropy", "fused_adamw")
    return [
        Measurement(
            name=f"kernel {kernel}",
            part=4,
            tier=1 if toy or kernel in first else 2,
            function="kernels:timed",
            seconds=45 if kernel == "softmax_cross_entropy" else 30,
            arguments={"kernel": kernel} | ({"largest": 64} if toy else {}),
        )
        for kernel in wanted
    ]


def _offload(toy: bool) -> list[Measurement]:
    streamed: dict[str, Any] = {"size": models.GPT2_XL, "tokens": 128}
    xl: dict[str, Any] = {"size": models.GPT2_XL, "rows": 16, "seq": 1024, "steps": 4}
    if toy:
        streamed = {"size": models.TOY_GPT, "tokens": 16, "steps": 2, "nbytes": 2**16}
        xl = {"size": models.TOY_GPT, "rows": 2, "seq": 16, "steps": 2}
    large: dict[str, Any] = {"part": 5, "function": "training:decorated", "seconds": 60}
    return [
        Measurement(
            name="update from the host", part=5, tier=1, function="offload:streamed", seconds=50,
            arguments=streamed,
        ),
        Measurement(
            name="GPT-2 XL, both on the host", tier=1, **large,
            arguments=xl | {"stage": 3, "offload": offload.BOTH},
        ),
        Measurement(
            name="GPT-2 XL, optimizer on the host", tier=2, **large,
            arguments=xl | {"stage": 2, "offload": offload.OPTIMIZER},
        ),
    ]  # fmt: skip


def _xla(toy: bool) -> list[Measurement]:
    wanted: dict[str, Any] = {"model": "gpt2_xl", "rows": 8, "seq": 1024, "seconds": 270}
    if toy:
        wanted = {"model": "mini", "rows": 2, "seq": 16, "seconds": 60, "kind": "h100"}
    return [
        Measurement(
            name="fit --xla, GPT-2 XL", part=6, tier=3, function="xla_options:fitted", seconds=300,
            arguments=wanted,
        )
    ]  # fmt: skip
