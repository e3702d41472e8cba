"""Memory of the device and of the host under offload, compiled for absent GPUs.

    python -m benchmarks.offload                     # everything, about a quarter of an hour
    python -m benchmarks.offload --quick             # toy sizes, a minute
    python -m benchmarks.offload --only sizes --record benchmarks/records

GPTs of ``zerojax.models.gpt`` in bf16 with AdamW and rematerialised blocks, sequences of 1024,
one a device, on H100s. Needs ``pip install -e '.[compile,examples]'`` and no GPU. Exits with 1
where a limit is missed.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.offload_largest import find_largest
from benchmarks.offload_programs import Compiled, Costs, OffloadCase
from benchmarks.offload_tables import (
    NOTES,
    Limit,
    Rows,
    largest_rows,
    optimizer_rows,
    overlap_rows,
    size_rows,
)

GIGA = 10**9
SECTIONS = ("sizes", "optimizer", "overlap", "largest")
RESERVE = 3 * GIGA // 2  # of a device's memory, for the CUDA context and the allocator
SMALL = 4_000_000  # elements of a sub-group
BOTH = OffloadCase(stage=3, optimizer=True, param=True, devices=1, scan=True, n_layer=48)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The cases to compile.

    Attributes:
      sizes: (name, case, bytes of device memory at most).
      optimizer: cases with the optimizer offloaded.
      overlap: cases whose copies between device and host are compared with computation.
      modes, memories, reserve, ladder: see :func:`find_largest`.
    """

    sizes: list[tuple[str, OffloadCase, int]]
    optimizer: list[OffloadCase]
    overlap: list[OffloadCase]
    modes: dict[str, OffloadCase]
    memories: list[int]
    reserve: int = RESERVE
    ladder: tuple[tuple[int, int], ...] | None = None


def full() -> Work:
    """The cases at real sizes; :func:`quick` has toy sizes."""

    def both(layers: int, width: int, heads: int) -> OffloadCase:
        return dataclasses.replace(BOTH, n_layer=layers, n_embd=width, n_head=heads)

    def offloaded(stage: int, devices: int, **kw: Any) -> OffloadCase:
        return dataclasses.replace(BOTH, stage=stage, devices=devices, param=False, **kw)

    unrolled = {"scan": False, "n_layer": 6}
    half = OffloadCase(stage=2, optimizer=True, scan=True)
    modes = {
        f"stage {s}, 8 GPUs" if s else "no ZeRO, 8 GPUs": OffloadCase(stage=s, scan=True)
        for s in (0, 1, 2, 3)
    }
    for n, gpus in ((1, "1 GPU"), (8, "8 GPUs")):
        modes[f"stage 2, optimizer offloaded, {gpus}"] = dataclasses.replace(half, devices=n)
        modes[f"stage 3, both offloaded, {gpus}"] = dataclasses.replace(BOTH, devices=n)
    return Work(
        sizes=[
            ("GPT-2 XL", BOTH, 3 * GIGA),
            ("13B", both(40, 5120, 40), 6 * GIGA),
            ("30B", both(60, 6656, 52), 10 * GIGA),
            ("65B", both(80, 8192, 64), 16 * GIGA),
            ("GPT-2 XL, unrolled", dataclasses.replace(BOTH, scan=False), 8 * GIGA),
        ],
        optimizer=[
            *(offloaded(stage, n) for n in (1, 8) for stage in (1, 2, 3)),
            *(offloaded(2, n, sub_group_size=SMALL) for n in (1, 8)),
            *(offloaded(stage, 8, **unrolled) for stage in (1, 2, 3)),
            offloaded(2, 1, **unrolled),
        ],
        overlap=[BOTH, dataclasses.replace(BOTH, devices=8), offloaded(2, 8)],
        modes=modes,
        memories=[24 * GIGA, 40 * GIGA, 80 * GIGA],
    )


def quick() -> Work:
    """Toy sizes, whose figures do not carry over to real ones."""
    both = dataclasses.replace(
        BOTH,
        n_layer=4,
        n_head=4,
        n_embd=512,
        vocab_size=512,
        block_size=256,
        sub_group_size=SMALL,
    )
    optimizer = dataclasses.replace(both, stage=2, devices=8, param=False, sub_group_size=400_000)
    return Work(
        sizes=[("toy", both, GIGA // 5)],
        optimizer=[optimizer],
        overlap=[both],
        modes={"both offloaded, 1 GPU": both},
        memories=[GIGA // 5],
        reserve=0,
        ladder=((512, 4),),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """Tables by section, the limits, and the figures for JSON."""

    tables: dict[str, Rows]
    limits: list[Limit]
    figures: dict[str, object]

    def missed(self) -> list[str]:
        return [str(limit) for limit in self.limits if not limit.held]


def run(
    work: Work, wanted: Sequence[str] = SECTIONS, known: dict[OffloadCase, Costs] | None = None
) -> Results:
    """Compiles the wanted sections; ``known``, if given, takes up the costs of all cases."""
    tables: dict[str, Rows] = {}
    limits: list[Limit] = []
    figures: dict[str, object] = {}
    costs = Compiled(say, {} if known is None else known)

    def add(name: str, rows: Rows, bounds: list[Limit], found: object) -> None:
        tables[name], figures[name] = rows, found
        limits.extend(bounds)

    if "sizes" in wanted:
        sizes = [(name, costs(case), limit) for name, case, limit in work.sizes]
        add("sizes", *size_rows(sizes), [plain(c) for _, c, _ in sizes])
    if "optimizer" in wanted:
        pairs = [(costs(case), costs(without(case))) for case in work.optimizer]
        add("optimizer", *optimizer_rows(pairs), [list(map(plain, pair)) for pair in pairs])
    if "overlap" in wanted:
        rows = overlap_rows([costs(case) for case in work.overlap])
        add("overlap", rows, [], rows)
    if "largest" in wanted:
        ladder = {} if work.ladder is None else {"ladder": work.ladder}
        rows = largest_rows(find_largest(work.modes, work.memories, work.reserve, costs, **ladder))
        add("largest", rows, [], rows)
    return Results(tables=tables, limits=limits, figures=figures)


def without(case: OffloadCase) -> OffloadCase:
    """The case with nothing offloaded."""
    return dataclasses.replace(case, optimizer=False, param=False, sub_group_size=None)


def plain(costs: Costs) -> dict[str, Any]:
    """The figures of a case without its list of copies."""
    costs_json = dataclasses.asdict(costs)
    for program in costs_json["programs"]:
        del program["copies"]
    return costs_json


def answer(results: Results) -> Answer:
    parts: list[str | Table] = [
        "Compiled by XLA:GPU for absent H100s. GPTs with rematerialised blocks, "
        "sequences of 1024, one a device,\nbf16 compute with fp32 masters, AdamW. GB are 10^9 "
        "bytes, of one device. Device bytes of a program: arguments, temporaries,\nresults that "
        "take no argument's place, and what rests on the device meanwhile."
    ]
    for name, rows in results.tables.items():
        parts += [Table(rows, title=name), NOTES[name]]
    missed = results.missed()
    return Answer(results.figures | {"missed": missed}, parts, missed=missed)


@question(
    "offload",
    "Memory under offload",
    argument("--quick", action="store_true", help="toy sizes"),
    argument("--only", action="append", choices=SECTIONS, help="may be repeated"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    return answer(run(quick() if options.quick else full(), options.only or SECTIONS))


if __name__ == "__main__":
    main()
