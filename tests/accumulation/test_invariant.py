"""Four micro-batches compute what the user's step computes from all rows at once.

Traced and evaluated in exact arithmetic, without a compile, see ``tests/exact.py``: there a sum by
micro-batch is the same number.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from emitted import SOURCES, differing, emitted
from programs import PROGRAMS, Kind

from zerojax.plan import rule

# A convolution is a hash of all its rows, see ``tests/exact.py``.
CONVOLVED = {"tables_convolved"}


@pytest.fixture(autouse=True)
def most_are_gathered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases are gathered together, as in large models; matrices not, however small."""
    monkeypatch.setattr(rule, "SMALL", 63)


def cells() -> Iterator[Any]:
    """Every program at every stage; one of three at one stage in the fast tier. As many others are
    in the fast tier of ``tests/collectives/test_invariant.py``."""
    for i, name in enumerate(SOURCES):
        program = PROGRAMS.get(name)
        equal = program is None or (program.accumulated.kind is Kind.EQUAL and not program.axes)
        for stage in (1, 2, 3) if equal and name not in CONVOLVED else ():
            marks = () if i % 3 == 1 and stage == (3, 2)[i // 3 % 2] else pytest.mark.sweep
            yield pytest.param(name, stage, marks=marks)


@pytest.mark.parametrize(("name", "stage"), list(cells()))
def test_accumulated_is_the_same(name: str, stage: int) -> None:
    program = emitted(name, stage=stage, gradient_accumulation_steps=4)
    assert differing(name, program) == []
