"""Quantization of a tree: numbers, shardings, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from equal import zero_for
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, dtype)


def every_matrix(path: str, x: Any) -> bool:
    return len(x.shape) > 1


@pytest.mark.parametrize(
    ("bits", "group_size", "shape"),
    [
        (8, None, (64, 32)),
        (4, 8, (64, 32)),
        (8, 8, (3, 64, 32)),
        (4, None, (16, 2, 4)),
        (4, 8, (2, 4, 64, 8)),
    ],
)
def test_codes_times_scales_are_within_half_a_scale(
    bits: int, group_size: int | None, shape: tuple[int, ...]
) -> None:
    x = normal(*shape)
    quantized = zerojax.quantize_weights(
        {"w": x}, bits, group_size=group_size, select=every_matrix
    )["w"]
    assert quantized.qvalue.dtype == {8: jnp.int8, 4: jnp.int4}[bits]
    assert quantized.qvalue.shape == shape
    found = zerojax.dequantize(quantized)
    repeats = [n // k for n, k in zip(shape, quantized.scale.shape, strict=True)]
    assert sum(n > 1 for n in repeats) == 1
    assert max(repeats) == (group_size or max(shape[len(shape) > 3 : -1]))
    scale = quantized.scale
    for d, n in enumerate(repeats):
        scale = jnp.repeat(scale, n, axis=d)
    assert bool((jnp.abs(found - x) <= scale * (0.5 + 1e-5)).all())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nf4_is_that_of_qwix(dtype: Any) -> None:
    x = normal(128, 64, dtype=dtype)
    found = zerojax.quantize_weights({"w": x}, "nf4", group_size=32, select=every_matrix)["w"]
    expected = qwix.quantize(
        x.astype(jnp.float32), "nf4", channelwise_axes=[1], tiled_axes={0: 32}, scale_dtype=dtype
    )
    assert found.qtype == expected.qtype
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(zerojax.dequantize(found), qwix.dequantize(found))


def test_nf4_stays_on_its_shards() -> None:
    """Which hold complete groups."""
    zero = zero_for(3)
    state = zero.init(lambda: {"w": normal(3, 128, 64)})
    found = zerojax.quantize_weights(state, "nf4", group_size=16)["w"]
    for x in jax.tree.leaves(found):
        assert x.sharding.is_equivalent_to(state["w"].sharding, 3)
    whole = jax.device_get(zerojax.dequantize(found))
    np.testing.assert_array_equal(whole, zerojax.dequantize(jax.device_get(found)))


@pytest.mark.parametrize(
    ("params", "name", "scales"),
    [
        ({"tower": {"w": normal(80, 64, 64), "gain": normal(80, 1024)}}, "tower.w", (80, 1, 64)),
        ({"layers": {"kernel": normal(80, 64, 64)}}, "layers.kernel", (80, 1, 64)),
        ({"q": {"kernel": normal(256, 8, 64), "bias": normal(8, 64)}}, "q.kernel", (1, 8, 64)),
    ],
)
def test_each_layer_of_a_stack_has_scales_and_its_gains_are_no_matrix(
    params: Any, name: str, scales: tuple[int, ...]
) -> None:
    module, array = name.split(".")
    quantized = zerojax.quantize_weights(params)[module]
    assert quantized.pop(array).scale.shape == scales
    assert all(x is params[module][key] for key, x in quantized.items())


def test_the_remedy_for_small_models_leaves_out_gains_and_tables() -> None:
    block = {"Dense_0": {"kernel": normal(2, 8, 8)}, "norm": {"gain": normal(2, 8)}}
    params = {"wte": {"embedding": normal(16, 8)}, "blocks": block}
    with pytest.raises(ValueError, match=r'select=lambda path, x: "kernel" in path to quantize'):
        zerojax.quantize_weights(params)
    quantized = zerojax.quantize_weights(params, select=lambda path, x: "kernel" in path)
    assert quantized["blocks"]["Dense_0"]["kernel"].scale.shape == (2, 1, 8)
    assert quantized["blocks"]["norm"]["gain"] is block["norm"]["gain"]
    with pytest.raises(TypeError, match=r"gain'\], float32\[2, 8\] \(the first holds layers\)"):
        zerojax.quantize_weights(params, select=lambda path, x: x.ndim > 1)


@pytest.mark.parametrize("bits", [8, "nf4"])
def test_zeros_and_values_that_are_not_finite(bits: Any) -> None:
    x = normal(128, 128).at[:, 0].set(0).at[0, 1].set(jnp.inf).at[0, 2].set(jnp.nan)
    found = zerojax.dequantize(zerojax.quantize_weights({"w": x}, bits))["w"]
    assert not found[:, 0].any()
    assert not jnp.isfinite(found[:, 1:3]).any()
    assert jnp.isfinite(found[:, 3:]).all()


def test_large_matrices_are_quantized_and_tables_of_embeddings_are_not() -> None:
    params = {
        "wte": {"embedding": normal(128, 128)},
        "kernel": normal(128, 128),
        "small": normal(8, 8),
        "bias": normal(9000),
        "position": jnp.zeros((128, 128), jnp.int32),
    }
    found = zerojax.quantize_weights(params)
    assert [key for key, x in found.items() if isinstance(x, qwix.QArray)] == ["kernel"]
    assert all(found[key] is params[key] for key in ("small", "bias", "position"))
    found = zerojax.quantize_weights(params, select=lambda path, x: "embedding" in path)
    assert isinstance(found["wte"]["embedding"], qwix.QArray)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(25)(x)


def create(key: jax.Array) -> TrainState:
    model = Net()
    params = model.init(key, jnp.zeros((1, 40)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


@pytest.mark.parametrize(
    ("stage", "bits", "group_size"),
    [(0, 8, None), (1, 4, None), (2, 8, 5), (3, 8, None), (3, 4, 5)],
)
def test_sharded_equals_one_device_bit_for_bit(
    stage: int, bits: int, group_size: int | None
) -> None:
    zero = zero_for(stage)
    state = zero.init(create, jax.random.key(0))
    host = jax.device_get(jax.tree.map(jnp.asarray, state.params))

    def quantized(params: Any) -> Any:
        return zerojax.quantize_weights(
            params, bits, group_size=group_size, select=lambda path, x: "Dense_0']['kernel" in path
        )

    sharded = quantized(state)
    for a, b in zip(jax.tree.leaves(sharded.params), jax.tree.leaves(quantized(host)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    before = state.params["Dense_0"]["kernel"]
    codes = sharded.params["Dense_0"]["kernel"].qvalue
    assert codes.sharding.is_equivalent_to(before.sharding, 2)
    batch = jax.random.normal(jax.random.key(1), (16, 40))
    found = zero.evaluate(lambda s, x: s.apply_fn({"params": s.params}, x))(sharded, batch)
    plain = jax.jit(lambda p, x: Net().apply({"params": zerojax.dequantize(p)}, x))
    np.testing.assert_allclose(found, plain(quantized(host), batch), atol=1e-6)


def test_padded_arrays_stay_padded_shards() -> None:
    padded = {"kernel": normal(129, 65)}
    zero = zero_for(3)
    placed = zero.init(lambda: padded)
    found = zerojax.quantize_weights(placed)
    assert type(found["kernel"].qvalue) is type(placed["kernel"])
    shards = {shard.data.shape for shard in found["kernel"].qvalue.addressable_shards}
    assert shards == {shard.data.shape for shard in placed["kernel"].addressable_shards}
    plain = zerojax.quantize_weights(padded)
    np.testing.assert_array_equal(np.asarray(found["kernel"].qvalue), plain["kernel"].qvalue)
    np.testing.assert_array_equal(np.asarray(found["kernel"].scale), plain["kernel"].scale)
    x = normal(8, 129)
    product = zero.evaluate(lambda params, x: x @ params["kernel"])(found, x)
    np.testing.assert_allclose(
        product, x @ zerojax.dequantize(plain)["kernel"], rtol=1e-5, atol=1e-5
    )


def test_a_module_of_nnx() -> None:
    model = nnx.Linear(128, 128, rngs=nnx.Rngs(0))
    found = zerojax.quantize_weights(model)
    assert isinstance(found.kernel.get_value(), qwix.QArray)
    x = normal(16, 128)
    product = zero_for(3).evaluate(lambda model, x: model(x))(found, x)
    kernel = zerojax.dequantize(found.kernel.get_value())
    np.testing.assert_allclose(product, x @ kernel, rtol=1e-5, atol=1e-5)


def test_a_step_refuses_quantized_weights() -> None:
    zero = zero_for(1)
    state = zerojax.quantize_weights(zero.init(create, jax.random.key(0)), select=every_matrix)

    @zero
    def step(state: TrainState, batch: jax.Array) -> TrainState:
        grads = jax.grad(lambda p: state.apply_fn({"params": p}, batch).mean())(state.params)
        return state.apply_gradients(grads=grads)

    with pytest.raises(
        TypeError, match=r"step: params\['Dense_0'\]\['kernel'\] is quantized.*zero"
    ):
        step(state, jnp.ones((8, 40)))
    assert zero.plan(state).params is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 3}, "bits=3, .* pass bits=8, bits=4 or"),
        ({"bits": True}, "bits=True"),
        ({"group_size": 0}, "group_size=0: .* a group_size above 0"),
        ({"group_size": 96}, r"dimension 0 of \['w'\] \(128, 128\): write group_size=32 or .* 128"),
        ({"select": lambda path, x: False}, "no array is a matrix"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zerojax.quantize_weights({"w": normal(128, 128)}, **arguments)


def test_bad_trees() -> None:
    quantized = zerojax.quantize_weights({"w": normal(128, 128)})
    with pytest.raises(ValueError, match=r"\['w'\] is quantized already, to int8"):
        zerojax.quantize_weights(quantized)
    with pytest.raises(TypeError, match=r"True for \['n'\], int32\[128, 128\]"):
        zerojax.quantize_weights(
            {"n": jnp.zeros((128, 128), jnp.int32)}, select=lambda path, x: True
        )
    with pytest.raises(ValueError, match=r"dimension 0 .* 16 on each device: write group_size=16"):
        zerojax.quantize_weights(zero_for(3).init(lambda: {"w": normal(128, 96)}), group_size=32)
