"""The published tables: the search, the rows, and GPT-2 XL's claims."""

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import published
from benchmarks.published_batches import PLAIN, find_largest
from benchmarks.published_tables import HEADINGS, Section
from zerojax.foresight.attribution import ACTIVATIONS, PARAMETERS
from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Traffic

MB = 10**6
ROOM = 24_000 * MB


class FakeStudy:
    """So many bytes for a micro-batch, the first 1000 MB of them parameters."""

    def __init__(self, size: Callable[[int], int]) -> None:
        self.size, self.asked = size, list[Choice]()

    def forecast(self, choice: Choice) -> Any:
        if choice not in self.asked:
            self.asked.append(choice)
        size = self.size(choice.micro)
        memory = {PARAMETERS: 1000 * MB, ACTIVATIONS: size - 1000 * MB}
        return SimpleNamespace(
            fits=size <= ROOM,
            devices=8,
            parameters=500 * MB,
            peak=SimpleNamespace(name="step", bytes=size, memory=memory),
            rates=SimpleNamespace(
                kind="fake", room=ROOM, matrix={"f16": 1e14}, matrix_share=0.7, network=5e10
            ),
            seconds=2.0,
            traffic=(Traffic("all-reduce", ("f16",), 2, 8000 * MB, 1000 * MB, 0.25, 0.125),),
            plan=SimpleNamespace(bytes_per_device=750 * MB),
            host_bytes=0,
            tokens_per_second=1234.0,
            mfu=0.5,
            compile_seconds=1.0,
        )


def affine(row: int, rest: int = 4000) -> Callable[[int], int]:
    return lambda micro: (rest + row * micro) * MB


@pytest.mark.parametrize(("start", "row"), [(1, 7), (400, 7), (8, 157), (400, 9000)])
def test_the_search_finds_the_largest_in_few_compiles(start, row):
    study = FakeStudy(affine(row))
    found = find_largest(study, PLAIN, start=start)
    assert found.micro == 20_000 // row
    assert found.fitting.fits
    assert not found.above.fits
    assert {found.micro, found.micro + 1} <= set(found.compiled)
    assert found.row_bytes == row * MB
    assert len(study.asked) == len(found.compiled) <= 12


def test_the_search_ends_where_not_one_row_fits():
    found = find_largest(FakeStudy(affine(1, rest=30_000)), PLAIN, start=8)
    assert found.micro == 0
    assert found.fitting is None
    with pytest.raises(ValueError, match="start=0: give the micro-batch"):
        find_largest(FakeStudy(affine(1)), PLAIN, start=0)


def sections() -> list[Section]:
    return [make(lambda setup: FakeStudy(affine(400))) for make in published.SECTIONS.values()]


def test_every_row_says_what_was_published_what_was_computed_and_why():
    found = sections()
    fused = 10 if importlib.util.find_spec("tokamax") else 7
    assert [len(each.rows) for each in found] == [3, 2, 5, 4, fused]
    for each in found:
        assert each.source
        assert each.ours
        for row in each.rows:
            assert len(row.cells) == len(HEADINGS)
            assert all(row.cells), row
    pair = found[1].rows
    assert (pair[0].published, pair[0].computed) == ("8", "50")
    assert pair[0].detail == (
        "24.0 of 24.0 GB: model states 1.0, activations and the rest 23.0; 400 MB a row; "
        "at 51 it takes 24.4"
    )
    scaled = found[2].rows[4]
    assert (scaled.case, scaled.published, scaled.computed) == ("128 GPUs", "375", "50")
    assert scaled.detail.startswith(
        "2.00 s a step, 125 ms of them waiting; sends 7.0 GB inside its node, 1.0 GB to others"
    )
    assert "published 76%, computed 100%. Of the all-reduce between hosts 125 of 250" in scaled.why
    assert "of the rate on 8: published 97.7%, computed 100.0%" in found[3].rows[1].why
