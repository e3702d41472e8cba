"""Traffic of quantized collectives inside hosts and between them, by dtype; no GPU.

    python -m benchmarks.quantized_traffic                              # Llama 7B on 64 H100s
    python -m benchmarks.quantized_traffic --record benchmarks/records  # some three minutes

Bytes are the compiled program's, by the links that NCCL's rings and exchanges cross
(zerojax.hlo.links). Needs ``pip install -e '.[compile]'``.
"""

import argparse
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.frame import Answer, Table, question, say
from zerojax.config import load
from zerojax.devices.rates import Rates
from zerojax.foresight import costs
from zerojax.foresight.devices import parse_devices
from zerojax.hlo.links import sent_by
from zerojax.hlo.program import HloProgram, Instruction, parse
from zerojax.hlo.timeline import program_time
from zerojax.hlo.traffic import KINDS, Collective, collectives
from zerojax.hlo.transfers import host_copies
from zerojax.hlo.work import FREE, work_of
from zerojax.models import llama
from zerojax.tuning.study import Study

DEVICES, HOST, SEQ, MICRO = "h100:64", 8, 2048, 1
SLOW = "100gb"
WEIGHTS = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}
FOUR_BITS = {"zero_quantized_gradients_dtype": "int4"}
NEAR = {"zero_hpz_partition_size": HOST}

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "stage 3": {"stage": 3},
    "qwZ": {"stage": 3} | WEIGHTS,
    "qgZ": {"stage": 3} | GRADIENTS,
    "qgZ, int4": {"stage": 3} | GRADIENTS | FOUR_BITS,
    "hpZ": {"stage": 3} | NEAR,
    "qwZ, hpZ, qgZ": {"stage": 3} | WEIGHTS | NEAR | GRADIENTS,
    "qwZ, hpZ, qgZ int4": {"stage": 3} | WEIGHTS | NEAR | GRADIENTS | FOUR_BITS,
    "stage 2": {"stage": 2},
    "stage 2, qwZ, qgZ": {"stage": 2} | WEIGHTS | GRADIENTS,
}
THEORY: Mapping[str, tuple[float, float]] = {
    "stage 3": (3, 0),
    "qwZ": (2, 0),
    "qgZ": (2, 0.5),
    "qgZ, int4": (2, 0.25),
    "hpZ": (0, 2),
    "qwZ, hpZ, qgZ": (0, 1),
    "qwZ, hpZ, qgZ int4": (0, 0.75),
    "stage 2": (2, 0),
    "stage 2, qwZ, qgZ": (0.5, 0.5),
}
"""Units that go around a ring of all devices, and units only between hosts, without scales."""

GATHERS, REDUCTIONS = ("all-gather",), ("reduce-scatter", "all-to-all", "all-reduce")
NOTE = (
    f"Llama 7B, scanned, {DEVICES.replace(':', ' x ')}, {HOST} in a host, {MICRO} row of {SEQ} "
    "tokens a GPU, bf16, AdamW. A unit is 2P bytes, all parameters in bf16. Between hosts: what a "
    "host sends to others, of all its GPUs; inside: what a GPU sends in its host. Theory: 63/64 of "
    "the units on rings of all GPUs, and 7/8 of those only between hosts. Wide: gathers of 16 and "
    "32 bits, scales among them, in units that a GPU sends. GB: what kernels without a product "
    "read and write. The last two columns are the forecast with the H100's own network and with "
    "one of 100 Gb/s a GPU."
)
HEADINGS = [
    "setting", "gathered between", "reduced between", "sum", "theory", "inside", "scales",
    "wide", "GB", "ms", f"ms, {SLOW}",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The traffic of a compiled step, in bytes of a device in a step.

    Attributes:
      between, inside: Bytes sent to other hosts, and inside the device's own, by kind and dtype.
      touched: Bytes that kernels other than products read and write.
      seconds, slow: Seconds of the step with the devices' network, and with a slow one.
      parameters: The model's number of parameters.
    """

    between: Mapping[str, int]
    inside: Mapping[str, int]
    touched: int
    seconds: float
    slow: float
    parameters: int

    def units(
        self, of: Mapping[str, int], kinds: Sequence[str], dtypes: Sequence[str] = ()
    ) -> float:
        """Bytes of some kinds in units of the bf16 parameters."""
        chosen = (
            size
            for name, size in of.items()
            if name.split()[0] in kinds and (not dtypes or name.split()[1] in dtypes)
        )
        return sum(chosen) / (2 * self.parameters)


def by_link(sent: Sequence[Collective], nodes: tuple[int, ...]) -> tuple[dict[str, int], ...]:
    """Bytes that a device sends to other hosts, and in its own, by "kind dtype"."""
    between: dict[str, int] = collections.Counter()
    inside: dict[str, int] = collections.Counter()
    for each in sent:
        link = sent_by(each, nodes)
        for dtype, size in each.bytes_by_dtype.items():
            share = each.times * size / max(each.payload_bytes, 1)
            between[f"{each.kind} {dtype}"] += round(link.between * share)
            inside[f"{each.kind} {dtype}"] += round(link.inside * share)
    return dict(between), dict(inside)


def compiled(
    zero: Mapping[str, object], model: llama.Llama, devices: str = DEVICES, seq: int = SEQ
) -> Found:
    """Compiles a setting's step and measures its traffic."""
    config = load(
        {
            "train_micro_batch_size_per_gpu": MICRO,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": dict(zero),
        }
    )
    mesh, rates = parse_devices(devices)
    found: dict[str, Any] = {}

    def measured(lowered: Any, known: Any, rates: Rates, nodes: tuple[int, ...]) -> Any:
        text = lowered.compile().as_text()
        program, sent = parse(text), collectives(text)
        between, inside = by_link(sent, nodes)
        times = [
            program_time(program, sent, host_copies(text), each, nodes).seconds
            for each in (rates, rates.over(SLOW))
        ]
        found.update(between=between, inside=inside, seconds=times[0], slow=times[1])
        found["touched"] = touched(program)
        return costs.Measurement(memory={"other": 0}, seconds=times[0])

    study = Study(lambda: model, config, mesh, rates, rows=None, seq=seq, measured=measured)
    forecast = study.forecast(study.given)
    return Found(parameters=forecast.parameters, **found)


def touched(program: HloProgram) -> int:
    """Bytes that the kernels of a program read and write, without matrix products."""
    total = 0
    for computation, each, times in program.walk():
        if each.opcode not in FREE and not _is_transfer(each):
            work = work_of(program, computation, each)
            total += 0 if work.flops else times * work.bytes
    return total


def _is_transfer(each: Instruction) -> bool:
    return each.operation in KINDS or each.opcode.endswith(("-start", "-done", "-update"))


def table(found: Mapping[str, Found]) -> list[list[str]]:
    rows = [HEADINGS]
    wide = ("bf16", "f32")
    for name, each in found.items():
        gathered, reduced = (HOST * each.units(each.between, k) for k in (GATHERS, REDUCTIONS))
        both = [each.units(of, (*GATHERS, *REDUCTIONS)) for of in (each.between, each.inside)]
        codes = [d for d in ("s8", "u8") if any(d in key for key in each.inside)]
        scales = sum(each.units(of, ("all-gather", "all-to-all"), ("f32",)) for of in _ways(each))
        sent = sum(each.units(of, ("all-gather", "all-to-all"), codes) for of in _ways(each))
        plain = sum(each.units(of, GATHERS, wide) for of in _ways(each)) if codes else 0.0
        cells = [f"{gathered:.3f}", f"{reduced:.3f}", f"{HOST * both[0]:.3f}"]
        ring, near = THEORY[name]
        cells += [f"{ring * 63 / 64 + near * 7 / 8:.3f}", f"{both[1]:.3f}"]
        cells += [f"{scales / sent:.1%}" if codes else "", f"{plain:.3f}" if codes else ""]
        cells += [
            f"{each.touched / 1e9:.0f}",
            f"{1e3 * each.seconds:.1f}",
            f"{1e3 * each.slow:.1f}",
        ]
        rows.append([name, *cells])
    return rows


def _ways(found: Found) -> tuple[Mapping[str, int], Mapping[str, int]]:
    return found.between, found.inside


@question("quantized_traffic", "Quantized collectives, by link and dtype", absent_devices=True)
def main(options: argparse.Namespace) -> Answer:
    model = llama.Llama(llama.LlamaConfig(**llama.SIZES["llama-7b"], scan=True, remat=True))
    found = {}
    for name, zero in SETTINGS.items():
        found[name] = compiled(zero, model)
        say(f"{name}: {1e3 * found[name].seconds:.1f} ms")
    return Answer({"settings": found}, [NOTE, Table(table(found))])


if __name__ == "__main__":
    main()
