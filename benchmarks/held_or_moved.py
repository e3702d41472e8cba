"""State held and bytes sent by unusual steps, compiled for absent GPUs, beside theory.

    python -m benchmarks.held_or_moved                                  # ten minutes on two cores
    python -m benchmarks.held_or_moved --only tables
    python -m benchmarks.held_or_moved --record benchmarks/records

State beside the parameters, tables, heads, frozen parameters and experts,
the programs of ``extra_state.py`` and ``moved_programs.py``. Needs
``pip install -e '.[compile,examples]'`` and no GPU.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable

from benchmarks.compiled import MEGA, Cost, Program, compile_program
from benchmarks.extra_state import FULL, adversarial, low_rank, low_rank_nnx, preference
from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.moved_programs import (
    Language,
    experts,
    frozen,
    head_in_float32,
    tables,
    taken_apart,
    tied,
    used_twice,
)

WITHIN = 0.05
NOTE = (
    "Compiled by XLA:GPU for absent H100s. A unit: the model's parameters once in two bytes each; "
    f"MB are those of a device. Off: compiled over theory, in bold beyond {WITHIN:.0%}. Of rows "
    "that are looked up the sum over the devices counts as reduced."
)
HEADS = ["what", "stage", "devices", "figure", "theory's terms", "compiled", "theory", "off"]

FIGURES: dict[str, Callable[[Cost], float]] = {
    "units sent": lambda cost: sum(cost.units.values()),
    "units gathered": lambda cost: cost.units.get("all-gather", 0),
    "units reduced": lambda cost: cost.units.get("reduce-scatter", 0),
    "MB sent": lambda cost: sum(cost.units.values()) * 2 * cost.arrays / MEGA,
    "MB at rest": lambda cost: cost.argument_bytes / MEGA,
    "MB of temporaries": lambda cost: cost.temporary_bytes / MEGA,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure of a program beside theory.

    Attributes:
      program, stage, devices: The compiled step.
      figure: A key of ``FIGURES``.
      theory: The expected figure.
      parts: Terms of the theory.
    """

    program: Program
    figure: str
    theory: float
    parts: str
    stage: int = 3
    devices: int = 8

    @property
    def name(self) -> str:
        return f"{self.program.name}, {self.devices} devices, {self.figure}"

    def found(self, cost: Cost) -> float:
        return FIGURES[self.figure](cost)


def extra_state() -> list[Claim]:
    """A frozen base, a second network, a reference model."""
    d, layers = FULL.width, FULL.layers
    base, updates = layers * 8 * d * d, layers * 2 * 8 * 5 * d
    batch = 4 * FULL.rows * FULL.tokens * d
    held = (4 * base / 8 + 12 * updates + batch) / MEGA
    claims = []
    for program in (low_rank(FULL), low_rank_nnx(FULL)):
        claims += [
            Claim(
                program=program, figure="MB at rest", theory=held,
                parts="a base of 1,258M in f32 over 8, updates below the threshold, the batch",
            ),
            Claim(
                program=program, figure="units sent", theory=2 - 1 / (2 * layers),
                parts="the base forward and backward; the first product's input has no cotangent",
            ),
        ]  # fmt: skip
    claims.append(
        Claim(
            program=low_rank(FULL, in_int8=True), figure="units sent",
            theory=1 - 1 / (4 * layers),
            parts="codes of one byte, forward and backward",
        )
    )  # fmt: skip
    deep = layers // 4
    critic, generator = deep * d * d, (deep + 1) * d * d
    share, first = generator / critic, 1 / deep
    gan = adversarial(FULL)
    claims += [
        Claim(
            program=gan, figure="MB at rest", theory=(12 * (critic + generator) / 8 + batch) / MEGA,
            parts="masters and moments of both over 8, the batch",
        ),
        Claim(
            program=gan, figure="units sent", theory=6 + 3 * share - 3 * first + 2 + share,
            parts="gathers: the critic 6, the generator 3 times, less first layers backward; "
            "reductions: the critic of generated and of real rows, the generator",
        ),
    ]  # fmt: skip
    for in_field, devices in ((True, 8), (True, 64), (False, 8)):
        program = preference(FULL, in_field=in_field)
        claims.append(
            Claim(
                program=program, devices=devices, figure="units sent", theory=8,
                parts="2 passes forward and backward, 2 of the copy forward: 6 gathers, 2 "
                "reductions",
            )
        )  # fmt: skip
    return claims


def lookups() -> list[Claim]:
    """Tables of which few rows are looked up."""
    eight, rows, dense = tables(), 2 * 8 * 4096 * 128, 2 * 1024 * 1024
    words = Language(vocabulary=151_936, width=896)
    moved = 3 + 2 * words.looked_up()
    return [
        Claim(
            program=eight, figure="MB sent", theory=(2 * rows + 3 * dense + 4 * 8 * 4096) / MEGA,
            parts="4096 rows of each of 8 tables forward and backward, a layer's 2 gathers and its "
            "reduction, the indices",
        ),
        Claim(
            program=eight, figure="MB of temporaries",
            theory=(2 * 8 * 1_000_000 * 128 / 8 + rows) / MEGA,
            parts="a device's part of the tables' gradients in bf16, the rows",
        ),
        Claim(
            program=words.program("a vocabulary of 151,936, a row a device"), figure="units sent",
            theory=moved,
            parts="2 gathers, 1 reduction, the rows twice",
        ),
    ]  # fmt: skip


def gathered_once() -> list[Claim]:
    """Stages 1 and 2 of a tied GPT in bf16."""
    scanned, unrolled = Language(), Language(scan=False, layers=12)
    claims = []
    for sizes, k, by_modules in (
        (scanned, 1, False),
        (scanned, 8, False),
        (unrolled, 8, False),
        (scanned, 8, True),
        (unrolled, 8, True),
    ):
        name = (
            f"tied GPT, {'scanned' if sizes.scan else 'unrolled'}, {k} micro-batch{'es' * (k > 1)}"
        )
        name += ", bf16 only by flax" if by_modules else ""
        program = tied(name, sizes, k, by_modules=by_modules)
        claims += [
            Claim(
                program=program, stage=2, figure="units gathered", theory=1 + k * sizes.looked_up(),
                parts="once an update; a micro-batch's rows, for the table's gradient",
            ),
            Claim(
                program=program, stage=2, figure="units reduced", theory=k,
                parts="once a micro-batch",
            ),
        ]  # fmt: skip
    for sizes in (scanned, unrolled):
        name = f"tied GPT, {'scanned' if sizes.scan else 'unrolled'}, 4 micro-batches"
        claims.append(
            Claim(
                program=tied(name, sizes, 4), stage=1, figure="units sent", theory=2,
                parts="DeepSpeed's count: one gather and one reduction an update",
            )
        )  # fmt: skip
    return claims


def uses() -> list[Claim]:
    """A head in float32, frozen parameters, a table used twice, and experts."""
    head, twice = head_in_float32(), used_twice()
    table, stack = 50304 * 1024, 24 * 8 * 1024 * 1024
    size = table + stack
    small = Language(layers=16)
    trained = small.layers * small.width**2 / small.parameters
    return [
        Claim(
            program=head, figure="units gathered",
            theory=2 + 8 * 512 * 1024 / size,
            parts="2 gathers, all in bf16; the rows, for the table's gradient",
        ),
        Claim(
            program=frozen(small), figure="units reduced",
            theory=trained + small.looked_up(),
            parts="the trained 6.6%; the rows looked up",
        ),
        Claim(
            program=twice, figure="units reduced", theory=1,
            parts="once, both uses of the table together",
        ),
        Claim(
            program=experts(per_device=True), figure="units sent",
            theory=3, parts="2 gathers, 1 reduction",
        ),
    ]  # fmt: skip


def stacks() -> list[Claim]:
    """Stacks that a step indexes by itself, at the costs of a list of layers."""
    claims = []
    for way in ("by index", "in a loop", "in parts"):
        program = taken_apart(way)
        claims += [
            Claim(
                program=program, figure="units sent", theory=3, stage=3,
                parts="2 gathers, 1 reduction",
            ),
            Claim(
                program=program, stage=2, figure="units sent", theory=2,
                parts="1 gather, 1 reduction",
            ),
        ]  # fmt: skip
    return claims


def claims() -> list[Claim]:
    """All claims that this benchmark checks."""
    return [*extra_state(), *lookups(), *gathered_once(), *uses(), *stacks()]


@functools.cache
def _programs() -> dict[str, Program]:
    return {claim.program.name: claim.program for claim in claims()}


@functools.cache
def _cost(name: str, stage: int, devices: int) -> Cost:
    return compile_program(_programs()[name], stage, devices)


def cost_of(claim: Claim) -> Cost:
    """Costs of the program of a claim; compiled once for all its claims."""
    return _cost(claim.program.name, claim.stage, claim.devices)


def row(claim: Claim, cost: Cost) -> list[str]:
    """A line of the table."""
    found = claim.found(cost)
    off = found / claim.theory - 1
    digits = 0 if claim.figure.startswith("MB") and claim.theory > 100 else 2
    return [
        claim.program.name,
        str(claim.stage),
        str(claim.devices),
        claim.figure,
        claim.parts,
        f"{found:,.{digits}f}",
        f"{claim.theory:,.{digits}f}",
        f"{off:+.1%}" if abs(off) <= WITHIN else f"**{off:+.1%}**",
    ]


@question(
    "held_or_moved",
    "What is neither held nor moved without need",
    argument("--only", metavar="WORD", help="programs that have it in their names"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    rows, figures = [HEADS], []
    for claim in claims():
        if options.only and options.only not in claim.program.name:
            continue
        cost = cost_of(claim)
        rows.append(row(claim, cost))
        say(", ".join(rows[-1]))
        found = {"figure": claim.figure, "found": claim.found(cost), "theory": claim.theory}
        figures.append(found | {"cost": cost})
    return Answer({"claims": figures}, [NOTE, Table(rows, texts=5)])


if __name__ == "__main__":
    main()
