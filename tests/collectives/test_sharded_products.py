"""Weights larger than their activations stay sharded: on the GPU compile no more bytes than plain
jit sends, and the numbers of plain jit."""

from collections.abc import Callable, Mapping
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jaxprs import gathers

import zerojax
from benchmarks.plain import plain_jit
from zerojax.collectives import Inserter, Shard, sharded_products
from zerojax.collectives.gathering import Gatherer, Thresholds
from zerojax.graph.rows import RowDimensions
from zerojax.hlo.traffic import collectives
from zerojax.plan.quantized import Quantization, Sent
from zerojax.xla.types import Equation

DEVICES = 8
COLUMNS, ROWS = (None, "data"), ("data", None)


def gatherer(**keywords: Any) -> Gatherer:
    mesh = keywords.pop("mesh", None) or zerojax.mesh()
    return Gatherer(mesh, "data", **{"keep": False} | keywords)


def product(rows: tuple[int, ...], weight: tuple[int, int]) -> Equation:
    """The equation of ``x @ w``."""
    abstract = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((*rows, weight[0]), weight)]
    (eqn,) = jax.make_jaxpr(lambda x, w: x @ w)(*abstract).jaxpr.eqns
    return eqn


@pytest.mark.parametrize(
    ("rows", "weight", "spec", "sent"),
    [
        ((512,), (4096, 8192), COLUMNS, 0),  # rows are gathered
        ((8, 64), (8192, 4096), ROWS, 2),  # the result is reduce-scattered
        ((2560,), (4096, 8192), COLUMNS, 0),
        ((3584,), (4096, 8192), COLUMNS, None),  # more than half of the weight's bytes
        ((16384,), (4096, 8192), COLUMNS, None),
        ((16,), (512, 1024), COLUMNS, None),  # a small weight
        ((12,), (4096, 8192), COLUMNS, None),  # rows that the devices do not share
        ((512,), (4096, 8190), COLUMNS, None),  # uneven shards
        ((512,), (4096, 8192), (None, None), None),
    ],
)
def test_the_bytes_decide(
    rows: tuple[int, ...], weight: tuple[int, int], spec: Any, sent: int | None
) -> None:
    found = sharded_products.find_product(
        product(rows, weight), 1, spec, gatherer(), RowDimensions()
    )
    assert (None if found is None else found.sent) == sent


@pytest.mark.parametrize(
    ("rows", "runs", "stays"),
    [
        (512, 16, False),  # all iterations send more than one gather
        (512, 2, True),
        (32, 2, False),  # a few small collectives, as of a loop over time
    ],
)
def test_a_loop_counts_its_iterations(rows: int, runs: int, stays: bool) -> None:
    eqn = product((rows,), (4096, 8192))
    found = sharded_products.find_product(eqn, 1, COLUMNS, gatherer(), RowDimensions(), runs)
    assert (found is not None) == stays


def test_columns_that_are_only_reduced_are_not_sent() -> None:
    def largest(x: Any, w: Any) -> jax.Array:
        return (x @ w).max(1)

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((3584, 4096), (4096, 8192))]
    jaxpr = jax.make_jaxpr(largest)(*shapes).jaxpr
    dims = RowDimensions.of_program(jaxpr, [0, None]).with_weights(jaxpr, [None, 1])
    found = [
        sharded_products.find_product(jaxpr.eqns[0], 1, COLUMNS, gatherer(), each) is not None
        for each in (dims, RowDimensions())
    ]
    assert found == [True, False]


@pytest.mark.parametrize(
    "keywords",
    [
        {"keep": True},
        {"sent": Sent(weights=Quantization("int8"))},
        {"mesh": zerojax.mesh(replicas=2)},
        {"mesh": zerojax.mesh(axes={"data": 4, "model": 2})},
    ],
)
def test_other_ways_to_send_weights_keep_theirs(keywords: Any) -> None:
    eqn = product((512,), (4096, 8192))
    assert sharded_products.find_product(eqn, 1, COLUMNS, gatherer(), RowDimensions()) is not None
    assert (
        sharded_products.find_product(eqn, 1, COLUMNS, gatherer(**keywords), RowDimensions())
        is None
    )


Params = Mapping[str, jax.Array]


def two_layers(p: Params, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def scanned(p: Params, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        return x + two_layers(w, x), None

    return jax.lax.scan(jax.checkpoint(layer), x, p)[0]


def head(p: Params, x: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(x @ p["head"] + p["bias"])


def shapes(width: int, wide: int, *leading: int) -> dict[str, tuple[int, ...]]:
    return {
        "up": (*leading, width, wide),
        "bias": (*leading, wide),
        "down": (*leading, wide, width),
    }


def step_of(model: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., Any]:
    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        def loss_of(params: Params) -> jax.Array:
            y = model(params, batch["x"])
            if "label" in batch:
                return -jnp.take_along_axis(y, batch["label"][:, None], axis=1).mean()
            return jnp.mean((y - batch["x"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    return step


MODELS = {
    "two layers": (two_layers, shapes(32, 128)),
    "four layers": (lambda p, x: two_layers(p, two_layers(p, x)), shapes(32, 128)),
    "scanned": (scanned, shapes(32, 128, 5)),
    "head": (head, {"head": (32, 256), "bias": (256,)}),
}


def inserted(name: str) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """The gradients of a model whose weights of any size stay sharded, those of the plain model,
    and their arguments."""
    model, params = MODELS[name]
    inserter = Inserter(zerojax.mesh(), "data", keep=False, thresholds=Thresholds(in_place=0))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype("float32") for shape in params.values()]
    specs = [(*(None for _ in x.shape[:-1]), "data") for x in arrays]
    x = rng.normal(size=(8, 32)).astype("float32")

    def loss(values: Any, x: Any) -> jax.Array:
        return jnp.sum(model(dict(zip(params, values, strict=True)), x) ** 2)

    def run(values: Any, x: Any) -> Any:
        closed = jax.make_jaxpr(jax.grad(loss))(values, x)
        row_dims = RowDimensions.of_program(closed, [*[None] * len(specs), 0])
        shards = [
            Shard(inserter.constrain(w, spec), spec) for w, spec in zip(values, specs, strict=True)
        ]
        return inserter(closed, [*shards, x], want=specs, rows=row_dims)

    return run, jax.grad(loss), (arrays, x)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_inserted_is_an_identity(name: str) -> None:
    run, plain, arguments = inserted(name)
    weights = {x.shape for x in arguments[0] if x.ndim > 1}
    assert not [m for m in gathers(jax.make_jaxpr(run)(*arguments)) if m.shape in weights]
    assert exact.differing(run, plain, *arguments) == []


def sent_by(model: Callable[..., jax.Array], params: Any, batch: Any, stage: int | None) -> int:
    """Returns the bytes that a device sends in a step on absent GPUs; if ``stage`` is None, those
    of plain jit with FSDP shardings."""
    mesh = zerojax.topology("h100", DEVICES)

    def create() -> TrainState:
        arrays = {name: jnp.zeros(shape) for name, shape in params.items()}
        return TrainState.create(apply_fn=None, params=arrays, tx=optax.adam(1e-3))

    state = jax.eval_shape(create)
    if stage is None:
        lowered = plain_jit(step_of(model), mesh, state).lower(state, batch)
    else:
        zero = zerojax.zero(stage=stage, mesh=mesh)
        lowered = zero(step_of(model)).lower(zero.abstract_state(create), batch)
    return sum(each.moved_bytes for each in collectives(lowered.compile().as_text()))


def rows_of(rows: int, width: int, **more: Any) -> dict[str, Any]:
    return {"x": jax.ShapeDtypeStruct((rows * DEVICES, width), jnp.float32), **more}


LABELS = jax.ShapeDtypeStruct((16 * DEVICES,), jnp.int32)


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
class TestCompiled:
    @pytest.mark.parametrize(
        ("model", "params", "batch"),
        [
            (scanned, shapes(2048, 8192, 2), rows_of(64, 2048)),
            (
                head,
                {"head": (1024, 131072), "bias": (131072,)},
                rows_of(16, 1024, label=LABELS),
            ),
        ],
    )
    def test_no_more_is_sent_than_by_plain_jit(self, model: Any, params: Any, batch: Any) -> None:
        plain, found = (sent_by(model, params, batch, stage) for stage in (None, 3))
        weights = 4 * sum(int(np.prod(shape)) for shape in params.values())
        assert found <= 1.01 * plain
        assert found < 2.4 * weights * 7 / 8 / 10  # of gathers and reductions
