"""The table of what blocks keep, from forecasts that are made up."""

from types import SimpleNamespace
from typing import Any

from benchmarks.remat import HEADINGS, table
from zerojax.foresight.choice import Choice, Remat
from zerojax.foresight.trials import Trial

GB = 10**9


def trial(
    remat: Remat, peak: int, seconds: float, again: int = 0, limit: int | None = 65 * GB
) -> Trial:
    forecast: Any = SimpleNamespace(
        peak=SimpleNamespace(bytes=peak * GB, again=again), fits=peak < 80, host_bytes=0,
        seconds=seconds, tokens_per_second=1 / seconds, mfu=0.5, recomputes=again > 0,
        recomputes_above=limit, bytes_again=again * GB, seconds_again=again / 100,
    )  # fmt: skip
    return Trial(Choice(stage=3, micro=1, remat=remat), forecast)


def test_the_proposed_is_the_fastest_in_which_xla_repeats_nothing() -> None:
    found = [
        trial(False, 90, 0.5), trial(True, 20, 2.0), trial("dots", 70, 1.0, again=3),
        trial("names:a", 30, 1.01),
    ]  # fmt: skip
    made = table(2, found)
    assert made.title == "2 of 8192 tokens a device; XLA repeats above 65.0 GB"
    without_limit = table(1, [trial(True, 20, 2.0, limit=None)])
    assert without_limit.title == "1 of 8192 tokens a device; XLA repeats nothing"
    headings, *lines = made.rows
    assert headings == HEADINGS
    assert [line[0] for line in lines] == [
        "everything",
        "only the input (remat)",
        "dots",
        "names:a",
    ]
    assert [line[1] for line in lines] == ["90.0, does not fit", "20.0", "70.0", "30.0"]
    assert [line[6] for line in lines] == ["", "", "3, 3.0 GB, 30 ms", ""]
    assert [line[7] for line in lines] == ["", "", "20.0", "99.0"]
    assert [line[8] for line in lines] == ["", "", "", "proposed"]
