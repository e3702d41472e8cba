"""Replica groups of a mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import zerojax
from zerojax.devices.arranged import in_groups
from zerojax.devices.mesh import batch_axes, batch_devices, laid_out, shard_axis


@pytest.mark.parametrize(
    ("axes", "rows", "devices"),
    [
        ({"data": 8}, ("data",), 8),
        ({"rows": 8}, ("rows",), 8),
        ({"replica": 2, "data": 4}, ("replica", "data"), 8),
        ({"data": 4, "replica": 2}, ("data", "replica"), 8),
        ({"replica": 2, "data": 2, "model": 2}, ("replica", "data"), 4),
        ({"data": 2, "fsdp": 4}, ("data",), 2),
    ],
)
def test_the_axes_that_share_the_rows(
    axes: dict[str, int], rows: tuple[str, ...], devices: int
) -> None:
    mesh = zerojax.mesh(axes=axes)
    assert batch_axes(mesh) == rows
    assert batch_devices(mesh) == devices
    assert shard_axis(mesh) == ("rows" if "rows" in axes else "data")


@pytest.mark.parametrize("name", ["dp", "batch", "fsdp", "dcn", "replicas"])
def test_a_single_axis_has_any_name(name: str) -> None:
    mesh = Mesh(np.array(jax.devices()), (name,))
    assert shard_axis(mesh) == name
    assert zerojax.zero(stage=3, mesh=mesh).mesh.axis_names == (name,)
    assert dict(in_groups(mesh, 4).shape) == {"replica": 2, "data": 4}


def test_axes_as_text() -> None:
    mesh = zerojax.mesh(axes="replica=2, data=2,model=2")
    assert dict(mesh.shape) == {"replica": 2, "data": 2, "model": 2}
    assert laid_out(zerojax.mesh(), "replica=2,data=2,model=2") == mesh
    for text in ("", "data", "data=0", "data=4,data=2", "data=4;model=2", "8"):
        with pytest.raises(ValueError, match="give each axis once"):
            zerojax.mesh(axes=text)
    with pytest.raises(ValueError, match="data=4 x model=3 multiply out to 12"):
        laid_out(zerojax.mesh(), "data=4,model=3")
