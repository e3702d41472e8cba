"""Gradients of a convolution for each row of the batch are those of one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from equal import TOLERANCE, assert_near, host
from flax.training.train_state import TrainState
from jax import lax

import zerojax
from zerojax.collectives import own_rows
from zerojax.graph.rows import RowDimensions, whole

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, CHANNELS, OUT = 16, 2, 4


def params(groups: int) -> Any:
    rng = np.random.default_rng(0)
    shapes = {"kernel": (3, 3, CHANNELS // groups, OUT), "head": (OUT * 16, 8), "scale": (8,)}
    return {name: jnp.asarray(rng.normal(size=shape) * 0.3) for name, shape in shapes.items()}


def images() -> Any:
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(ROWS, 4, 4, CHANNELS)), "y": rng.normal(size=(ROWS, 8))}


def loss(p: Any, row: Any, groups: int) -> jax.Array:
    """Of one row."""
    x = lax.conv_general_dilated(
        row["x"][None], p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )  # fmt: skip
    return jnp.mean((jnp.tanh(x).reshape(-1) @ p["head"] * p["scale"] - row["y"]) ** 2)


def each(p: Any, batch: Any, groups: int) -> Any:
    """Losses [rows], and gradients with a first dimension of rows."""
    return jax.vmap(jax.value_and_grad(lambda p, row: loss(p, row, groups)), (None, 0))(p, batch)


def clipped(groups: int, wrap: Callable[..., Any]) -> Callable[..., Any]:
    """A step on the mean of gradients that are clipped row by row."""

    def step(state: TrainState, batch: Any) -> Any:
        losses, grads = wrap(lambda p, b: each(p, b, groups))(state.params, batch)
        norms = jax.vmap(optax.tree.norm)(grads)
        scale = jnp.minimum(1, 0.5 / norms)
        grads = jax.tree.map(lambda g: jnp.tensordot(scale, g, 1) / ROWS, grads)
        return state.apply_gradients(grads=grads), (losses.mean(), norms.mean())

    return step


def looped(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: lax.fori_loop(0, 2, lambda _, __: f(*args), f(*args))


def assert_same(
    step: Callable[..., Any], tx: optax.GradientTransformation, groups: int, **config: Any
) -> None:
    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params=params(groups), tx=tx)

    zero = zerojax.zero(stage3_param_persistence_threshold=0, **config)
    with jax.enable_x64(True):  # compiled: tests/exact.py does not run a shard_map
        runs = [run(step)(create(), images()) for run in (zero, jax.jit)]
        got, want = (host((state.params, results)) for state, results in runs)
    assert_near(got, want, TOLERANCE["float64"])


@pytest.mark.parametrize(
    ("stage", "groups", "wrap", "k"),
    [
        (0, 1, jax.checkpoint, 1),
        (3, CHANNELS, looped, 1),
        (3, 1, jax.checkpoint, 2),
    ],
)
def test_gradients_by_row(stage: int, groups: int, wrap: Any, k: int) -> None:
    """In calls, loops and choices too; and of depthwise convolutions."""
    assert_same(
        clipped(groups, wrap), optax.sgd(0.1), groups, stage=stage, gradient_accumulation_steps=k
    )


def convolution(lhs: tuple[int, ...], rhs: tuple[int, ...], **groups: int) -> Any:
    def f(x: Any, w: Any) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=numbers, **groups
        )  # fmt: skip

    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lhs, rhs))
    (eqn,) = jax.make_jaxpr(f)(*shapes).jaxpr.eqns
    return eqn


@pytest.mark.parametrize(
    ("eqn", "dims", "is_one"),
    [
        (convolution((1, 4, 4, 32), (3, 3, 2, 64), feature_group_count=16), (3, None), True),
        (convolution((1, 4, 4, 32), (3, 3, 2, 64), feature_group_count=16), (None, 3), True),
        (convolution((1, 4, 4, 32), (3, 3, 2, 64), feature_group_count=16), (None, None), True),
        (convolution((8, 4, 4, 32), (3, 3, 2, 64), feature_group_count=16), (None, None), False),
        (convolution((8, 4, 4, 32), (3, 3, 2, 64), feature_group_count=16), (3, None), True),
        (convolution((1, 4, 4, 24), (3, 3, 2, 24), feature_group_count=12), (3, None), False),
        # Depthwise on rows, and its gradient.
        (convolution((16, 4, 4, 32), (3, 3, 1, 32), feature_group_count=32), (0, None), False),
        (convolution((32, 4, 4, 16), (4, 4, 16, 32), batch_group_count=32), (3, 2), False),
        (convolution((16, 4, 4, 8), (3, 3, 8, 8)), (0, None), False),
    ],
)
def test_which_have_rows_for_groups(
    eqn: Any, dims: tuple[int | None, int | None], is_one: bool
) -> None:
    along = zip(eqn.invars, dims, strict=True)
    known = {v: whole(v.aval.shape, [] if d is None else [d]) for v, d in along}
    rows = RowDimensions(lambda: known)
    found = own_rows.has_rows_for_groups(eqn, rows, 8)
    assert found == is_one
    assert not own_rows.has_rows_for_groups(eqn, rows, 1)
