"""Traffic and memory of eight architectures, compiled for absent GPUs.

    python -m benchmarks.architectures                              # about ten minutes on two cores
    python -m benchmarks.architectures --only LSTM --only ViT       # those whose names begin so
    python -m benchmarks.architectures --record benchmarks/records

Each is compiled at stages 2 and 3, and under plain ``jax.jit`` with the same state sharded only by
``in_shardings`` and ``out_shardings``. Traffic stands beside what ZeRO's theory asks for.
Needs ``pip install -e '.[compile,examples]'`` and no GPU.
"""

import argparse
from collections.abc import Sequence

from benchmarks.architecture_models import Sizes, architectures
from benchmarks.compiled import KINDS, MEGA, Cost, compile_program
from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.measure import COMPUTE_BYTES

DEVICES = 8
STAGES: tuple[int | None, ...] = (2, 3, None)
WITHIN = 1.1  # of the theory, for the recurrent model
NOTE = (
    "Compiled by XLA:GPU for 8 absent H100s: bf16 compute with fp32 masters, AdamW.\n"
    "Traffic in units of 2P bytes, the bf16 parameters once. Theory: stage 2 one gather and one\n"
    "scatter, stage 3 two gathers and one scatter (one gather of what is only looked up). A table\n"
    "tied to the output is gathered and scattered once for each of its two uses.\n"
    "Sent: bytes a device sends in a ring, over those of the theory (for plain jit that of stage\n"
    "3); an all-reduce sends twice its size. Peak: arguments and temporaries of a device.\n"
    "Plain jit: the same step, its state sharded as at stage 3, only by shardings.\n"
    f"Limit: the LSTM sends at most {WITHIN} of the theory."
)


def sent(cost: Cost) -> float:
    """The bytes that a device sends in rings over those that ZeRO's theory has for the stage."""
    passes = 2 if cost.stage == 2 else 3
    return cost.moved_bytes / (passes * COMPUTE_BYTES * cost.arrays * (DEVICES - 1) / DEVICES)


def table(costs: Sequence[Cost]) -> list[list[str]]:
    """The rows of a table: headings, then one for each cost."""
    rows = [["architecture", "", "parameters M", "gathers", "scatters", "all-reduces",
             "all-to-alls", "other", "sent / theory", "peak MB", "seconds"]]  # fmt: skip
    for each in costs:
        other = sum(units for kind, units in each.units.items() if kind not in KINDS)
        theory = [None, None] if each.stage is None else [1 if each.stage == 2 else 2, 1]
        rows.append(
            [
                each.name,
                each.setting,
                f"{each.arrays / MEGA:.0f}",
                *(
                    f"{each.units.get(kind, 0):.2f}" + (f" ({bound})" if bound else "")
                    for kind, bound in zip(KINDS, [*theory, None, None], strict=True)
                ),
                f"{other:.2f}",
                f"{sent(each):.2f}",
                f"{(each.argument_bytes + each.temporary_bytes) / MEGA:,.0f}",
                f"{each.seconds:.0f}",
            ]
        )
    return rows


def missed(costs: Sequence[Cost]) -> list[str]:
    """The recurrent models that send more than the theory, with some slack."""
    return [
        f"{each.name}, {each.setting}: sends {sent(each):.2f} of the theory, limit {WITHIN}"
        for each in costs
        if each.name.startswith("LSTM") and each.stage is not None and sent(each) > WITHIN
    ]


@question(
    "architectures",
    "Traffic of architectures",
    argument("--only", action="append", metavar="NAME", help="may be repeated"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    known, costs = architectures(Sizes()), []
    chosen = [x for x in known if not options.only or x.name.startswith(tuple(options.only))]
    if not chosen:
        listed = ", ".join(each.name for each in known)
        raise SystemExit(f"no architecture begins with {' or '.join(options.only)}: {listed}")
    for program in chosen:
        for stage in STAGES:
            costs.append(compile_program(program, stage, DEVICES))
            say(", ".join(table(costs[-1:])[1]))
    return Answer({"costs": costs}, [NOTE, Table(table(costs), texts=2)], missed=missed(costs))


if __name__ == "__main__":
    main()
