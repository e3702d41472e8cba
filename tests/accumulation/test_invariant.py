"""Four micro-batches compute what the user's step computes from all rows at once.

Traced and evaluated in exact arithmetic, without a compile, see ``tests/exact.py``: there a sum by
micro-batch is the same number.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from cases import CASES, PARTITIONED
from emitted import SOURCES, differing, emitted
from programs import PROGRAMS, Kind

from zerojax.plan import rule

# They draw noise, or take statistics, for each micro-batch, or need a mesh of their own.
OTHERS = {name for name, case in CASES.items() if not case.averages} - {"masked"} | {*PARTITIONED}


@pytest.fixture(autouse=True)
def most_are_gathered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases are gathered together, as in large models; matrices not, however small."""
    monkeypatch.setattr(rule, "SMALL", 63)


def cells() -> Iterator[Any]:
    """Every program at every stage; one of three at one stage in the fast tier. As many others are
    in the fast tier of ``tests/collectives/test_invariant.py``."""
    for i, name in enumerate(SOURCES):
        equal = name not in PROGRAMS or PROGRAMS[name].accumulated.kind is Kind.EQUAL
        for stage in (1, 2, 3) if equal and name not in OTHERS else ():
            marks = () if i % 3 == 1 and stage == (3, 2)[i // 3 % 2] else pytest.mark.sweep
            yield pytest.param(name, stage, marks=marks)


@pytest.mark.parametrize(("name", "stage"), list(cells()))
def test_accumulated_is_the_same(name: str, stage: int) -> None:
    program = emitted(name, stage=stage, gradient_accumulation_steps=4)
    assert differing(name, program) == []
