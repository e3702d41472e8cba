"""Specs as tuples."""

from typing import Any

import pytest
from jax.sharding import PartitionSpec
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


def test_axes_of_one_device_cut_nothing() -> None:
    mesh = zerojax.mesh(axes={"data": 4, "one": 1, "model": 2})
    spec = (("one", "data"), "one", ("model", "one", "data"), None)
    assert layout.cutting(spec, mesh) == ("data", None, ("model", "data"), None)


def test_piece() -> None:
    assert layout.piece((24, 6, 7), (("model", "data"), "model", "data"), MESH) == (3, 3, 2)
