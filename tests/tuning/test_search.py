"""The order of a search, what it leaves out and what it tells, over figures that are made up."""

from types import SimpleNamespace
from typing import Any

import pytest

from zerojax.foresight.attribution import ACTIVATIONS, PARAMETERS
from zerojax.foresight.choice import Choice
from zerojax.tuning.search import listed, search
from zerojax.tuning.space import Space

GB = 10**9


class MadeUp:
    """Trials of a step whose memory is a formula; ``asked`` has what was compiled, in order."""

    def __init__(self, room: int, fixed: Any, row: Any) -> None:
        self.rates = SimpleNamespace(room=room)
        self.asked: list[Choice] = []
        self._fixed, self._row = fixed, row

    def hopeless(self, choice: Choice) -> bool:
        return False

    def tried(self, choice: Choice) -> Any:
        self.asked.append(choice)
        programs = [
            SimpleNamespace(memory={PARAMETERS: fixed, ACTIVATIONS: row}, bytes=fixed + row)
            for fixed, row in zip(
                self._fixed(choice),
                (each * choice.micro for each in self._row(choice)),
                strict=True,
            )
        ]
        peak = max(programs, key=lambda program: program.bytes)
        return SimpleNamespace(
            programs=programs, peak=peak, fits=peak.bytes <= self.rates.room,
            compile_seconds=1.0, seconds=1.0 + choice.micro / 100,
        )  # fmt: skip


def shares(choice: Choice) -> tuple[int, ...]:
    """The parameters and gradients by stage, with 8 GB that an offload halves."""
    return (80 * GB // (1 + choice.stage) + 8 * GB // (1 + sum(choice.held)),)


SPACE = Space(remats=(False, True), live=0)


def one(trials: Any, **limits: Any) -> Any:
    return search(trials, SPACE, **limits)


def test_modes_are_left_out_where_the_leanest_of_their_offload_does_not_fit() -> None:
    trials = MadeUp(25 * GB, shares, lambda choice: (GB,))
    found = one(trials)
    assert [str(each) for each in trials.asked[:2]] == [
        "stage 3, micro-batch 1, remat",
        "stage 3, micro-batch 1, remat, optimizer offloaded",
    ]
    assert {each.choice.offload for each in found.ranking} == {"optimizer"}
    assert found.unseen == []


def test_nothing_fits_after_one_compile_an_offload() -> None:
    trials = MadeUp(2 * GB, shares, lambda choice: (GB,))
    found = one(trials)
    assert (found.ranking, found.unseen, len(trials.asked)) == ([], [], 3)
    assert found.leanest == trials.asked[-1]
    assert str(found.leanest).endswith("optimizer and parameters offloaded")


@pytest.mark.parametrize("compiles", range(4))
def test_what_a_limit_left_out_is_known(compiles: int) -> None:
    trials = MadeUp(24 * GB, shares, lambda choice: (GB,))
    found = one(trials, compiles=compiles)
    assert len(trials.asked) == compiles
    modes = {(each.stage, each.remat, each.offload) for each in found.unseen}
    assert bool(found.ranking) == (compiles == 3)
    assert ((3, True, "none") in modes) == (compiles == 0)
    assert ((3, True, "optimizer") in modes) == (compiles < 2)
    assert (3, False, "optimizer and parameters") in modes
    if compiles == 0:
        assert listed(found.unseen).startswith("stage 0; stage 1; stage 2; stage 3; stage 0, remat")
        assert listed(found.unseen).endswith("; and 8 more")


def test_the_micro_batch_grows_where_the_update_is_the_largest_program() -> None:
    """Its memory does not depend on the rows; that of the gradients does."""
    fixed, row = (4 * GB, 20 * GB), (GB // 2, 0)
    trials = MadeUp(24 * GB, lambda choice: fixed, lambda choice: row)
    found = search(trials, Space(stages=(0,), offloads=("none",), live=0))
    assert max(each.choice.micro for each in found.ranking) == 32
    assert [each.micro for each in trials.asked] == [1, 32]
