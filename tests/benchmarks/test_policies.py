"""The table of what stays gathered."""

import dataclasses

from benchmarks.policies import Policy, table


def test_theory_stands_beside_what_was_counted() -> None:
    half = Policy(
        name="half",
        stage=3,
        accumulation=4,
        kept=6_000_000_000,
        gathered=4.52,
        reduced=4.01,
        peak=10_000_000_000,
        seconds=0.25,
        share=0.5,
    )
    first = dataclasses.replace(half, name="all", stage=1, kept=0, gathered=1.0, reduced=1.0)
    _, three, one = table([half, first])
    assert three == [
        "3", "half", "4", "6.00", "4.52", "4.50", "4.01", "4.00", "12", "10.00", "250"
    ]  # fmt: skip
    assert one[3:9] == ["", "1.00", "1.00", "1.00", "1.00", "2"]
