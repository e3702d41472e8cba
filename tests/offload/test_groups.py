"""Sub-groups: each leaf once, none too large, alike where that can be."""

import itertools
import math

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.offload.groups import LARGEST, ArrayPlacement, Group, disk_chunks, groups
from zerojax.offload.separate import Cluster

MESH = zerojax.mesh(8)
REPLICATED = P()


def placed(*shape: int, spec: P = REPLICATED) -> ArrayPlacement:
    return ArrayPlacement(shape, jnp.dtype(jnp.float32), spec, "host", shape)


def clusters_of(arrays: list[ArrayPlacement], unsplit: tuple[int, ...] = ()) -> list[Cluster]:
    """One cluster an array, by shape alike."""
    return [
        Cluster((i,), (i,), i not in unsplit and bool(x.shape), f"{x.shape}{x.spec}{i in unsplit}")
        for i, x in enumerate(arrays)
    ]


def made(arrays: list[ArrayPlacement], largest: int, unsplit: tuple[int, ...] = ()) -> list[Group]:
    return groups(clusters_of(arrays, unsplit), arrays, MESH, largest)


def pieces_of(found: list[Group], i: int) -> list[tuple[int, int | None]]:
    return [(p.start, p.rows) for g in found for p in g if p.cluster.inputs == (i,)]


def size(found: Group, arrays: list[ArrayPlacement]) -> int:
    return sum((p.rows or 0) * math.prod(arrays[p.cluster.inputs[0]].rows(MESH)[1:]) for p in found)


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=6),
    st.integers(1, 3000),
    st.booleans(),
)
def test_every_row_once(shapes: list[list[int]], largest: int, sharded: bool) -> None:
    arrays = [
        placed(*(n * 8 if sharded and k == 0 else n for k, n in enumerate(shape)),
              spec=P("data") if sharded else P())
        for shape in shapes
    ]  # fmt: skip
    found = made(arrays, largest)
    assert all(found)
    for i, array in enumerate(arrays):
        rows = array.rows(MESH)
        ends = [0]
        for start, count in pieces_of(found, i):
            assert start == ends[-1]
            assert count is not None
            ends.append(start + count)
        assert ends[-1] == rows[0]
        width = math.prod(rows[1:])
        assert disk_chunks(array, MESH, largest) == [
            range(a * width, b * width) for a, b in itertools.pairwise(ends)
        ]
    for group in found:
        widest = max(math.prod(arrays[p.cluster.inputs[0]].rows(MESH)[1:]) for p in group)
        assert size(group, arrays) <= max(largest // 2, widest)
        assert len({p.cluster.inputs for p in group}) == len(group)


@pytest.mark.parametrize(
    ("rows", "most", "sizes"),
    [
        (12, 12, [12]),
        (12, 5, [4, 4, 4]),  # 5, 5, 2 would be two programs
        (13, 13, [13]),
        (13, 5, [5, 5, 3]),  # a prime: nearly alike, and no more pieces than needed
        (14, 6, [5, 5, 4]),  # 2 * 7 pieces would be too many
        (25, 6, [5, 5, 5, 5, 5]),
        (7, 1, [1] * 7),
    ],
)
def test_pieces_are_alike_where_that_costs_little(rows: int, most: int, sizes: list[int]) -> None:
    found = disk_chunks(placed(rows, 10), MESH, 2 * 10 * most)
    assert [len(piece) // 10 for piece in found] == sizes


def test_rows_are_those_of_a_device() -> None:
    sharded = placed(16, 4, spec=P("data"))
    assert sharded.local(MESH) == (2, 4)
    assert sharded.axes() == ("data",)
    assert disk_chunks(sharded, MESH, 8) == [range(4), range(4, 8)]
    stack = placed(3, 16, 8, spec=P(None, None, "data"))
    assert stack.rows(MESH) == (48, 1)


def test_unsplit_clusters_go_alone() -> None:
    arrays = [placed(4, 4), placed(400, 4), placed(4, 4), placed(4, 4)]
    found = made(arrays, 1000, unsplit=(1, 2))
    assert [sorted(p.cluster.inputs[0] for p in g) for g in found] == [[0, 3], [2], [1]]
    assert [[p.rows for p in g] for g in found] == [[4, 4], [None], [None]]


def test_a_cluster_whose_arrays_lie_differently_goes_unsplit() -> None:
    arrays = [placed(16, 4, spec=P("data")), placed(16, 4)]
    (group,) = groups([Cluster((0, 1), (0,), True, "")], arrays, MESH, 100)
    assert [p.rows for p in group] == [None]


def test_no_sub_group_is_larger_than_the_largest() -> None:
    """DeepSpeed's default of 1e9 elements would be 12 GB on the device."""
    rows = LARGEST // 1024
    found = made([placed(rows * 4, 1024)], 10**9)
    assert [p.rows for g in found for p in g] == [rows // 2] * 8


def test_equal_matrices_are_updated_together() -> None:
    """As many as give each device one; other clusters that pass unsplit alone."""
    arrays = [placed(64, 8, spec=P("data"))] * 12 + [placed(16, 8, spec=P("data"))]
    clusters = [
        Cluster((i,), (i,), False, f"{x.shape}", matrices=i != 11) for i, x in enumerate(arrays)
    ]
    for largest, most in ((100, 8), (2 * 64 * 8 * 2, 16)):
        found = groups(clusters, arrays, MESH, largest)
        sizes = sorted(len(g) for g in found)
        assert sum(sizes) == len(arrays)
        assert all(g[0].cluster.inputs[0] != 11 or len(g) == 1 for g in found)
        assert sizes[-1] == min(most, 11)
