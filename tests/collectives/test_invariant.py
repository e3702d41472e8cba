"""Everything that zerojax inserts into a step is an identity, for every program and stage.

The program that zerojax emits for a step and the user's step itself are traced, not compiled, and
evaluated on the same numbers in exact arithmetic (``tests/exact.py``): every parameter, optimizer
state and result has to be equal. An inserted sum, one that is left out where partial sums are added
up, a wrong operand or layer, a cast too early all fail.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from emitted import SOURCES, differing, emitted
from programs import PROGRAMS

import zerojax
from zerojax.plan import rule

SHARDED_BY_USERS = {name: program.axes for name, program in PROGRAMS.items() if program.axes}


@pytest.fixture(autouse=True)
def most_are_gathered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases are gathered together, as in large models; matrices not, however small."""
    monkeypatch.setattr(rule, "SMALL", 63)


def cells() -> Iterator[Any]:
    """Every program at every stage; one of three at one stage in the fast tier. As many others are
    in the fast tier of ``tests/accumulation/test_invariant.py``."""
    for i, name in enumerate(name for name in SOURCES if name not in SHARDED_BY_USERS):
        for stage in (1, 2, 3):
            marks = () if i % 3 == 0 and stage == (3, 3, 1, 2)[i // 3 % 4] else pytest.mark.sweep
            yield pytest.param(name, stage, marks=marks)


@pytest.mark.parametrize(("name", "stage"), list(cells()))
def test_inserted_is_an_identity(name: str, stage: int) -> None:
    assert differing(name, emitted(name, stage=stage)) == []


FEATURES: dict[str, dict[str, Any]] = {
    "no overlap": {"stage": 3, "overlap_comm": False},
    "replica groups": {"stage": 3, "mesh": zerojax.mesh(replicas=2)},
    "replica groups, stage 2": {"stage": 2, "mesh": zerojax.mesh(replicas=4)},
    "partitions": {"stage": 3, "zero_hpz_partition_size": 4},
    "gathered": {"stage": 3, "stage3_max_live_parameters": 10**9},
    "model axis": {"stage": 3, "mesh": zerojax.mesh(axes={"data": 4, "model": 2})},
    "micro-batches in groups": {
        "stage": 3, "mesh": zerojax.mesh(replicas=2), "gradient_accumulation_steps": 4,
    },
}  # fmt: skip


def feature_cells() -> Iterator[Any]:
    """Loops that gather ahead under every feature; other programs in the sweep."""
    programs = ("layered_remat", "layered", "gpt_scan_remat", "lstm", "odd", "tables")
    for feature in FEATURES:
        for name in programs:
            marks = () if name == programs[0] else pytest.mark.sweep
            yield pytest.param(name, feature, marks=marks)


@pytest.mark.parametrize(("name", "feature"), list(feature_cells()))
def test_under_every_feature(name: str, feature: str) -> None:
    assert differing(name, emitted(name, **FEATURES[feature])) == []


@pytest.mark.parametrize(
    "name", [name for name, axes in SHARDED_BY_USERS.items() if axes == ("model",)]
)
def test_the_users_own_axis(name: str) -> None:
    assert differing(name, emitted(name, **FEATURES["model axis"])) == []
