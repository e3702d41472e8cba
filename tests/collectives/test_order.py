"""An unrolled model gathers as it goes: on the GPU compile, and with the numbers of plain jit."""

import collections
from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import large_layers
from jax import lax
from jaxprs import primitives

import zerojax
from benchmarks.lifetimes import peak_gathered_bytes
from zerojax.collectives import Inserter, Shard
from zerojax.collectives.gathering import Thresholds
from zerojax.devices.mesh import zero_axis
from zerojax.graph.rows import RowDimensions
from zerojax.hlo.traffic import collectives

WIDTH, LAYERS, DEVICES = 4096, 4, 64
LAYER = 2 * 8 * WIDTH**2  # bytes of its matrices in bf16


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_no_more_than_two_layers_are_gathered_at_once() -> None:
    """On 64 GPUs the gathers of a layer take longer than its products: XLA would gather all layers
    first."""
    zero = zerojax.zero(stage=3, bf16=True, mesh=zerojax.topology("h100", DEVICES))
    program: Any = large_layers.lowered(zero, WIDTH, LAYERS, rows=512 * DEVICES).compile()
    text = program.as_text()
    assert peak_gathered_bytes(text) <= 2 * LAYER
    sent = collections.Counter[str]()
    for each in collectives(text):
        sent[each.kind] += each.moved_bytes
    once = LAYERS * LAYER * (DEVICES - 1) // DEVICES
    assert sent.pop("all-reduce") <= 1e6
    assert sent == {"all-gather": 2 * once, "reduce-scatter": once}


def layered(x: jax.Array, *weights: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def looped(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Each iteration gathers anew."""

    def body(state: Any) -> Any:
        return state[0] + 1, layered(state[1], *weights)

    return lax.while_loop(lambda state: state[0] < 2, body, (0, x))[1]


@pytest.mark.parametrize(
    ("function", "axes", "rows"),
    [
        (layered, {"data": 8}, (16,)),
        (layered, {"data": 8}, (3,)),  # rows that the devices do not divide
        (layered, {"data": 2, "seq": 4}, (16, 8)),
        (layered, {"data": 4, "model": 2}, (16,)),
        (looped, {"data": 8}, (16,)),
    ],
)
def test_what_is_inserted_is_an_identity(
    function: Callable[..., jax.Array], axes: dict[str, int], rows: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(96, 96)).astype("float32") for _ in range(6)]
    x = rng.normal(size=(*rows, 96)).astype("float32")
    mesh = zerojax.mesh(axes=axes)
    axis = zero_axis(mesh)
    # So that these matrices wait for each other.
    thresholds = Thresholds(ahead=20_000, held=0)
    inserter = Inserter(mesh, axis, keep=False, share=function is looped, thresholds=thresholds)

    def run(x: jax.Array, *weights: jax.Array) -> jax.Array:
        closed = jax.make_jaxpr(function)(x, *weights)
        row_dims = RowDimensions.of_program(closed, [0, *(None for _ in weights)])
        shards = [Shard(w, (axis, None)) for w in weights]
        return inserter(closed, [x, *shards], rows=row_dims)[0]

    waits = "bitcast_convert_type" in primitives(jax.make_jaxpr(run)(x, *weights))
    assert waits == (axes.get("model") is None)
    assert exact.differing(run, function, x, *weights) == []
