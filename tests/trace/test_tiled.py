"""A function run over pieces of the sequence: its numbers, its traffic, what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.usefixtures("quick_compile")

W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 13, 8)), jnp.float32)


def mlp(w: jax.Array, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w) @ w.T


@pytest.mark.parametrize("chunks", [1, 4, 5, 13])
def test_numbers_and_gradients(chunks: int) -> None:
    """13 positions: in one piece, in shards of which the last is not full, and of one each."""

    def loss(w: jax.Array, x: jax.Array, pieces: int | None) -> Any:
        fn = lambda x: mlp(w, x)  # noqa: E731
        y = (zerojax.tiled(fn, chunks=pieces) if pieces else fn)(x)
        return jnp.sum(y**2), y

    both = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    for want, got in zip(
        jax.tree.leaves(both(W, X, None)), jax.tree.leaves(both(W, X, chunks)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("chunks", "shards"), [(1, 3), (3, 4), (2, 2), (4, 3)])
def test_a_piece_has_a_part_of_each_shard(chunks: int, shards: int) -> None:
    """12 positions, in stretches that the pieces divide and others."""
    x, seen = X[:, :12], list[int]()

    def fn(x: jax.Array) -> jax.Array:
        seen.append(x.shape[1])
        return mlp(W, x)

    np.testing.assert_allclose(
        zerojax.tiled(fn, chunks=chunks, shards=shards)(x), mlp(W, x), rtol=1e-5, atol=1e-5
    )
    assert {*seen} == {-(-12 // shards // chunks) * shards}
    with pytest.raises(ValueError, match="13 positions do not divide into 2 equal shards"):
        zerojax.tiled(fn, chunks=2, shards=2)(X)


def test_the_end_is_no_new_number() -> None:
    """What fills the last piece is a position, so that nothing becomes NaN that was not."""

    def unit(w: jax.Array, x: jax.Array) -> jax.Array:
        return x * w / jnp.linalg.norm(x * w, axis=-1, keepdims=True)

    w = jnp.ones(8)
    grads = jax.grad(lambda w: zerojax.tiled(lambda x: unit(w, x), chunks=5)(X)[..., 0].sum())(w)
    np.testing.assert_allclose(
        grads, jax.grad(lambda w: unit(w, X)[..., 0].sum())(w), rtol=1e-4, atol=1e-5
    )


class Block(nn.Module):
    chunks: int | None = None
    inner: Any = nn.Dense

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = self.inner(x.shape[-1], name="dense")
        return x + (zerojax.tiled(dense, chunks=self.chunks) if self.chunks else dense)(x)


def test_a_linen_module() -> None:
    params = Block(4).init(jax.random.key(0), X)
    assert jax.tree.structure(params) == jax.tree.structure(Block().init(jax.random.key(0), X))
    np.testing.assert_allclose(Block(4).apply(params, X), Block().apply(params, X), rtol=1e-6)


def test_an_nnx_module() -> None:
    dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(zerojax.tiled(dense, chunks=4)(X), dense(X), rtol=1e-6)


class Counting(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow("intermediates", "seen", x)
        return x


def others(features: int, name: str) -> nn.Module:
    """A module around one that the caller makes."""
    return nn.Sequential([nn.Dense(features)], name=name)


class Wrapped(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return zerojax.tiled(lambda x: nn.Dense(8)(x), chunks=2)(x)


class DroppingWithAKey(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x)


class Dropping(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dropout(0.5, deterministic=False)(x)


def test_what_is_refused() -> None:
    for chunks in (0, True, 2.0):
        with pytest.raises(ValueError, match=r"tiled\(mlp\): chunks must be a positive int"):
            zerojax.tiled(mlp, chunks=chunks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"13 positions .* at least 14 chunks: .* lower chunks"):
        zerojax.tiled(lambda x: x, chunks=14)(X)
    with pytest.raises(ValueError, match=r"need one T, got 13 in \[0\], 7 in \[1\]"):
        zerojax.tiled(lambda x, y: x, chunks=2)(X, X[:, :7])
    with pytest.raises(ValueError, match=r"argument \[1\] has shape \(13,\), not \[B, T"):
        zerojax.tiled(lambda x, y: x, chunks=2)(X, jnp.ones(13))
    with pytest.raises(ValueError, match=r"of 7 positions result  has shape \(2, 8\), not \[B, 7"):
        zerojax.tiled(lambda x: x.sum(1), chunks=2)(X)
    with pytest.raises(ValueError, match="draws random numbers"):
        zerojax.tiled(lambda x: x * jax.random.normal(jax.random.key(0), x.shape), chunks=2)(X)
    with pytest.raises(ValueError, match="the module changes intermediates"):
        Block(2, Counting).apply({}, X, mutable=["intermediates"])
    with pytest.raises(ValueError, match="reads variables of one created outside"):
        Block(2, others).apply(Block(None, others).init(jax.random.key(0), X), X)
    for drops in (Dropping, DroppingWithAKey):
        with pytest.raises(ValueError, match="draws random numbers"):
            Block(2, drops).apply({}, X, rngs={"dropout": jax.random.key(0)})
    with pytest.raises(ValueError, match="draws random numbers"):
        zerojax.tiled(lambda x: x * jax.random.gamma(jax.random.key(0), x), chunks=2)(X)
    for module in (nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0))):
        with pytest.raises(ValueError, match=r"changes an NNX module .Cannot mutate"):
            zerojax.tiled(module, chunks=2)(X)
    with pytest.raises(ValueError, match=r"a linen module.* pass a linen module itself"):
        Wrapped().init(jax.random.key(0), X)


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(128)(jnp.tanh(nn.Dense(512, use_bias=False)(x)))


class Model(nn.Module):
    chunks: int | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = Wide(name="mlp")
        x = nn.Dense(128, use_bias=False, name="first")(x)
        return x + (zerojax.tiled(wide, chunks=self.chunks) if self.chunks else wide)(x)


def decorated(zero: Any, chunks: int | None) -> Any:
    """A state's maker and a step of the model."""

    def create(key: jax.Array) -> TrainState:
        params = Model(chunks).init(key, jnp.ones((1, 8, 128)))["params"]
        return TrainState.create(apply_fn=Model(chunks).apply, params=params, tx=optax.adamw(1e-2))

    @zero
    def step(state: TrainState, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(state.apply_fn({"params": params}, batch) ** 2)

        value, grads = zerojax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return create, step


@pytest.mark.slow
def test_in_a_decorated_step() -> None:
    batch = np.random.default_rng(2).normal(size=(16, 12, 128)).astype(np.float32)
    losses = []
    for chunks in (None, 4):
        zero = zerojax.zero(
            stage=3, stage3_param_persistence_threshold=0, gradient_accumulation_steps=2
        )
        create, step = decorated(zero, chunks)
        state = zero.init(create, jax.random.key(0))
        for _ in range(2):
            state, loss = step(state, batch)
        losses.append(float(loss))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_weights_are_gathered_once_and_their_gradients_scattered_once() -> None:
    sent = []
    for chunks in (None, 4):
        zero = zerojax.zero(
            stage=3, bf16=True, stage3_param_persistence_threshold=0,
            mesh=zerojax.topology("h100", devices=8),
        )  # fmt: skip
        create, step = decorated(zero, chunks)
        state = zero.abstract_state(create, jax.random.key(0))
        batch = jax.ShapeDtypeStruct((8, 1024, 128), jnp.bfloat16)
        text = step.lower(state, batch).compile().as_text()
        kinds: dict[str, int] = {}
        for each in collectives(text):
            kinds[each.kind] = kinds.get(each.kind, 0) + each.moved_bytes
        sent.append(kinds)
    plain, tiled = sent
    assert tiled["reduce-scatter"] <= plain["reduce-scatter"]
    assert tiled["all-reduce"] <= plain["all-reduce"]
    # The backward pass computes each piece again, for which it gathers once more.
    weights = 2 * 2 * 128 * 512
    assert tiled["all-gather"] <= plain["all-gather"] + weights
