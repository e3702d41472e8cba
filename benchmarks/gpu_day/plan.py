"""Every measurement of ``gpu_day``, those first that are worth most for their minutes."""

from typing import Any

from benchmarks import prediction
from benchmarks.gpu_day import models, offload, smoke
from benchmarks.gpu_day.measurement import Measurement, by_value
from benchmarks.kernels import CALLS
from zerojax.models.gpt import SIZES

MODULES = (
    "smoke",
    "forecasts",
    "calibration",
    "generation",
    "training",
    "kernels",
    "offload",
    "copies",
    "torch_peers",
)
"""Modules that a worker imports in advance; functions that need torch import it."""

_SMALL: dict[str, Any] = {"family": "gpt", **SIZES["mini"], "block_size": 256}
_FIRST_CASES = (0, 4, 8, 11)
"""Positions in ``prediction.CASES``: small, medium, GPT-2 XL, and both offloads."""
KERNELS = tuple(dict.fromkeys(call.kernel for call in CALLS))
FIRST_KERNELS = ("layer_norm", "softmax_cross_entropy")
PLAIN = "plain jit"
"""The way of training with which the others of the same model are compared."""


def measurements(toy: bool = False) -> list[Measurement]:
    """All measurements in the order in which they run; with ``toy`` at sizes for a CPU."""
    chosen = [*_smoke(toy), *_forecasts(toy), *_training(toy), *_kernels(toy), *_offload(toy)]
    return by_value(chosen)


def _smoke(toy: bool) -> list[Measurement]:
    small: dict[str, Any] = {"size": _SMALL, "rows": 8, "seq": 256}
    if toy:
        small = {"size": models.TOY_GPT, "rows": 2, "seq": 16}
    checked: dict[str, Any] = {"largest": 128} if toy else {}
    halves = [("rms_norm",)] if toy else [KERNELS[::2], KERNELS[1::2]]

    def check(name: str, function: str, expected: float, **arguments: Any) -> Measurement:
        return Measurement(
            name=name, part=1, tier=1, function=f"smoke:{function}", seconds=expected,
            arguments=arguments, together=True,
        )  # fmt: skip

    names = ["fp16, stage 2"] if toy else [*smoke.configs("")]
    chosen = [
        check("report", "report", 40),
        *(
            check(f"losses beside plain jit, {at + 1}", "losses", 90, **small, only=names[at::3])
            for at in range(min(3, len(names)))
        ),
        check("checkpoints", "checkpoints", 90, **small),
        *(
            check(f"kernels beside their references, {at + 1}", "kernels", 90, **checked, only=half)
            for at, half in enumerate(halves)
        ),
    ]
    tests = Measurement(
        name="tests/kernels", part=1, tier=3, function="smoke:kernel_tests", seconds=120,
        arguments={"seconds": 110},
    )  # fmt: skip
    padded: dict[str, Any] = {"rows": 2, "tokens": 16} if toy else {"rows": 8, "tokens": 1024}
    masks = Measurement(
        name="padded rows", part=1, tier=2, function="smoke:masks", seconds=40, arguments=padded
    )
    return [*chosen, masks] if toy else [*chosen, masks, tests]


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
    return [rates, *steps, *_calibration(toy)]


def _calibration(toy: bool) -> list[Measurement]:
    small = [[8, 8, 8]]
    rows = {8192: [[4096, 6144], [4096, 14336], [4096, 128256], [8192, 28672], [1600, 6400]]}
    rows[2048] = [[4096, 14336], [8192, 28672]]
    shapes = small if toy else [[m, *shape] for m in rows for shape in rows[m]]
    heads = [[1, 8, 2, 2, 8]] if toy else [[1, 8192, 32, 8, 128], [4, 2048, 64, 8, 128]]
    llama: dict[str, Any] = {"size": models.LLAMA_8B, "rows": 1, "seq": 8192}
    xl: dict[str, Any] = {"size": models.GPT2_XL, "rows": 16, "seq": 1024}
    if toy:
        llama = xl = {"size": models.TOY_LLAMA, "rows": 2, "seq": 16}

    generated: dict[str, Any] = {"size": models.LLAMA_8B, "rows": 1, "prompt": 128, "new": 128}
    if toy:
        generated = {"size": models.TOY_LLAMA, "rows": 1, "prompt": 4, "new": 4}

    def calibration(name: str, function: str, seconds: float, **given: Any) -> Measurement:
        return Measurement(
            name=name, part=2, tier=1, function=f"calibration:{function}", seconds=seconds,
            arguments=given,
        )  # fmt: skip

    return [
        calibration(
            "products by shape", "products", 50, shapes=shapes, sustained=0.1 if toy else 3
        ),
        calibration("attention by shape", "attention", 30, shapes=heads),
        calibration("Llama 8B of 8 layers, instructions", "instructions", 45, **llama),
        calibration("GPT-2 XL, instructions", "instructions", 45, **xl),
        Measurement(
            name="Llama 8B of 8 layers, generated tokens", part=2, tier=1,
            function="generation:tokens", seconds=90, arguments=generated,
        ),
    ]  # fmt: skip


def _training(toy: bool) -> list[Measurement]:
    xl: dict[str, Any] = {"size": models.GPT2_XL, "rows": 16, "seq": 1024}
    llama: dict[str, Any] = {"size": models.LLAMA_8B, "rows": 1, "seq": 8192}
    if toy:
        xl = {"size": models.TOY_GPT, "rows": 2, "seq": 16, "steps": 2}
        llama = {"size": models.TOY_LLAMA, "rows": 2, "seq": 16, "steps": 2}

    def step(
        name: str, tier: int, function: str, given: dict[str, Any], seconds: float, **more: Any
    ) -> Measurement:
        return Measurement(
            name=name, part=3, tier=tier, function=function, seconds=seconds,
            arguments={**given, **more},
        )  # fmt: skip

    short, deep, beside = "GPT-2 XL", "Llama 8B of 8 layers", "training:beside"
    pair: dict[str, Any] = {"stage 3": {"stage": 3}, PLAIN: {}}
    others: dict[str, Any] = {"stage 1": {"stage": 1}}
    if not toy:
        others["Mosaic kernels"] = {"stage": 3, "layers": models.MOSAIC}
    muon: dict[str, Any] = {"AdamW": {"stage": 3}, "Muon": {"stage": 3, "optimizer": "muon"}}
    unrolled: dict[str, Any] = {"unrolled": {"stage": 3, "scan": False}}
    torch: dict[str, Any] = {"compiled": False} if toy else {}
    return [
        step(short, 1, beside, xl, 70, ways=pair),
        step(deep, 1, beside, llama, 70, ways=pair),
        step(f"{short}, other ways", 2, beside, xl, 60, ways=others, turns=1),
        step(f"{short}, Muon", 2, beside, xl, 90, ways=muon),
        step(f"{short}, torch FSDP2", 2, "torch_peers:fsdp", xl, 90, **torch),
        step(f"{deep}, torch FSDP2", 2, "torch_peers:fsdp", llama, 75, **torch),
        step(f"{short}, DeepSpeed", 3, "torch_peers:deepspeed", xl, 75),
        step(f"{short}, layers not scanned", 3, beside, xl, 120, ways=unrolled, turns=1),
        step("decorator", 2, "training:decorator", {"calls": 3 if toy else 60}, 30),
        step("checkpoint of 2 GB", 3, "training:saving", {"gigabytes": 0.001 if toy else 2.0}, 40),
        step(
            "precisions", 3, "training:precisions",
            {"steps": 5, "model": "tiny"} if toy else {"steps": 300, "model": "mini"}, 60,
        ),
    ]  # fmt: skip


def _kernels(toy: bool) -> list[Measurement]:
    others = [name for name in KERNELS if name not in FIRST_KERNELS]
    groups = [["rms_norm"]] if toy else [[*FIRST_KERNELS], others]
    return [
        Measurement(
            name=f"kernels, {at + 1}", part=4, tier=at + 1, function="kernels:timed", seconds=90,
            arguments={"kernels": group} | ({"largest": 64} if toy else {}),
        )
        for at, group in enumerate(groups)
    ]  # fmt: skip


def _offload(toy: bool) -> list[Measurement]:
    streamed: dict[str, Any] = {"size": models.GPT2_XL, "tokens": 128}
    xl: dict[str, Any] = {"size": models.GPT2_XL, "rows": 16, "seq": 1024, "steps": 3}
    if toy:
        streamed = {"size": models.TOY_GPT, "tokens": 16, "steps": 2, "nbytes": 2**16}
        xl = {"size": models.TOY_GPT, "rows": 2, "seq": 16, "steps": 2}
    ways = {
        "both on the host": {"stage": 3, "offload": offload.BOTH},
        "optimizer on the host": {"stage": 2, "offload": offload.OPTIMIZER},
    }
    sizes = dict(rows=2560, width=6400, turns=30, size=8192)
    if toy:
        sizes = dict(rows=4, width=8, turns=3, size=8)
    return [
        Measurement(
            name="copies beside each other", part=5, tier=1, function="copies:beside", seconds=40,
            arguments=sizes,
        ),
        Measurement(
            name="update from the host", part=5, tier=1, function="offload:streamed", seconds=50,
            arguments=streamed,
        ),
        *(
            Measurement(
                name=f"GPT-2 XL, {name}", part=5, tier=tier, function="training:beside",
                seconds=60, arguments=xl | {"turns": 1, "ways": {name: way}},
            )
            for tier, (name, way) in enumerate(ways.items(), 1)
        ),
    ]  # fmt: skip
