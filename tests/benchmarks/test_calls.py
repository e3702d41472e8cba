"""The benchmark of a call's processor time, at toy size."""

import pytest

from benchmarks.calls import FORMS, measure, rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile")]


def test_each_form_of_state() -> None:
    costs = [measure(form, 20, calls=2) for form in FORMS]
    assert all(each.plain > 0 and each.decorated > 0 for each in costs)
    assert [row[0] for row in rows(costs)[1:]] == [*FORMS]
