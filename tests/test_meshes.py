"""Meshes of several axes: dimensions that the user shards, and axes of one device."""

import re

import jax
import pytest
from equal import check, start, zero_for
from jax.sharding import PartitionSpec
from programs.layouts import spec_tree

from zerojax.plan import layout

pytestmark = pytest.mark.usefixtures("quick_compile", "in_float64")

P = PartitionSpec
MESHES = (
    {"data": 4, "fsdp": 1, "tensor": 2},
    {"data": 8, "fsdp": 1, "tensor": 1},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"replica": 2, "data": 2, "fsdp": 1, "tensor": 2},
)
BOTH = ("tensor", "data")
# Of each mesh how ZeRO shards up [10, 32] and down [32, 12], which the model shards as
# P("fsdp", "tensor") and P("tensor", "fsdp"), the bias [32] and the head [12, 4].
CUTS = (
    (P(None, BOTH), P("tensor", "data"), P(BOTH), P("data")),
    (P(None, "data"), P("data"), P("data"), P()),
    (P("fsdp", BOTH), P(BOTH, "fsdp"), P(BOTH), P("fsdp", "data")),
    (P("data", "tensor"), P("tensor", "data"), P(BOTH), P("data")),
)


SHAPES = {"up/kernel": (10, 32), "down/kernel": (32, 12), "up/bias": (32,), "head/kernel": (12, 4)}


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("form", ["logical_factored", "nnx_factored", "specs_factored"])
def test_what_the_model_shards_is_sharded_again(
    form: str, stage: int, axes: dict[str, int]
) -> None:
    zero = zero_for(stage, axes=axes, specs=spec_tree() if form == "specs_factored" else None)
    leaves = zero.plan(start(form, "float32")).leaves["params"]
    specs = {"/".join(re.findall(r"(up|down|head|kernel|bias)", x.path)): x.spec for x in leaves}
    for (name, shape), want in zip(SHAPES.items(), CUTS[MESHES.index(axes)], strict=True):
        planned, wanted = (layout.sharding(zero.mesh, spec) for spec in (specs[name], want))
        assert planned.is_equivalent_to(wanted, len(shape)), (name, specs[name], want)


def test_an_explicit_mesh_that_is_not_set_is_automatic() -> None:
    mesh = jax.make_mesh((4, 1, 2), ("data", "fsdp", "tensor"))
    check("specs_factored", mesh=mesh)
