"""Specs as tuples."""

import math
from typing import Any

import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from jaxprs import Spec

import zerojax
from zerojax.plan import layout

MESH = zerojax.mesh(axes={"data": 4, "model": 2})


@pytest.mark.parametrize(
    ("spec", "ndim", "full"),
    [
        (None, 2, (None, None)),
        (PartitionSpec(), 0, ()),
        (PartitionSpec("data"), 3, ("data", None, None)),
        (PartitionSpec(None, ("data", "model")), 2, (None, ("data", "model"))),
        (("model", None), 2, ("model", None)),
        (PartitionSpec(("data",), PartitionSpec.UNCONSTRAINED, ()), 3, ("data", None, None)),
    ],
)
def test_full(spec: Any, ndim: int, full: Spec) -> None:
    assert layout.full(spec, ndim) == full


@pytest.mark.parametrize(
    ("entry", "axes", "parts"),
    [
        (None, (), 1),
        ("data", ("data",), 4),
        ("model", ("model",), 2),
        (("data", "model"), ("data", "model"), 8),
        (PartitionSpec.UNCONSTRAINED, (), 1),
    ],
)
def test_one_entry(entry: Any, axes: tuple[str, ...], parts: int) -> None:
    assert layout.axes(entry) == axes
    assert layout.parts(entry, MESH) == parts


@pytest.mark.parametrize(
    ("spec", "whole"),
    [
        ((None, "data"), (None, None)),
        (("model", "data"), ("model", None)),
        ((("data", "model"), None), ("model", None)),
        ((("model", "data"), None), ("model", None)),
        ((("data",), "model"), (None, "model")),
        ((None,), (None,)),
    ],
)
def test_without(spec: Spec, whole: Spec) -> None:
    assert layout.without(spec, "data") == whole


@pytest.mark.parametrize(
    ("spec", "dimension", "cut"),
    [
        ((None, "model"), 0, ("data", "model")),
        ((None, "model"), 1, (None, ("model", "data"))),
        ((("a", "model"),), 0, (("a", "model", "data"),)),
    ],
)
def test_within(spec: Spec, dimension: int, cut: Spec) -> None:
    """The axis that was there cuts into the larger pieces."""
    assert layout.within(spec, dimension, "data") == cut
    assert layout.without(cut, "data") == spec


def test_piece() -> None:
    assert layout.shard_shape((24, 6, 7), (("model", "data"), "model", "data"), MESH) == (3, 3, 2)


SEQ = AbstractMesh((6, 2), ("data", "seq"))


@pytest.mark.parametrize(
    ("spec", "separate"),
    [
        (("data+seq", None), (("data", "seq"), None)),
        ((None, ("model", "data+seq")), (None, ("model", "data", "seq"))),
        (("data+seq:(1)3", "data+seq:(3)4"), ("data:(1)3", ("data:(3)2", "seq"))),
        (("data+seq:(6)2",), ("seq",)),
        (("model", None), ("model", None)),
    ],
)
def test_axes_that_are_taken_as_one(spec: Spec, separate: Spec) -> None:
    mesh = AbstractMesh((6, 2, 2), ("data", "seq", "model"))
    assert layout.separate(spec, mesh) == separate
    assert layout.separable(spec, mesh)
    assert layout.without(spec, "data+seq") == layout.without(separate, "data+seq")
    assert math.prod(layout.parts(e, mesh) for e in spec) == math.prod(
        layout.parts(e, mesh) for e in separate
    )


def test_parts_across_both_axes() -> None:
    """Four of twelve devices are no part of six and a part of two."""
    assert not layout.separable(("data+seq:(1)4", "data+seq:(4)3"), SEQ)
    assert layout.join_axes((("data", "seq"), "data"), "data+seq", SEQ) == ("data+seq", "data")
    assert layout.join_axes(("data",), "data", SEQ) == ("data",)
