"""Which tests are run when, what is reported of them, and which combinations a short list has."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from pairwise import cover, pairs
from rooms import ROOMS
from tiers import (
    BOUNDS,
    CORE,
    ROOT,
    SLACK,
    SMOKE,
    SWEEP_SECONDS,
    Durations,
    affects,
    chosen,
    cpu_seconds,
    expected_seconds,
    is_toy,
    peak,
    resident,
)  # fmt: skip

SWEEPS = [
    "tests/config/test_load.py::test_a", "tests/optim/test_named.py::test_a",
    "tests/checkpoint/test_kill.py::test_a", "tests/launch/test_kubernetes.py::test_a",
    "tests/benchmarks/test_memory.py::test_a", "tests/test_features.py::test_a",
]  # fmt: skip


SECONDS = dict.fromkeys(SWEEPS, SWEEP_SECONDS / 3)


def names(*paths: str) -> list[str]:
    """Files of the sweeps that a change affects."""
    files = [name.partition("::")[0] for name in SWEEPS]
    return [file for file in files if affects(paths, file)]


def test_the_core_affects_all_sweeps() -> None:
    assert len(names("zerojax/collectives/insert.py")) == len(SWEEPS)
    assert len(names("pallas_kernels/norms/api.py")) == len(SWEEPS)
    assert len(names("tests/conftest.py")) == len(names("tests/programs/basic.py")) == len(SWEEPS)
    assert len(names("pyproject.toml")) == len(SWEEPS)
    assert {room.partition(".")[0] for room in ROOMS} >= CORE


def test_they_take_a_bounded_time_by_the_record() -> None:
    drawn = [chosen(SWEEPS, ["zerojax/optim/named.py"], 0, seed, SECONDS) for seed in "abcdef"]
    assert {len(each) for each in drawn} == {3}
    assert set.union(*drawn) == set(SWEEPS)
    known = expected_seconds(["tests/test_equality.py::test_a", "tests/test_new.py::test_b"])
    assert all(seconds > 0.0 for seconds in known.values())


def test_a_room_affects_those_above_it() -> None:
    above = ["tests/launch/test_kubernetes.py", "tests/benchmarks/test_memory.py"]
    assert names("zerojax/checkpoint/writer.py") == ["tests/checkpoint/test_kill.py", *above]
    assert names("zerojax/launch/group.py") == above
    assert names("benchmarks/memory.py") == ["tests/benchmarks/test_memory.py"]
    assert names("tests/optim/test_named.py") == ["tests/optim/test_named.py"]
    assert names("tests/equal.py") == ["tests/test_features.py"]
    assert names("tests/launch/launched.py") == ["tests/launch/test_kubernetes.py"]
    assert names("README.md", "tests/tiers.py", "docs/stages.md", ".ci/run") == []


def test_toys_are_the_examples_and_benchmarks_but_for_a_few() -> None:
    assert is_toy("tests/benchmarks/test_memory.py::test_a[1]")
    assert not is_toy("tests/benchmarks/test_calls.py::test_a")
    assert not is_toy("tests/checkpoint/test_kill.py::test_a")
    for name in SMOKE:
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text()


def test_a_sample_of_the_others_follows_from_the_seed() -> None:
    samples = [chosen(SWEEPS, [], 2, seed, SECONDS) for seed in "abcdef"]
    assert {len(sample) for sample in samples} == {2}
    assert samples == [chosen(reversed(SWEEPS), [], 2, seed, SECONDS) for seed in "abcdef"]
    assert len({frozenset(sample) for sample in samples}) > 1


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
    assert not {"--record", "--changed-since"} & set(words)
    assert "--record=.ci/durations.json" in words
