"""Memory and communication of ZeRO's stages, compiled for absent GPUs.

    python -m benchmarks.memory                      # everything, about ten minutes on two cores
    python -m benchmarks.memory --quick              # a shallower model, about two minutes
    python -m benchmarks.memory --only stages --json records/memory.json

The model is a GPT of 820M parameters (24 layers, width 1600, vocabulary 50304) over sequences of
1024, 4 on each of 8 H100s, in bf16 with AdamW and rematerialised blocks. Needs
``pip install -e '.[compile,examples]'`` and no GPU.
"""

import argparse
import dataclasses
from collections.abc import Iterable

from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.measure import Case, Record, compile_case

STAGES = (0, 1, 2, 3)
MEGA = 1e6
NOTE = (
    "Compiled by XLA:GPU for absent H100s. GPT with rematerialised blocks, sequences "
    "of 1024, 4 a device and micro-batch, bf16 compute with fp32 masters, AdamW. MB of 10^6 bytes; "
    "peak = arguments + temporaries. Theory: `expected_moved` and `expected_between` in "
    "`benchmarks/measure.py`."
)


def sections(quick: bool) -> dict[str, list[Case]]:
    """The cases of each section. ``quick`` has a sixth of the layers and fewer sizes."""
    depth, gas = (4, 2) if quick else (24, 4)
    plain = Case(stage=None, n_layer=depth)
    third = dataclasses.replace(plain, stage=3)
    depths = (depth // 2, depth, 2 * depth)
    counts = (8, 64) if quick else (8, 64, 256, 1024)
    return {
        "stages": [plain, *(dataclasses.replace(plain, stage=stage) for stage in STAGES)],
        "accumulation": [
            dataclasses.replace(plain, stage=stage, accumulate=gas) for stage in (1, 2, 3)
        ],
        "precision": [
            dataclasses.replace(plain, stage=stage, precision=precision)
            for stage in (2, 3)
            for precision in ("bf16", "bf16 checked", "fp16")
        ],
        "scan": [
            third,
            *(dataclasses.replace(third, n_layer=layers, scan=True) for layers in depths),
        ],
        "devices": [
            dataclasses.replace(third, devices=count, scan=True, n_embd=2048, n_head=32)
            for count in counts
        ],
        # Groups of a host each: the state is cut over 8 devices, however many hosts.
        "replicas": [
            dataclasses.replace(plain, stage=stage, devices=count, replicas=count // 8, scan=True)
            for count in ((16,) if quick else (16, 64))
            for stage in STAGES
        ]
        + [
            dataclasses.replace(
                plain, stage=stage, devices=16, replicas=2, scan=True, accumulate=gas
            )
            for stage in (2, 3)
        ],
        "partitions": [
            dataclasses.replace(third, devices=16, scan=True, partition=size, accumulate=k)
            for k in (1, gas)
            for size in (1, 8)
        ],
        "gathered": [
            dataclasses.replace(third, scan=scan, live=live, accumulate=k)
            for scan in (True, False)
            for k in (1, gas)
            for live in (0, 2**40)
        ],
        "indivisible": [
            dataclasses.replace(third, devices=count, scan=True, vocab_size=50257, n_layer=depth)
            for count in ((24, 1024) if quick else (3, 24, 48, 64, 256, 1000, 1024))
        ],
    }


def memory_table(records: Iterable[Record]) -> list[list[str]]:
    """MB and seconds a device, a row for each case."""
    rows = [
        ["MB a device", "layers", "width", "devices", "resting", "12P/N", "arguments",
         "temporaries", "peak", "gathered at once", "trace s", "compile s"]
    ]  # fmt: skip
    for each in records:
        sizes = (
            each.resting_bytes,
            each.expected_resting_bytes,
            each.argument_bytes,
            each.temporary_bytes,
            each.peak_bytes,
            each.peak_gathered_bytes,
        )
        rows.append(
            [each.case.name]
            + [str(size) for size in (each.case.n_layer, each.case.n_embd, each.case.devices)]
            + [*map(_mega, sizes), f"{each.trace_seconds:.1f}", f"{each.compile_seconds:.1f}"]
        )
    return rows


def traffic_table(records: Iterable[Record]) -> list[list[str]]:
    """MB sent a step by each device, beside what theory asks for; those that have to come into
    each of several hosts too."""
    rows = [
        ["MB a step, measured / theory", "devices", "all-gather", "reduce-scatter", "all-reduce",
         "total", "into a host", "parameters gathered in", "largest all-reduce", "all-to-alls",
         "held into backward"]
    ]  # fmt: skip
    for each in records:
        into = (sum(each.between_bytes.values()), each.expected_between_bytes)
        totals = (each.total_moved_bytes, each.total_expected_moved_bytes)
        gathered = (f"{dtype} {_mega(size)}" for dtype, size in each.gather_dtypes.items())
        rows.append(
            [
                each.case.name,
                str(each.case.devices),
                *(_beside(each, kind) for kind in ("all-gather", "reduce-scatter", "all-reduce")),
                " / ".join(map(_mega, totals)),
                " / ".join(map(_mega, into)) if any(into) else "-",
                ", ".join(gathered) or "-",
                f"{each.largest_all_reduce / MEGA:.3f}",
                str(each.all_to_all),
                _mega(each.crossing_bytes) if each.crossing_bytes else "nothing",
            ]
        )
    return rows


@question(
    "memory",
    "Memory and traffic of the stages",
    argument("--quick", action="store_true", help="4 layers instead of 24"),
    argument("--only", action="append", choices=[*sections(False)], help="may be repeated"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    known: dict[Case, Record] = {}
    results: dict[str, list[Record]] = {}
    for name, cases in sections(options.quick).items():
        if options.only and name not in options.only:
            continue
        for case in cases:
            if case not in known:  # the unrolled stage 3 is in several sections
                say(f"compiling {case.name}, {case.n_layer} layers, {case.devices} devices")
                known[case] = compile_case(case)
        results[name] = [known[case] for case in cases]
    tables: list[Table] = []
    for name, records in results.items():
        tables += [Table(memory_table(records), title=name), Table(traffic_table(records))]
    return Answer(results, [NOTE, *tables])


def _mega(size: int) -> str:
    return f"{size / MEGA:,.0f}"


def _beside(record: Record, kind: str) -> str:
    moved, expected = record.moved_bytes.get(kind, 0), record.expected_moved_bytes.get(kind, 0)
    return f"{_mega(moved)} / {_mega(expected)}" if moved or expected else "-"


if __name__ == "__main__":
    main()
