"""Named values that blocks keep, chosen over figures that are made up."""

from types import SimpleNamespace
from typing import Any

import pytest

from zerojax.foresight.by_value import by_value
from zerojax.foresight.choice import Choice

LEAST = Choice(stage=3, micro=1, remat=True)
# Name -> seconds saved, bytes added: values of 2, 1, 3, 0 and less than 0.
COSTS = {"a": (2.0, 1), "b": (4.0, 4), "c": (6.0, 2), "d": (0.0, 1), "e": (-1.0, 1)}


class MadeUp:
    """Forecasts of a step of 100 seconds, in a memory of which ``spare`` bytes are free.

    ``compiled`` has the choices, in order, and ``fitted`` those that fit. From ``limit`` bytes more
    on, XLA computes values again.
    """

    def __init__(self, spare: int, limit: int = 100, fits: int = 100) -> None:
        self.compiled: list[Any] = []
        self.fitted: list[Any] = []
        self._spare, self._limit, self._fits = spare, limit, fits

    def names(self, choice: Choice) -> list[str]:
        return [*COSTS]

    def fitting(self, choice: Choice) -> Any:
        self.compiled.append(choice.remat)
        kept = choice.remat.removeprefix("names:").split(",") if choice.remat is not True else []
        saved, added = (sum(COSTS[name][i] for name in kept) for i in (0, 1))
        if added > self._fits:
            return None
        self.fitted.append(choice.remat)
        return SimpleNamespace(
            seconds=100 - saved, peak=SimpleNamespace(bytes=10 + added),
            spare=self._spare - added, recomputes=added >= self._limit,
        )  # fmt: skip


def chosen(trials: Any) -> list[Any]:
    by_value(trials, LEAST)
    assert trials.fitted[0] is True
    return list(trials.fitted[1:])


EACH = [f"names:{name}" for name in COSTS]


@pytest.mark.parametrize(
    ("spare", "kept"),
    [(100, "names:c,a,b"), (6, "names:c,a"), (3, "names:c,a"), (4, "names:c,a")],
)
def test_the_most_valuable_that_have_room(spare: int, kept: str) -> None:
    assert chosen(MadeUp(spare)) == [*EACH, kept]


def test_a_smaller_one_fills_the_room_that_a_larger_one_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COSTS, "c", (60.0, 9))
    assert chosen(MadeUp(8))[-1] == "names:a,b"


def test_one_that_is_alone_is_not_compiled_again() -> None:
    trials = MadeUp(2)
    assert chosen(trials) == EACH
    assert trials.compiled == [True, *EACH]


def test_less_is_kept_where_xla_would_compute_again() -> None:
    trials = MadeUp(100, limit=7)
    assert chosen(trials)[-2:] == trials.compiled[-2:] == ["names:c,a,b", "names:c,a"]
    assert chosen(MadeUp(100, limit=3))[-2:] == ["names:c,a,b", "names:c,a"]  # then one at a time


def test_without_room_nothing_is_compiled() -> None:
    trials = MadeUp(0)
    assert chosen(trials) == []
    assert trials.compiled == [True]


def test_a_name_that_does_not_fit_is_left_out() -> None:
    assert chosen(MadeUp(100, fits=3)) == [*EACH[:1], *EACH[2:], "names:c,a"]
