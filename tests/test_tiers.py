"""Which tests are run when, what is reported of them, and which combinations a short list has."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from pairwise import cover, pairs
from tiers import (
    BOUNDS,
    ROOT,
    SLACK,
    SMOKE,
    SWEEP_SECONDS,
    Durations,
    cpu_seconds,
    drawn,
    expected_seconds,
    is_toy,
    peak,
    resident,
)  # fmt: skip


def test_a_draw_takes_a_bounded_time_by_the_record_and_follows_from_the_seed() -> None:
    seconds = dict.fromkeys("abcdef", SWEEP_SECONDS / 3)
    draws = [drawn(seconds, seed) for seed in "abcdefgh"]
    assert {len(each) for each in draws} == {3}
    assert set.union(*draws) == {*seconds}
    assert draws == [drawn({x: seconds[x] for x in "fedcba"}, seed) for seed in "abcdefgh"]
    known = expected_seconds(["tests/test_equality.py::test_a", "tests/test_new.py::test_b"])
    assert all(seconds > 0.0 for seconds in known.values())


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


class Report:
    when = "teardown"

    def __init__(self, nodeid: str, tier: str, cpu: float) -> None:
        self.nodeid = nodeid
        self.user_properties = [("tier", tier), ("cpu", cpu), ("peak", 1.5)]


@pytest.fixture
def durations(pytestconfig: pytest.Config) -> Durations:
    return Durations(pytestconfig)


def test_a_test_over_its_bound_is_named_with_the_remedy(durations: Durations) -> None:
    limit = BOUNDS["fast"] * SLACK
    for name, cpu in (("a", limit - 0.1), ("b", limit + 0.1)):
        durations.pytest_runtest_logreport(Report(f"t.py::{name}", "fast", cpu))  # type: ignore[arg-type]
    ((_, line),) = durations.over
    assert "t.py::b: 6.1 CPU s, the bound of fast tests is 3; mark it slow" in line
    assert durations.files["fast"] == {"t.py": pytest.approx(2 * limit)}
    assert durations.peak == 1.5


def test_what_grew_is_reported(durations: Durations, tmp_path: Path) -> None:
    durations.pytest_runtest_logreport(Report("t.py::a", "sweep", 20.0))  # type: ignore[arg-type]
    before = tmp_path / "durations.json"
    before.write_text(json.dumps({"sweep": {"t.py": [20.0, 2]}}))
    assert durations.grown(before) == ["t.py (sweep) 10 -> 20 CPU s"]
    before.write_text(json.dumps({"sweep": {"t.py": [19.0, 1]}}))
    assert durations.grown(before) == []


def test_what_a_process_uses() -> None:
    begin = cpu_seconds()
    sum(range(10**6))
    assert cpu_seconds() > begin
    assert 0.05 < resident() <= peak() * 1.01


def test_ci_s_options_have_their_values_by_an_equals_sign() -> None:
    # An argument that names a file is where pytest looks for conftest.py, which has the options.
    words = (ROOT / ".ci" / "run").read_text().replace('"', " ").split()
    assert "--record" not in words
    assert "--record=.ci/durations.json" in words
