"""Budgets: nothing grows without a reason, and what has shrunk stays small."""

import pytest
import size

BUDGETS = size.budgets()
ROWS = [(table, name) for table, rows in BUDGETS.items() for name in rows]

Counts = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def counts() -> Counts:
    return size.counts()


@pytest.mark.parametrize(("table", "name"), ROWS, ids=[": ".join(row) for row in ROWS])
def test_a_count_is_within_its_budget(table: str, name: str, counts: Counts) -> None:
    now, budget = counts[table].get(name), BUDGETS[table][name]
    assert now is not None, f"{name} of {table} in tests/budgets.toml is counted no more: remove it"
    wrong = size.verdict(now, budget)
    assert not wrong, f"{name} ({table}) is {now}, its budget {budget}: {wrong}"


def test_every_count_has_a_budget(counts: Counts) -> None:
    missing = {table: sorted(rows.keys() - BUDGETS[table].keys()) for table, rows in counts.items()}
    assert not any(missing.values()), f"tests/budgets.toml has no row for {missing}"
