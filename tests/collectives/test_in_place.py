"""Weights larger than their activations stay sharded: on the GPU compile no more bytes than plain
jit sends, and the numbers of plain jit."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from emitted import check_step
from equal import check
from flax.training.train_state import TrainState
from swept import swept

import zerojax
from benchmarks.plain import plain_jit
from zerojax.collectives import in_place
from zerojax.collectives.gathering import Gatherer
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
    found = in_place.find(product(rows, weight), 1, spec, gatherer())
    assert (None if found is None else found.sent) == sent


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
    assert in_place.find(eqn, 1, COLUMNS, gatherer()) is not None
    assert in_place.find(eqn, 1, COLUMNS, gatherer(**keywords)) is None


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


def test_the_table_of_collectives_has_the_activations() -> None:
    """The rows twice, once for a product and a gradient, and the partial sums."""
    zero = zerojax.zero(stage=3)

    def create() -> TrainState:
        arrays = {name: jnp.zeros(shape) for name, shape in shapes(4096, 8192).items()}
        return TrainState.create(apply_fn=None, params=arrays, tx=optax.adam(1e-3))

    table = zero(step_of(two_layers)).collectives(zero.abstract_state(create), rows_of(64, 4096))
    sent = [each.kind for each in table.rows if each.shape == (64 * DEVICES, 4096)]
    assert sent == ["all-gather", "reduce-scatter", "all-gather"]
    assert all(each.bytes < 2**20 for each in table.rows if each.arrays)


class TestNumbers:
    """Of plain jit on one device, in float64, with weights of any size."""

    pytestmark = pytest.mark.usefixtures("quick_compile")

    @pytest.fixture(autouse=True)
    def of_any_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(in_place, "LEAST", 0)
        monkeypatch.setattr(in_place, "_TIMES", 0)

    @pytest.mark.parametrize("k", [1, 2])
    @pytest.mark.parametrize(
        ("model", "params"),
        [
            (two_layers, shapes(16, 64)),
            (lambda p, x: two_layers(p, two_layers(p, x)), shapes(16, 64)),
            (scanned, shapes(16, 64, 5)),
            (head, {"head": (16, 128), "bias": (128,)}),
        ],
    )
    def test_of_a_step(
        self, model: Callable[..., jax.Array], params: dict[str, tuple[int, ...]], k: int
    ) -> None:
        rng = np.random.default_rng(0)
        arrays = {name: rng.normal(size=shape) / 4 for name, shape in params.items()}
        batch = {"x": rng.normal(size=(32, 16))}
        if "head" in params:
            batch["label"] = rng.integers(0, 128, size=32)

        def create() -> TrainState:
            return TrainState.create(apply_fn=None, params=arrays, tx=optax.adam(1e-2))

        zero = zerojax.zero(
            stage=3, gradient_accumulation_steps=k, stage3_param_persistence_threshold=0
        )
        check_step(zero, step_of(model), create, batch)

    @pytest.mark.parametrize("name", swept(["tied", "encoder_decoder", "lstm", "sharpness"]))
    def test_of_a_program(self, name: str) -> None:
        check(name)


class Cost(NamedTuple):
    """Bytes that a device sends in a step, and bytes of its temporary arrays."""

    sent: int
    temporary: int


def cost_of(model: Callable[..., jax.Array], params: Any, batch: Any, stage: int | None) -> Cost:
    """The cost of a step on absent GPUs; if ``stage`` is None, of plain jit with FSDP shardings."""
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
    compiled: Any = lowered.compile()
    sent = sum(each.moved_bytes for each in collectives(compiled.as_text()))
    return Cost(sent, compiled.memory_analysis().temp_size_in_bytes)


def rows_of(rows: int, width: int, **more: Any) -> dict[str, Any]:
    return {"x": jax.ShapeDtypeStruct((rows * DEVICES, width), jnp.float32), **more}


LABELS = jax.ShapeDtypeStruct((16 * DEVICES,), jnp.int32)


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
class TestCompiled:
    @pytest.mark.parametrize(
        ("model", "params", "batch"),
        swept(
            [
                (scanned, shapes(2048, 8192, 6), rows_of(64, 2048)),
                (
                    head,
                    {"head": (1024, 131072), "bias": (131072,)},
                    rows_of(16, 1024, label=LABELS),
                ),
                (two_layers, shapes(4096, 8192), rows_of(64, 4096)),
            ],
            2,
        ),
    )
    def test_no_more_is_sent_than_by_plain_jit(
        self, model: Any, params: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain, found = (cost_of(model, params, batch, stage) for stage in (None, 3))
        monkeypatch.setattr(in_place, "LEAST", 10**12)
        gathered = cost_of(model, params, batch, 3)
        assert found.sent <= 1.01 * plain.sent
        assert found.sent < gathered.sent / 10
        assert found.temporary < gathered.temporary

    def test_many_rows_gather_the_weights_as_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        params, batch = shapes(2048, 8192, 4), rows_of(2048, 2048)
        found = cost_of(scanned, params, batch, 3)
        monkeypatch.setattr(in_place, "LEAST", 10**12)
        assert found == cost_of(scanned, params, batch, 3)
