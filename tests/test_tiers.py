"""Which tests are run when, what is reported of them, and which combinations a short list has."""

import itertools
from typing import Any

from pairwise import cover, pairs
from tiers import (
    ROOT,
    SMOKE,
    is_toy,
)  # fmt: skip


def test_toys_are_the_examples_and_benchmarks_but_for_a_few() -> None:
    assert is_toy("tests/benchmarks/test_memory.py::test_a[1]")
    assert not is_toy("tests/benchmarks/test_frame.py::test_a")
    assert not is_toy("tests/checkpoint/test_kill.py::test_a")
    for name in SMOKE:
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text()


def test_any_two_values_meet_unless_they_exclude_each_other() -> None:
    factors = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1), "d": (0, 1)}

    def valid(row: dict[str, Any]) -> bool:
        return not (row.get("a") == 2 and row.get("b") == 2)

    rows = cover(factors, valid)
    assert all(valid(row) for row in rows)
    assert rows == cover(factors, valid)
    met = set().union(*(pairs(row, factors, 2) for row in rows))
    for a, b in itertools.combinations(factors, 2):
        for x, y in itertools.product(factors[a], factors[b]):
            assert (((a, x), (b, y)) in met) == ((a, x, b, y) != ("a", 2, "b", 2))
    assert len(rows) <= 12
    assert not cover(factors, valid, given=rows)


def test_ci_s_options_have_their_values_by_an_equals_sign() -> None:
    # An argument that names a file is where pytest looks for conftest.py, which has the options.
    words = (ROOT / ".ci" / "run").read_text().replace('"', " ").split()
    assert "--record" not in words
    assert "--record=.ci/durations.json" in words
