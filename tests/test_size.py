"""Budgets: nothing grows without a reason, and what has shrunk stays small."""

import pytest
import size

COUNTS, BUDGETS = size.counts(), size.budgets()
ROWS = [(table, name) for table, rows in COUNTS.items() for name in rows]


@pytest.mark.parametrize(("table", "name"), ROWS, ids=[": ".join(row) for row in ROWS])
def test_a_count_is_within_its_budget(table: str, name: str) -> None:
    now, budget = COUNTS[table][name], BUDGETS[table].get(name)
    wrong = size.verdict(now, budget)
    assert not wrong, f"{name} ({table}) is {now}, its budget {budget}: {wrong}"


@pytest.mark.parametrize("table", BUDGETS)
def test_every_budget_is_of_something(table: str) -> None:
    gone = BUDGETS[table].keys() - COUNTS[table].keys()
    assert not gone, f"{sorted(gone)} of {table} in tests/budgets.toml are counted no more: remove"


def test_code_lines_leave_out_blank_lines_comments_and_docstrings(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(size, "ROOT", tmp_path)
    file = tmp_path / "a.py"
    file.write_text(
        '"""One\n\ntwo."""\n\n# why\ndef f(\n    x,\n):\n    """Doc."""\n    return x\n'
    )
    read = size.module(file)
    assert (sorted(read.code), read.lines(read.tree.body[1])) == ([6, 7, 8, 10], 4)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("for eqn in jaxpr.eqns: pass", 1),
        ("[v for eqn in reversed(equations) for v in eqn.outvars]", 1),
        ("for x in values: pass", 0),
    ],
)
def test_loops_over_equations_are_found_by_what_they_loop_over(
    source, count, tmp_path, monkeypatch
):
    monkeypatch.setattr(size, "ROOT", tmp_path)
    file = tmp_path / "a.py"
    file.write_text(source)
    assert size.loops_over_equations(size.module(file)) == count


def test_a_count_above_and_one_far_below_its_budget_fail() -> None:
    assert [bool(size.verdict(now, 100)) for now in (101, 100, 95, 94)] == [
        True,
        False,
        False,
        True,
    ]
    assert "no budget" in size.verdict(1, None)
