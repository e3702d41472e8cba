"""Meshes of several axes: dimensions that the user shards, and axes of one device."""

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from equal import check, start, zero_for
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec
from programs.layouts import spec_tree

import zerojax
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


def planned(shape: tuple[int, ...], own: PartitionSpec | None, axes: dict[str, int]) -> Any:
    """The plan's leaf of one parameter."""
    params = {"w": np.zeros(shape, np.float32)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    zero = zerojax.zero(
        stage=3, mesh=zerojax.mesh(axes=axes), specs={"w": own},
        stage3_param_persistence_threshold=0,
    )  # fmt: skip
    return zero.plan(state).leaves["params"][0]


@pytest.mark.parametrize(
    ("shape", "own", "axes", "spec", "reason"),
    [
        ((6, 16), P("tensor"), MESHES[0], P("tensor", "data"), ""),
        ((64, 6), P("tensor"), MESHES[0], P(BOTH), ""),
        # A free dimension goes first, however small.
        ((64, 8), P("tensor"), MESHES[0], P("tensor", "data"), ""),
        ((16, 64), P("fsdp", "tensor"), MESHES[2], P("fsdp", BOTH), ""),
        ((64,), P(("fsdp", "tensor")), MESHES[2], P(("fsdp", "tensor", "data")), ""),
        ((64, 8), P("fsdp", "tensor"), MESHES[1], P("data"), ""),
        ((7, 9), None, MESHES[0], P(), "no dimension of (7, 9) is divisible by 4"),
        (
            (12, 7), P("tensor"), MESHES[0], P("tensor"),
            "no dimension of (6, 7), a shard of (12, 7), is divisible by 4",
        ),
        ((7, 9), P("fsdp", "tensor"), MESHES[1], P(), "no dimension of (7, 9) is divisible by 8"),
        ((8, 8), P("data"), MESHES[0], P("data"), "its own spec takes the 'data' axis"),
    ],
)  # fmt: skip
def test_which_dimension_is_cut(
    shape: tuple[int, ...], own: Any, axes: dict[str, int], spec: Any, reason: str
) -> None:
    leaf = planned(shape, own, axes)
    assert (leaf.spec, leaf.reason) == (spec, reason)
    devices = np.prod([axes[a] for e in spec for a in ((e,) if isinstance(e, str) else e or ())])
    assert leaf.bytes_per_device == leaf.bytes // int(devices)


def test_an_axis_twice_in_a_spec_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"params\['w'\].*names the axis 'tensor' twice"):
        planned((8, 8), P("tensor", "tensor"), MESHES[0])


def test_an_explicit_mesh_that_is_not_set_is_automatic() -> None:
    mesh = jax.make_mesh((4, 1, 2), ("data", "fsdp", "tensor"))
    check("specs_factored", mesh=mesh)
