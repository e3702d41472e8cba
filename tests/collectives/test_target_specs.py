"""Gradients traced back to the equations that make them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxprs import abstract, the

import zerojax
from zerojax.collectives import target_specs
from zerojax.graph.reach import dependent
from zerojax.trace.marks import GRADIENT
from zerojax.xla import jaxprs

MESH = zerojax.mesh()


def reached(function: Callable[..., Any], *shapes: tuple[int, ...], spec: Any = None) -> Any:
    """(primitive, spec) of each equation that makes a wanted result, and the jaxpr."""
    closed = jax.make_jaxpr(function)(*abstract(*shapes))
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    outs = [spec] + [None] * (len(jaxpr.outvars) - 1)
    wants = target_specs.trace_back(jaxpr, outs, MESH)
    made = [(e.primitive.name, wants[v]) for e in jaxpr.eqns for v in e.outvars if v in wants]
    return made, wants, jaxpr


def cut(x: jax.Array, *spec: str | None) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec(*spec)))


def test_not_from_a_constraint_of_an_activation() -> None:
    """It lies in pieces as it is made; wanted unsharded first, all of it would be gathered."""
    made, _, _ = reached(lambda x, y: jnp.tanh(cut(x @ y, "data")), (4, 8), (8, 16))
    assert made == []


def stacked(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])


def backward_scan(jaxpr: Any) -> Any:
    return [e for e in jaxpr.eqns if e.primitive.name == "scan"][-1]


def test_a_stack_cut_along_its_layers_is_not_cut_within_the_loop() -> None:
    _, wants, jaxpr = reached(jax.grad(stacked), (8, 16, 16), (4, 16), spec=("data", None, None))
    eqn = backward_scan(jaxpr)
    loop = jaxprs.scan_parts(eqn)
    want = target_specs.of_scan_body(loop, [wants.get(v) for v in eqn.outvars])
    assert not any(want[loop.carry :])


def test_the_spec_of_a_constraint_that_leaves_a_dimension_to_xla() -> None:
    left = NamedSharding(MESH, PartitionSpec(PartitionSpec.UNCONSTRAINED, "data"))
    jaxpr = jax.make_jaxpr(lambda x: lax.with_sharding_constraint(x, left))(*abstract((8, 8)))
    assert target_specs.spec_of(the(jaxpr, "sharding_constraint")) == (None, "data")


def test_a_gradients_own_constraint_has_the_axes_that_zero_takes_as_one() -> None:
    mesh = zerojax.mesh(axes={"data": 4, "seq": 2})
    placed = NamedSharding(mesh, PartitionSpec(None, ("data", "seq")))

    def step(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(checkpoint_name(x, GRADIENT), placed)

    jaxpr = jax.make_jaxpr(step)(jnp.ones((8, 8))).jaxpr
    wants = target_specs.trace_back(jaxpr, [None], mesh)
    assert wants[jaxpr.eqns[0].outvars[0]] == (None, "data+seq")


def test_a_gradient_is_reduced_unless_its_target_ends_at_an_argument_or_a_choice() -> None:
    def program(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        product = x.T @ x
        chosen = jax.lax.cond(w[0, 0] > 0, lambda: product, lambda: 2 * product)
        return jnp.tanh(product) + w, chosen, jnp.clip(product, -1, 1), product.T + chosen

    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(program)(*abstract((8, 8), (8, 8))))
    by_rows = dependent(jaxpr, [True, False])
    found = [
        target_specs.is_reduced(jaxpr, v, ("data", None), MESH, lambda v: by_rows.get(v, False))
        for v in jaxpr.outvars
    ]
    assert found == [True, False, False, False]
