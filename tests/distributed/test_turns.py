"""Processes that choose a turn together."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from zerojax.distributed.exchange import exchange
from zerojax.distributed.turns import AgreedTurn

pytestmark = pytest.mark.slow


class Chosen(NamedTuple):
    """The chosen turn, what later ones say, and whether a turn of all came after the last."""

    turn: int
    after: list[bool]
    late: bool


def choose(process: int) -> Chosen:
    """Turns that take longer in the second process."""
    question = AgreedTurn("a question")
    chosen = 0
    for turn in range(100_000):
        if turn == 20 and process == 1:
            question.ask()
        if question.reached():
            chosen = turn
            break
        time.sleep(0.001 + 0.002 * process)
    after = [question.reached() for _ in range(3)]
    question.close()
    again = AgreedTurn("a question")  # knows nothing of the one before
    if process == 0:
        late = again.reached()
        again.close()  # has made its last turn, and holds nobody up
        exchange("one has closed", "")
    else:
        exchange("one has closed", "")
        again.ask()
        late = again.reached()
        again.close()
    exchange("the end", "")
    return Chosen(chosen, after, late)


def test_all_choose_the_same_turn(in_two_processes: Callable[..., list[Any]]) -> None:
    first, second = in_two_processes(choose)
    assert first == second
    assert first.turn > 20
    assert first.after == [True] * 3
    assert not first.late
