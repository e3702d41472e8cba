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
