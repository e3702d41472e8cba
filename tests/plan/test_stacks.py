"""Stacks of layers in the plan of a mesh with pipeline stages."""

import functools

import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax
from zerojax.foresight.attribution import ParameterShapes

PARAMS = {
    "table": jnp.zeros((24, 4)),
    "layers": {"w": jnp.zeros((8, 16, 24)), "b": jnp.zeros((8, 24))},
}


def test_stages_share_the_layers() -> None:
    mesh = zerojax.mesh(axes={"stage": 4, "data": 2})
    zero = zerojax.zero(stage=1, mesh=mesh, stage3_param_persistence_threshold=0)
    create = functools.partial(TrainState.create, apply_fn=None, params=PARAMS, tx=optax.sgd(0.1))
    plan = zero.plan(zero.abstract_state(create))
    title = str(plan).splitlines()[0]
    assert title.startswith("ZeRO stage 1 over 2 devices (axis 'data'), 4 pipeline stages")
    assert plan.params["layers"]["w"][0] == plan.params["layers"]["b"][0] == "stage"
    assert "stage" not in plan.params["table"]
    # A stage's sums of gradients have the shape of its layers.
    assert (2, 16, 24) in ParameterShapes.of(plan).params
