"""A base that the optimizer freezes: as if ``stop_gradient`` held it still."""

import functools
from collections.abc import Callable
from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax import linen as nn
from flax.training.train_state import TrainState

import zerojax
from zerojax.hlo.traffic import collectives
from zerojax.models.gpt import GPT, GPTConfig

ROWS, WIDTH, STEPS = 32, 16, 3
CLIPPING = 0.05
"""Below the norm of the gradient that moves, far below that of all."""


def by_name(still: str) -> Callable[[Any], Any]:
    """Labels: parameters whose path has ``still`` in it are frozen."""

    def label(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "still" if still in jax.tree_util.keystr(path) else "moves", params
        )

    return label


def frozen(still: str, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.partition({"moves": tx, "still": optax.set_to_zero()}, by_name(still))


ADAM = frozen("base", optax.adamw(1e-2))


def held(params: Any) -> Any:
    """The parameters, the frozen ones under ``stop_gradient``."""
    labels = by_name("base")(params)
    return jax.tree.map(
        lambda label, p: p if label == "moves" else jax.lax.stop_gradient(p), labels, params
    )


class Adapted(nn.Module):
    """Two layers with low-rank adapters. The second result's derivative by the base is infinite."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        for i in range(2):
            down = nn.Dense(2, use_bias=False, name=f"down_{i}")(x)
            x = jnp.tanh(nn.Dense(WIDTH, name=f"base_{i}")(x))
            x = x + nn.Dense(WIDTH, name=f"up_{i}")(down)
        zero = self.param("base_zero", nn.initializers.zeros, (WIDTH, WIDTH))
        return x, jnp.sqrt(jnp.sum(zero))


def create(tx: optax.GradientTransformation, dtype: Any) -> Callable[[jax.Array], TrainState]:
    def create_state(key: jax.Array) -> TrainState:
        model = Adapted()
        params = model.init(key, jnp.ones((1, WIDTH)))["params"]
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return create_state


def step(stop: bool, infinite: bool = False) -> Callable[..., Any]:
    """A step; with ``stop`` the base is under ``stop_gradient``, with ``infinite`` the gradient of
    the base is not finite."""

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        def loss_fn(params: Any) -> jax.Array:
            y, root = state.apply_fn({"params": held(params) if stop else params}, batch["x"])
            # Multiplied by a mean, so that accumulation can divide it.
            more = root.astype(jnp.float32) * jnp.mean(batch["x"]) if infinite else 0.0
            return jnp.mean(jnp.square(y - batch["y"]).astype(jnp.float32)) + more

        loss, grads = zerojax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return train_step


def batches(dtype: Any, scale: float = 1.0) -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        {name: (scale * rng.normal(size=(ROWS, WIDTH))).astype(dtype) for name in "xy"}
        for _ in range(STEPS)
    ]


def run(zero: zerojax.Zero, function: Any, create_state: Any, data: list[Any]) -> Any:
    decorated, state = zero(function), zero.init(create_state, jax.random.key(0))
    for batch in data:
        state, _ = decorated(state, batch)
    return state


def source(stop: bool, tx: Any = ADAM) -> emitted.Source:
    make = functools.partial(create(tx, jnp.float32), jax.random.key(0))
    return emitted.Source(make, step(stop), (batches(np.float32)[0],))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_plain_jit_with_stop_gradient(stage: int, accumulation: int) -> None:
    mine = emitted.emitted(source(False), stage=stage, gradient_accumulation_steps=accumulation)
    assert emitted.differing(source(True), mine) == []


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_norm_of_the_users_own_is_of_all(accumulation: int) -> None:
    tx = optax.chain(optax.clip_by_global_norm(CLIPPING), frozen("base", optax.sgd(1.0)))
    emitted.check(source(False, tx), 3, accumulation)
    mine = emitted.emitted(source(False, tx), stage=3, gradient_accumulation_steps=accumulation)
    assert emitted.differing(source(True, tx), mine)


@pytest.mark.usefixtures("quick_compile")
class TestCompiled:
    def test_clipping(self) -> None:
        """By the norm of the gradient that moves."""
        with jax.enable_x64(True):
            zero = zero_for(3, gradient_clipping=CLIPPING, k=4)
            got = run(zero, step(False), create(ADAM, jnp.float64), batches(np.float64))
            tx = zerojax.wrap(ADAM, gradient_clipping=CLIPPING)
            want = create(tx, jnp.float64)(jax.random.key(0))
            plain = jax.jit(step(True))
            for batch in batches(np.float64):
                want, _ = plain(want, batch)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
                (got.params, zerojax.telemetry(got)["grad_norm"]),
                (want.params, want.opt_state.grad_norm),
            )
            assert want.opt_state.grad_norm > CLIPPING  # clipped

    @pytest.mark.slow
    def test_only_what_moves_overflows(self) -> None:
        """A gradient of the base that is not finite skips no step, one of the adapters does."""
        zero = zero_for(3, fp16=True, initial_scale_power=4, gradient_clipping=CLIPPING, k=4)
        make, data = create(ADAM, jnp.float32), batches(np.float16)
        got = run(zero, step(False, infinite=True), make, data)
        want = run(zero, step(True, infinite=True), make, data)
        assert zerojax.telemetry(got)["skipped_steps"] == 0
        jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
        skipped = run(zero, step(False), make, batches(np.float16, 1e4))
        assert zerojax.telemetry(skipped)["skipped_steps"] == STEPS
        before = zero.init(make, jax.random.key(0))
        jax.tree.map(np.testing.assert_array_equal, skipped.params, before.params)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("sections", "accumulation"),
        [(("offload_optimizer",), 4), (("offload_optimizer", "offload_param"), 1)],
    )
    def test_offload(self, sections: tuple[str, ...], accumulation: int) -> None:
        """The update comes after the step, and takes no gradient of the base."""
        with jax.enable_x64(True):
            config = {
                "stage": 3,
                "gradient_clipping": CLIPPING,
                "gradient_accumulation_steps": accumulation,
                "stage3_param_persistence_threshold": 0,
            }
            make, data = create(ADAM, jnp.float64), batches(np.float64)
            away = zerojax.zero(**config, **dict.fromkeys(sections, "cpu"))
            got = run(away, step(False, infinite=True), make, data)
            want = run(zerojax.zero(**config), step(True), make, data)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
                (got.params, zerojax.telemetry(got)["grad_norm"]),
                (want.params, zerojax.telemetry(want)["grad_norm"]),
            )
            given = (away.abstract_state(make, jax.random.key(0)), data[0])
            first = next(away(step(False)).programs(*given)).lowered
            made = jax.tree.leaves(first.out_info.grads)
            assert len(made) == 6  # of 11 parameters


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_gradients_of_the_base_are_not_made() -> None:
    """Attention's input products alone are trained, 18% of the parameters."""
    model = GPT(
        GPTConfig(
            vocab_size=2048, block_size=256, n_embd=512, n_layer=4, n_head=8, scan=True, remat=True
        )
    )
    tx = optax.partition(
        {"moves": optax.adamw(1e-3), "still": optax.set_to_zero()},
        lambda params: jax.tree.map(
            lambda label: "moves" if label == "still" else "still", by_name("c_attn")(params)
        ),
    )

    def create_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 256), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    zero = zerojax.zero(
        stage=3,
        bf16=True,
        gradient_clipping=1.0,
        mesh=zerojax.topology("h100", 8),
    )
    state = zero.abstract_state(create_state, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((8, 257), jnp.int32)
    text = zero(train_step).lower(state, batch).compile().as_text()
    reduced = sum(
        each.times * each.payload_bytes for each in collectives(text) if "reduce" in each.kind
    )
    sizes = jax.tree_util.tree_leaves_with_path(state.params)
    trained = sum(x.size for path, x in sizes if "c_attn" in jax.tree_util.keystr(path))
    assert reduced == pytest.approx(2 * trained, rel=0.01)
