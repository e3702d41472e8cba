"""How specs follow equations that move elements."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxprs import Spec, abstract

import zerojax
from zerojax.collectives import propagate
from zerojax.graph.search import equations

MESH = zerojax.mesh(axes={"data": 4, "model": 2})

Layout = tuple[Callable[[jax.Array], jax.Array], tuple[int, ...], Spec, Spec | None]


def one_of(x: jax.Array, entries: int) -> jax.Array:
    """A lookup of so many entries, as ``jnp.take`` has it."""
    indices = np.ones((1,) if entries == 1 else (entries, 1), np.int32)
    offset = tuple(range(x.ndim - 1) if entries == 1 else range(1, x.ndim))
    numbers = lax.GatherDimensionNumbers(offset, (0,), (0,))
    return lax.gather(x, indices, numbers, (1, *x.shape[1:]), mode="clip")


def added_to(entries: int, *window: int) -> Callable[[jax.Array], jax.Array]:
    """What adds so many entries to an array of zeros."""
    offset = tuple(range(len(window)) if entries == 1 else range(1, len(window) + 1))
    numbers = lax.ScatterDimensionNumbers(offset, (0,), (0,))
    indices = np.ones((1,) if entries == 1 else (entries, 1), np.int32)
    zeros = np.zeros((4, *window), np.float32)
    return lambda x: lax.scatter_add(zeros, indices, x, numbers)


FOLLOWS: list[Layout] = [
    (jnp.transpose, (8, 16), ("data", None), (None, "data")),
    (lambda x: x.transpose(1, 2, 0), (8, 16, 4), ("data", None, "model"), (None, "model", "data")),
    (lambda x: x.squeeze(0), (1, 8, 16), (None, "data", None), ("data", None)),
    (lambda x: x[None], (8, 16), ("data", "model"), (None, "data", "model")),
    (lambda x: lax.broadcast_in_dim(x, (8, 1), (0,)), (8,), ("data",), ("data", None)),
    # A true broadcast is a use.
    (lambda x: jnp.broadcast_to(x, (3, 8)), (8,), ("data",), None),
    # The outermost part of a merged or split dimension carries the cut.
    (lambda x: x.reshape(128), (8, 16), ("data", None), ("data",)),
    (lambda x: x.reshape(128), (8, 16), (None, "data"), None),
    (lambda x: x.reshape(4, 2, 16), (8, 16), ("data", None), ("data", None, None)),
    (lambda x: x.reshape(2, 4, 16), (8, 16), ("data", None), None),
    (lambda x: x.reshape(8, 4, 4), (8, 16), (None, "data"), (None, "data", None)),
    (lambda x: x.reshape(8, 2, 8), (8, 16), (None, "data"), None),
    (lambda x: x.reshape(8, 4, 4), (8, 16), ("model", "data"), ("model", "data", None)),
    (lambda x: x.reshape(1, 8, 16), (8, 16), ("data", "model"), (None, "data", "model")),
    (lambda x: x.reshape(32, 8), (8, 4, 8), ("data", None, "model"), ("data", "model")),
    (lambda x: x.reshape(16, 16), (8, 32), ("data", None), ("data", None)),
    # Cut twice: both cuts move, or neither.
    (jnp.transpose, (8, 16), (("model", "data"), None), (None, ("model", "data"))),
    (lambda x: x.reshape(128), (8, 16), (("model", "data"), None), (("model", "data"),)),
    (
        lambda x: x.reshape(8, 8, 4),
        (8, 32),
        (None, ("model", "data")),
        (None, ("model", "data"), None),
    ),
    (lambda x: x.reshape(8, 2, 16), (8, 32), (None, ("model", "data")), None),
    # A part of dimensions that no axis shards.
    (lambda x: lax.slice_in_dim(x, 1, 3), (8, 16), (None, "data"), (None, "data")),
    (lambda x: lax.slice_in_dim(x, 1, 3), (8, 16), ("data", None), None),
    (lambda x: lax.slice(x, (0, 0), (8, 16), (1, 2)), (8, 16), (None, "data"), None),
    (lambda x: lax.slice(x, (0, 0), (8, 16), (2, 1)), (8, 16), (None, "data"), (None, "data")),
    (lambda x: lax.dynamic_slice(x, (1, 0), (1, 16)), (8, 16), (None, "data"), (None, "data")),
    (lambda x: lax.dynamic_slice(x, (0, 1), (8, 4)), (8, 16), (None, "data"), None),
    (lambda x: one_of(x, 1), (4, 8, 16), (None, "data", None), ("data", None)),
    (lambda x: one_of(x, 1), (4, 8, 16), ("data", None, None), None),
    (lambda x: one_of(x, 2), (4, 8, 16), (None, "data", None), None),  # rows of a table
]


@pytest.mark.parametrize(("function", "shape", "spec", "follows"), FOLLOWS)
def test_from_operand_to_result(
    function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], spec: Spec, follows: Any
) -> None:
    (eqn,) = jax.make_jaxpr(function)(*abstract(shape)).eqns
    assert propagate.forward(eqn, spec, MESH) == follows
    if follows is not None:  # which is to say that nothing has to move between devices
        jitted = jax.jit(function, in_shardings=lying(spec), out_shardings=lying(follows))
        text = jitted.lower(*abstract(shape)).compile().as_text()
        assert not [c for c in ("all-gather", "all-to-all", "permute", "all-reduce") if c in text]


@pytest.mark.parametrize(
    ("function", "shape", "spec", "follows"),
    [case for case in FOLLOWS if case[3] is not None and "broadcast" not in str(case[0])],
)
def test_from_result_to_operand(
    function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], spec: Spec, follows: Spec
) -> None:
    (eqn,) = jax.make_jaxpr(function)(*abstract(shape)).eqns
    if eqn.primitive.name in propagate.BACKWARD:
        assert propagate.BACKWARD[eqn.primitive.name](eqn, follows, MESH) == spec


ZEROS = np.zeros((8, 16), np.float32)
INTO: list[tuple[Callable[..., Any], list[tuple[int, ...]], Spec, dict[int, Spec]]] = [
    (lambda x: jnp.pad(x, ((1, 2), (0, 0))), [(5, 16)], (None, "data"), {0: (None, "data")}),
    (lambda x: jnp.pad(x, ((1, 2), (0, 0))), [(5, 16)], ("data", None), {}),
    (lambda x: lax.pad(x, 0.0, [(0, 0, 1), (0, 0, 0)]), [(4, 16)], ("data", None), {}),
    (
        lambda x: lax.dynamic_update_slice(ZEROS, x, (3, 0)),
        [(1, 16)],
        (None, "data"),
        {0: (None, "data"), 1: (None, "data")},
    ),
    (lambda x: lax.dynamic_update_slice(ZEROS, x, (3, 0)), [(1, 16)], ("data", None), {}),
    (
        lambda x, y: lax.concatenate([x, y], 0),
        [(3, 16), (5, 16)],
        (None, "data"),
        {0: (None, "data"), 1: (None, "data")},
    ),
    (lambda x, y: lax.concatenate([x, y], 0), [(3, 16), (5, 16)], ("data", None), {}),
    (lambda x: x[None], [(8, 16)], (None, "data", None), {0: ("data", None)}),
    (lambda x: jnp.broadcast_to(x, (3, 8)), [(8,)], (None, "data"), {}),
    (lambda x: x.T, [(8, 16)], ("data", None), {0: (None, "data")}),
    (lambda x: lax.slice_in_dim(x, 1, 3), [(8, 16)], (None, "data"), {0: (None, "data")}),
    (lambda x: jnp.sin(x), [(8, 16)], (None, "data"), {}),
    (
        added_to(1, 8, 16),
        [(8, 16)],
        (None, "data", None),
        {0: (None, "data", None), 2: ("data", None)},
    ),
    (added_to(1, 8, 16), [(8, 16)], ("data", None, None), {}),
    (added_to(2, 8, 16), [(2, 8, 16)], (None, "data", None), {}),
]


@pytest.mark.parametrize(("function", "shapes", "spec", "wanted"), INTO)
def test_operands_that_make_up_a_result(
    function: Callable[..., Any],
    shapes: list[tuple[int, ...]],
    spec: Spec,
    wanted: dict[int, Spec],
) -> None:
    jaxpr = jax.make_jaxpr(function)(*abstract(*shapes)).jaxpr
    *_, eqn = equations(jaxpr, lambda eqn: eqn.primitive.name == "jit")
    assert propagate.operand_specs(eqn, spec, MESH) == wanted


def lying(spec: Spec) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*spec))
