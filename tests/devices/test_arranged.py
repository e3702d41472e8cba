"""Pipeline stages and replica groups of a config."""

import numpy as np

import zerojax
from zerojax.devices.arranged import in_groups, in_stages


def test_a_group_is_of_neighbours() -> None:
    plain, grouped = zerojax.mesh(), zerojax.mesh(replicas=2)
    assert np.array_equal(grouped.devices.reshape(-1), plain.devices)
    assert in_groups(plain, 4) == grouped
    assert in_groups(grouped, 4) is grouped


def test_groups_beside_another_axis() -> None:
    mesh = in_groups(zerojax.mesh(axes={"model": 2, "data": 4}), 2)
    assert dict(mesh.shape) == {"model": 2, "replica": 2, "data": 2}
    assert [d.id for d in mesh.devices[0, 1]] == [2, 3]


def test_stages_are_outermost() -> None:
    given = zerojax.mesh(axes={"model": 2, "data": 4})
    mesh = in_stages(given, 2)
    assert dict(mesh.shape) == {"stage": 2, "model": 2, "data": 2}
    assert [d.id for d in mesh.devices[1, 0]] == [2, 3]
    assert in_stages(given, None) is in_stages(given, 1) is given
    assert in_stages(mesh, 4) is mesh


def test_stages_of_a_config() -> None:
    assert dict(zerojax.zero({"pipeline": {"stages": 4}}).mesh.shape) == {"stage": 4, "data": 2}
    zero = zerojax.zero(stage=3, pipeline_stages=2, mics_shard_size=2)
    assert dict(zero.mesh.shape) == {"stage": 2, "replica": 2, "data": 2}
