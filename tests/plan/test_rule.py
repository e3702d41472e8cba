"""Which dimension of an array is sharded, and why one is replicated."""

import math
from dataclasses import replace
from typing import Any

import pytest
from jax.sharding import AbstractMesh
from jaxprs import Spec

import zerojax
from zerojax.plan import layout
from zerojax.plan.rule import SMALL, ShardSpec, check_own_spec, is_small, shard_spec

CONFIG = zerojax.ZeroConfig(stage=3, stage3_param_persistence_threshold=0)
MESH = zerojax.mesh(axes={"data": 4, "model": 2})


@pytest.mark.parametrize(
    ("shape", "own", "spec"),
    [
        ((8, 16), (None, None), (None, "data")),
        ((16, 8), (None, None), ("data", None)),
        ((8, 8), (None, None), ("data", None)),  # the first of two alike
        ((8, 18), (None, None), ("data", None)),  # the largest that divides
        ((4,), (None,), ("data",)),
        # A free dimension before one that the user's spec shards, however large that is.
        ((8, 64), (None, "model"), ("data", "model")),
        # Else one of those again, by the size of a piece.
        ((6, 64), (None, "model"), (None, ("model", "data"))),
        ((16, 24), ("model", None), ("model", "data")),
    ],
)
def test_the_largest_free_dimension_that_divides(
    shape: tuple[int, ...], own: Spec, spec: Spec
) -> None:
    assert shard_spec(shape, own, MESH, CONFIG) == ShardSpec(spec, "")


@pytest.mark.parametrize(
    ("devices", "partition", "shape", "spec"),
    [
        # The devices of a partition tell the largest pieces apart.
        (24, 8, (48, 8), (("data:(3)8", "data:(1)3"), None)),
        # Of two dimensions one is padded, and not where a partition shares it.
        (24, 8, (4096, 11008), ("data:(1)3", "data:(3)8")),
        (24, 8, (11008, 4096), ("data:(3)8", "data:(1)3")),
        (1024, 8, (1600, 1600), ("data:(1)32", ("data:(128)8", "data:(32)4"))),
        (24, 4, (36, 10, 26), (("data:(6)2", "data:(1)6"), "data:(12)2", None)),
        # Pieces that the padding moves: as without partitions.
        (24, 8, (10007,), ("data",)),
        (8, 8, (16, 64), (None, "data")),
    ],
)
def test_the_order_of_pieces_in_partitions(
    devices: int, partition: int, shape: tuple[int, ...], spec: Spec
) -> None:
    mesh: Any = AbstractMesh((devices,), ("data",))
    config = replace(CONFIG, zero_hpz_partition_size=partition)
    assert shard_spec(shape, (None,) * len(shape), mesh, config) == ShardSpec(spec, "")


@pytest.mark.parametrize(
    ("shape", "own", "smallest", "reason"),
    [
        ((7, 9), (None, None), 0, "no dimension of (7, 9) is divisible by 4"),
        ((), (), 0, "no dimension of () is divisible by 4"),
        ((0, 3), (None, None), 0, "no dimension of (0, 3) is divisible by 4"),
        (
            (7, 12),
            (None, "model"),
            0,
            "no dimension of (7, 6), a shard of (7, 12), is divisible by 4",
        ),
        ((8, 8), ("data", None), 0, "its own spec takes the 'data' axis"),
        ((8, 8), (("model", "data"), None), 0, "its own spec takes the 'data' axis"),
        ((8, 8), (None, None), 65, "below stage3_param_persistence_threshold (65 elements)"),
    ],
)
def test_replicated_with_a_reason(
    shape: tuple[int, ...], own: Spec, smallest: int, reason: str
) -> None:
    config = replace(CONFIG, stage3_param_persistence_threshold=smallest)
    assert shard_spec(shape, own, MESH, config)[:2] == (own, reason)


@pytest.mark.parametrize(
    ("shape", "devices", "spec"),
    [
        ((1600, 1600), 1024, ("data:(1)32", "data:(32)32")),  # by factors
        ((60, 50), 8, ("data:(1)4", "data:(4)2")),
        ((6, 20), 8, (None, None)),  # tiny
        ((4096, 11008), 24, ("data", None)),  # 4104 rows, of which 8 are zeros
        ((50257, 1600), 24, (None, "data")),
        ((4096, 4096), 1000, ("data:(1)8", "data:(8)125")),  # factors, and padding
        ((32, 4096, 11008), 24, (None, "data", None)),  # the layers of a stack are left alone
        ((24, 4096, 11008), 24, (None, "data", None)),
        ((1600,), 24, ("data:(3)8",)),  # small: replicated over the other 3
        ((5, 7), 24, (None, None)),
    ],
)
def test_where_no_dimension_divides(shape: tuple[int, ...], devices: int, spec: Spec) -> None:
    mesh: Any = AbstractMesh((devices,), ("data",))
    assert shard_spec(shape, (None,) * len(shape), mesh, CONFIG).spec == spec


def gpt2_xl(vocabulary: int) -> list[tuple[int, ...]]:
    d = 1600
    layer = [(d, 3 * d), (3 * d,), (d, d), (d, 4 * d), (4 * d,), (4 * d, d), *[(d,)] * 6]
    return [*layer * 48, (vocabulary, d), (1024, d), (d,), (d,)]


def llama(layers: int, d: int, wide: int, heads: int, vocabulary: int) -> list[tuple[int, ...]]:
    layer = [(d, d), (d, heads), (d, heads), (d, d), (d, wide), (d, wide), (wide, d), (d,), (d,)]
    return [*layer * layers, (vocabulary, d), (d, vocabulary), (d,)]


def stacked(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [(shapes.count(s), *s) if shapes.count(s) > 8 else s for s in dict.fromkeys(shapes)]


@pytest.mark.parametrize("devices", [3, 5, 6, 7, 12, 24, 48, 64, 96, 256, 1000, 1024])
@pytest.mark.parametrize("vocabulary", [50257, 32128, 151936])
def test_within_five_percent_of_an_equal_share(devices: int, vocabulary: int) -> None:
    """Elements of the fullest device over all elements divided by the devices; here 1.02."""
    mesh: Any = AbstractMesh((devices,), ("data",))
    models = [
        gpt2_xl(vocabulary),
        llama(32, 4096, 11008, 4096, vocabulary),
        llama(80, 8192, 28672, 1024, vocabulary),
    ]
    for shapes in [*models, *map(stacked, models)]:
        specs = [shard_spec(s, (None,) * len(s), mesh, CONFIG).spec for s in shapes]
        pieces = [layout.shard_shape(s, spec, mesh) for s, spec in zip(shapes, specs, strict=True)]
        assert sum(map(math.prod, pieces)) * devices <= 1.05 * sum(map(math.prod, shapes))


def test_an_axis_of_one_device_shards_nothing() -> None:
    found = shard_spec((8, 8), (None, None), zerojax.mesh(axes={"data": 1, "model": 8}), CONFIG)
    assert found == ShardSpec((None, None), "the 'data' axis has one device")


@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        (
            (8,),
            ("data", None),
            r"params\['w'\]: its PartitionSpec .* does not fit its shape \(8,\)",
        ),
        ((8, 8), ("data", "data"), "names the axis 'data' twice"),
        ((8, 8), ("other", None), "names the axis 'other', but the mesh has"),
        ((8, 6), (None, "data"), r"dimension 1 of \(8, 6\) is not divisible by the 4 devices"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(shape: Any, spec: Spec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_own_spec("params['w']", shape, spec, MESH)


@pytest.mark.parametrize("spec", [("replica", None), (None, ("data", "replica"))])
def test_a_spec_over_replica_groups_is_refused(spec: Spec) -> None:
    says = r"params\['w'\]: .*names the axis 'replica'.*zerojax itself places.*: remove it"
    with pytest.raises(ValueError, match=says):
        check_own_spec("params['w']", (8, 8), spec, zerojax.mesh(replicas=2))


@pytest.mark.parametrize(
    ("shape", "spec", "small"),
    [
        ((SMALL,), ("data",), True),
        ((SMALL + 8,), ("data",), False),
        ((8, 8), ("data", "model"), False),
        ((8, 8), (("data", "model"), None), False),
        ((8, 8), (None, None), False),
    ],
)
def test_which_are_small(shape: Any, spec: Any, small: bool) -> None:
    assert is_small(shape, spec, "data") is small
