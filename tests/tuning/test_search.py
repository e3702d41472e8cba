"""The order of a search, what it leaves out and what it tells, over figures that are made up."""

from types import SimpleNamespace
from typing import Any

import pytest

from zerojax.foresight.attribution import ACTIVATIONS, PARAMETERS
from zerojax.foresight.choice import Choice
from zerojax.foresight.trials import Trial, Trials
from zerojax.tuning.search import listed, ranked, search
from zerojax.tuning.space import Batches, Space

GB = 10**9


class MadeUp(Trials):
    """Trials of a step whose memory is a formula; ``asked`` has what was compiled, in order."""

    def __init__(
        self, room: int, fixed: Any, row: Any, names: Any = (), limit: int = 1000 * GB
    ) -> None:
        rates: Any = SimpleNamespace(room=room)
        built: Any = SimpleNamespace(names=lambda: names)
        super().__init__(lambda choice: built, Choice(stage=0, micro=1), rates)
        self.recomputes_above = limit
        self.network_share = 0.0
        self.fixed, self.row = fixed, row

    def hopeless(self, choice: Choice) -> bool:
        return False

    def tried(self, choice: Choice) -> Any:
        programs = [
            SimpleNamespace(memory={PARAMETERS: fixed, ACTIVATIONS: row}, bytes=fixed + row)
            for fixed, row in zip(
                self.fixed(choice),
                (each * choice.micro for each in self.row(choice)),
                strict=True,
            )
        ]
        peak = max(programs, key=lambda program: program.bytes)
        return SimpleNamespace(
            programs=programs, peak=peak, fits=peak.bytes <= self.rates.room,
            spare=self.rates.room - peak.bytes,
            compile_seconds=1.0, recomputes=peak.bytes > self.recomputes_above,
            recomputes_above=self.recomputes_above,
            seconds=1.0 + choice.micro / 100 + 2 * (choice.remat is True),
            network_share=self.network_share,
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


def test_the_largest_micro_batch_in_which_xla_computes_nothing_again_is_tried_too() -> None:
    trials = MadeUp(24 * GB, lambda choice: (4 * GB,), lambda choice: (GB // 2,), limit=15 * GB)
    space = Space(stages=(0,), offloads=("none",), live=0)
    assert {each.choice.micro for each in search(trials, space).ranking} == {1, 16, 32}
    assert [each.micro for each in trials.asked] == [1, 32, 16]


KEPT = Space(stages=(2, 3), remats=(False, True), policies=("dots", "dots_no_batch"), live=0)


def keeping(choice: Choice) -> tuple[int, ...]:
    """Bytes of a row, by what blocks keep."""
    return (GB * {False: 10, True: 1, "dots": 3, "dots_no_batch": 3}.get(choice.remat, 2),)


def test_policies_are_tried_with_the_fastest_stage_and_offload() -> None:
    trials = MadeUp(30 * GB, lambda choice: (GB * (5 - choice.stage),), keeping, ("a", "b"))
    found = search(trials, KEPT)
    tried = {each.remat: each for each in trials.asked if isinstance(each.remat, str)}
    assert [*tried] == ["dots", "dots_no_batch", "names:a", "names:b", "names:a,b"]
    assert {(each.stage, each.offload) for each in tried.values()} == {(2, "none")}
    assert (tried["dots"].micro, tried["names:a"].micro) == (8, 8)
    assert found.unseen == []
    assert isinstance(found.ranking[0].choice.remat, str)


@pytest.mark.parametrize(("slower", "first"), [(1.01, "steady"), (1.1, "repeated")])
def test_what_xla_computes_again_is_not_proposed_where_another_is_as_fast(
    slower: float, first: str
) -> None:
    def trial(name: str, seconds: float) -> Any:
        forecast: Any = SimpleNamespace(seconds=seconds, recomputes=name == "repeated")
        return Trial(Choice(stage=3, micro=1, remat=name), forecast)

    found = ranked([trial("repeated", 1.0), trial("last", 9.0), trial("steady", slower)])
    assert found[0].choice.remat == first
    assert found[-1].choice.remat == "last"


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_pipeline_stages_are_tried_where_the_network_binds(share: float) -> None:
    trials = MadeUp(24 * GB, lambda choice: (4 * GB,), lambda choice: (GB,))
    trials.network_share = share
    batches = Batches(rows=8)
    space = Space(stages=(1, 3), batches=batches, offloads=("none",), live=0, pipelines=(2, 4))
    found = [each.choice for each in search(trials, space).ranking if each.choice.pipeline > 1]
    tried = {(each.pipeline, each.stage, each.micro, each.accumulation) for each in found}
    want = {(n, stage, 2, 4 * n) for n in (2, 4) for stage in (1, 3)}
    assert tried == (want if share > 0.1 else set())
