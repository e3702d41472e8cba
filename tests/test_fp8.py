"""Products in fp8: the choice of parameters, the codes, and steps beside one in plain JAX."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.collectives.quantization import decode, encode, rounded, scale_of
from zerojax.models import llama
from zerojax.plan.quantized import E4M3, E5M2
from zerojax.step.collectives_table import CollectivesTable

pytestmark = pytest.mark.usefixtures("quick_compile")

DEVICES, LAYERS, WIDTH, WIDE, ROWS = 8, 5, 96, 128, 32
EMULATED = {"emulate": True, "min_size": 4096}


def zero_of(fp8: Any = EMULATED, **keywords: Any) -> zerojax.Zero:
    keywords = {"stage": 3, "bf16": True, "stage3_param_persistence_threshold": 0} | keywords
    return zerojax.zero(fp8=fp8, **keywords)


def initial() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return 0.5 * shape[-2] ** -0.5 * jax.random.normal(next(keys), shape)

    return {
        "first": normal(WIDTH, WIDE),
        "layers": {"up": normal(LAYERS, WIDE, WIDE), "down": normal(LAYERS, WIDE, WIDE)},
        "last": {"kernel": normal(WIDE, WIDTH)},
        "small": normal(WIDTH, 8),
    }


def batch() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(1))
    return {"x": jax.random.normal(keys[0], (ROWS, WIDTH)), "y": jnp.ones((ROWS, 8))}


Multiply = Callable[[jax.Array, jax.Array], jax.Array]


def loss_fn(
    params: Any, batch: Any, how: str, remat: bool = False, multiply: Multiply = jnp.matmul
) -> jax.Array:
    """Activations are float32, so that no rounding but those to fp8 hides a difference."""

    def block(x: jax.Array, layer: Mapping[str, jax.Array]) -> jax.Array:
        return x + multiply(jnp.tanh(multiply(x, layer["up"])), layer["down"])

    block = jax.checkpoint(block, prevent_cse=how != "scanned") if remat else block
    x, layers = multiply(batch["x"], params["first"]), params["layers"]
    if how == "scanned":
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, layers)
    else:
        for i in range(LAYERS):
            layer = layers[i] if how == "unrolled" else layer_of(layers, i)
            x = block(x, layer)
    x = multiply(x, params["last"]["kernel"])
    return jnp.mean((x @ params["small"] - batch["y"]) ** 2)


def layer_of(layers: Any, i: int) -> Any:
    return jax.tree.map(lambda w: w[i], layers)


def in_layers(params: Any) -> Any:
    """The parameters with a dictionary a layer in place of stacks."""
    layers = [layer_of(params["layers"], i) for i in range(LAYERS)]
    return params | {"layers": layers}


def step_of(how: str, *, remat: bool = False) -> Any:
    def step(state: TrainState, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, how, remat)
        return state.apply_gradients(grads=grads), loss

    return step


def create(how: str) -> Callable[[], TrainState]:
    """A state of which a step subtracts the gradient."""

    def state() -> TrainState:
        params = in_layers(initial()) if how == "unrolled" else initial()
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))

    return state


def plainly(x: jax.Array, dtype: Any, parts: int) -> jax.Array:
    """Rounds each of ``parts`` equal blocks of rows to a power of two times fp8 numbers."""
    largest, blocks = float(jnp.finfo(dtype).max), x.reshape(parts, -1).astype(jnp.float32)
    top = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
    mantissa, exponent = jnp.frexp(top / largest)
    power = jnp.ldexp(1.0, exponent - (mantissa == 0.5))
    return ((blocks / power).astype(dtype).astype(x.dtype) * power.astype(x.dtype)).reshape(x.shape)


def multiply_in(parts: int) -> Multiply:
    """A product in fp8 with scales of ``parts`` blocks of rows, for one device."""

    @jax.custom_vjp
    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return plainly(x, jnp.float8_e4m3fn, parts) @ plainly(w, jnp.float8_e4m3fn, 1)

    def backward(kept: Any, g: jax.Array) -> Any:
        x, w = kept
        g, x = plainly(g, jnp.float8_e5m2, parts), plainly(x, jnp.float8_e4m3fn, parts)
        return g @ plainly(w, jnp.float8_e4m3fn, 1).T, (x.T @ g).astype(w.dtype)

    multiply.defvjp(lambda x, w: (multiply(x, w), (x, w)), backward)
    return multiply


def expected(how: str, parts: int = DEVICES, multiply: Multiply | None = None) -> Any:
    """The loss and the parameters after a plain step on one device."""
    params = create(how)().params
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    loss = jax.jit(jax.value_and_grad(loss_fn), static_argnums=(2, 3, 4))
    value, grads = loss(low, batch(), how, False, multiply or multiply_in(parts))
    return value, jax.tree.map(lambda x, g: x - g.astype(x.dtype), params, grads)


def distances(got: Any, want: Any) -> list[float]:
    """The distance of each array of updates from another, relative to the other."""
    updates = [jax.tree.map(jnp.subtract, x, create_like(x)) for x in (got, want)]
    pairs = zip(*map(jax.tree.leaves, updates), strict=True)
    return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]


def create_like(params: Any) -> Any:
    return in_layers(initial()) if isinstance(params["layers"], list) else initial()


@pytest.mark.parametrize(
    ("how", "remat", "keywords"),
    [
        pytest.param("scanned", True, {}, marks=pytest.mark.slow),
        pytest.param("unrolled", False, {}, marks=pytest.mark.slow),
        pytest.param("scanned", False, {"overlap_comm": False}, marks=pytest.mark.slow),
        pytest.param("unrolled", True, {}, marks=pytest.mark.slow),
        pytest.param("scanned", True, {"mesh": "replicas"}, marks=pytest.mark.slow),
        pytest.param("scanned", True, {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param("unrolled", True, {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_step_is_that_of_plain_jax(how: str, remat: bool, keywords: dict[str, Any]) -> None:
    if "mesh" in keywords:
        keywords = {"mesh": zerojax.mesh(replicas=2)}
    k = keywords.get("gradient_accumulation_steps", 1)
    zero = zero_of(**keywords)
    state, loss = zero(step_of(how, remat=remat))(zero.init(create(how)), batch())
    want_loss, want = expected(how, DEVICES * k)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    # The sum of two micro-batches is rounded to bfloat16 once more.
    near = distances(jax.device_get(state.params), want)
    assert max(near) < (1e-4 if k == 1 else 4e-3), near
    # Numbers of bfloat16, or with scales over all rows, are not these.
    bf16 = distances(expected(how, multiply=lambda x, w: x @ w)[1], want)
    assert min(bf16[:-1]) > 0.02, bf16


def rows_of(how: str, fp8: Any = EMULATED, **keywords: Any) -> CollectivesTable:
    zero = zero_of(fp8, **keywords)
    state = zero.abstract_state(create(how))
    return zero(step_of(how, remat=True)).collectives(state, jax.eval_shape(batch))


@pytest.mark.parametrize("how", ["scanned", "unrolled"])
def test_the_codes_are_what_is_gathered_and_multiplied(how: str) -> None:
    table, plain = rows_of(how), rows_of(how, None)
    gathers = [row for row in table.rows if row.kind == "all-gather"]
    small = [row for row in gathers if row.arrays == ("params['small']",)]
    assert {row.dtype for row in small} == {"bfloat16"}
    codes = [row for row in gathers if row not in small]
    assert {(row.dtype, row.compute) for row in codes} == {(E4M3, E4M3)}
    # The same gathers, of half the bytes; gradients are reduced as before.
    assert len(gathers) == sum(row.kind == "all-gather" for row in plain.rows)
    sums, before = table.bytes_by_kind(), plain.bytes_by_kind()
    of_small = sum(row.bytes_a_step for row in small)
    assert 2 * (sums["all-gather"] - of_small) == before["all-gather"] - of_small
    assert sums["reduce-scatter"] == before["reduce-scatter"]
    (maxima,) = (row for row in table.rows if "largest elements" in row.reason)
    assert (maxima.kind, maxima.where, maxima.times) == ("all-reduce", "entry", 1)
    assert maxima.shape == (2 + 2 * LAYERS,)
    assert str(table).splitlines()[1].split()[-1] == "compute"
    assert str(plain).splitlines()[1].split()[-1] != "compute"


def test_a_product_that_is_not_in_fp8_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Slices of a stack without a loop: neither their products nor the gradients are rounded."""
    table = rows_of("sliced")
    assert "multiplied in their own dtype" in caplog.text
    assert "['layers']['up']" in caplog.text
    assert "['first']" not in caplog.text
    of_layers = [row for row in table.rows if "layers" in row.array and row.kind == "all-gather"]
    assert {row.dtype for row in of_layers} == {"bfloat16"}


def test_the_plan_of_a_llama_says_what_stays_out(caplog: pytest.LogCaptureFixture) -> None:
    mesh = zerojax.topology("h100", 8)
    zero = zerojax.zero(stage=3, bf16=True, fp8=True, mesh=mesh)
    sizes = {**llama.SIZES["llama3-8b"], "n_layer": 4, "scan": True}
    model = llama.Llama(llama.LlamaConfig(**sizes))

    def state() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))

    plan = zero.plan(jax.eval_shape(state))
    names = ("down_proj", "gate_proj", "up_proj", "k_proj", "o_proj", "q_proj", "v_proj")
    assert [leaf.path.split("']['")[-2] for leaf in plan.fp8.leaves] == [*names]
    assert {why: len(paths) for why, paths in plan.fp8.others.items()} == {
        "A table, norm or bias": 3, "A head": 1, "Not a matrix": 1,
    }  # fmt: skip
    assert "fp8: 7 parameters (1.74 GB in bfloat16) are gathered and multiplied" in plan.table()
    assert "A head (1): params['lm_head']['kernel']" in plan.table()
    some = {"filter_fqns": "mlp, q_proj", "min_size": 2**23}
    plan = zerojax.zero(stage=3, bf16=True, fp8=some, mesh=mesh).plan(jax.eval_shape(state))
    assert [leaf.path.split("']['")[-2] for leaf in plan.fp8.leaves] == ["o_proj"]
    assert len(plan.fp8.others["In fp8.filter_fqns"]) == 4
    assert len(plan.fp8.others["Fewer than 8,388,608 elements"]) == 2


@pytest.mark.parametrize("axes", [{"data": 4, "model": 2}, {"data": 4, "seq": 2}])
def test_other_axes_are_refused(axes: dict[str, int]) -> None:
    zero = zero_of(mesh=zerojax.mesh(axes=axes))
    with pytest.raises(zerojax.ConfigError, match=r"only the rows of the batch.*'data': 4"):
        zero.init(create("scanned"))


def test_kinds_without_fp8() -> None:
    zero = zero_of(True, mesh=zerojax.topology("a100", 8))
    with pytest.raises(
        zerojax.ConfigError, match=r"h100, h200, .*, and this is NVIDIA A100.* 8\.0"
    ):
        zero.abstract_state(create("scanned"))


def test_scales_are_powers_of_two_and_codes_do_not_overflow() -> None:
    for largest, format in ((448.0, E4M3), (449.0, E4M3), (1e-3, E4M3), (3e38, E5M2)):
        x = jnp.array([largest, -largest / 3, 0.0], jnp.float32)
        scale = scale_of(jnp.max(jnp.abs(x)), format)
        assert np.frexp(scale)[0] == 0.5
        codes = encode(x, scale, format)
        np.testing.assert_allclose(decode(codes, scale, x.dtype), x, rtol=2**-3)
        assert np.abs(codes.astype(np.float32)).max() * 2 >= jnp.finfo(format).max / 2
    assert scale_of(jnp.float32(448), E4M3) == 1.0
    np.testing.assert_array_equal(rounded(jnp.zeros(3), E4M3), 0)
    for bad in (jnp.nan, jnp.inf):
        assert np.isnan(rounded(jnp.array([1.0, bad]), E4M3)).all()


BOUNDS = {"forward": 0.04, "gradient": 0.07}
"""What a step with products in fp8 says of their errors, relative to the norm."""


@pytest.mark.parametrize("shape", [(512, 256, 256), (256, 1024, 512), (64, 4096, 128)])
@pytest.mark.parametrize("outliers", [False, True])
def test_the_error_of_a_product(shape: tuple[int, int, int], outliers: bool) -> None:
    m, k, n = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, g = (
        jax.random.normal(*each) for each in zip(keys, [(m, k), (k, n), (m, n)], strict=True)
    )
    x = x.at[:, :: k // 4].multiply(50) if outliers else x
    g = g * jnp.exp(1.5 * jax.random.normal(keys[0], (m, n))) if outliers else g

    def error(one: jax.Array, other: jax.Array, format: Any) -> float:
        exact = one @ other
        got = rounded(one, format) @ rounded(other, E4M3)
        return float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))

    assert 0.02 < error(x, w, E4M3) < BOUNDS["forward"]
    assert 0.03 < error(g, w.T, E5M2) < BOUNDS["gradient"]
    assert 0.03 < error(g.T, x, E5M2) < BOUNDS["gradient"]


@pytest.mark.slow
def test_an_evaluation_computes_in_bfloat16() -> None:
    losses = [
        zero.evaluate(lambda state, batch: loss_fn(state.params, batch, "scanned"))(
            zero.init(create("scanned")), batch()
        )
        for zero in (zero_of(), zero_of(None))
    ]
    np.testing.assert_array_equal(*losses)


def test_only_products_read_codes(caplog: pytest.LogCaptureFixture) -> None:
    """Not a loop over time, which gathers its weight once, nor other uses of a matrix."""
    zero = zero_of()

    def state() -> TrainState:
        params = {name: jnp.ones((WIDE, WIDE)) for name in ("product", "scanned", "added")}
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))

    def step(state: TrainState, batch: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            x = jnp.tanh(batch @ params["product"])
            run = lambda x, _: (jnp.tanh(x @ params["scanned"]), None)  # noqa: E731
            x, _ = jax.lax.scan(run, x, length=16)
            return jnp.mean(jnp.sin(x[:, None] + params["added"]))

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    rows = jax.ShapeDtypeStruct((ROWS, WIDE), jnp.bfloat16)
    table = zero(step).collectives(zero.abstract_state(state), rows)
    dtypes = {row.array: row.dtype for row in table.rows if row.kind == "all-gather"}
    assert dtypes == {
        "params['product']": E4M3, "params['scanned']": "bfloat16", "params['added']": "bfloat16"
    }  # fmt: skip
    assert "fp8: ['added'], ['scanned'] are multiplied in their own dtype" in caplog.text
