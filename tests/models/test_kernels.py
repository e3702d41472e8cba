"""The GPT with fused layers: what it computes, and what is compiled for GPUs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from benchmarks.kernel_steps import WAYS, Size, compiled
from pallas_kernels import compat
from zerojax.models.blocks import causal_attention
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.kernels import Kernels, fused_causal_attention

CONFIG: dict[str, Any] = dict(vocab_size=96, block_size=16, n_layer=2, n_head=2, n_embd=32)


def train(fused: str | None, stage: int, devices: int = 8, **more: Any) -> list[float]:
    """Losses of three steps."""
    model = {name: more.pop(name) for name in ("scan", "remat", "dropout") if name in more}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    zero = zerojax.zero(
        zerojax.ZeroConfig(stage=stage, stage3_param_persistence_threshold=0, **more), mesh=mesh
    )
    kernels = None if fused is None else Kernels(zero.per_device, fused)
    gpt = GPT(GPTConfig(**CONFIG, **model), kernels)

    def create(key: jax.Array) -> TrainState:
        params = gpt.init(key, jnp.zeros((1, 16), jnp.int32))["params"]
        return TrainState.create(apply_fn=gpt.apply, params=params, tx=optax.adamw(1e-2))

    @zero
    def step(state: TrainState, tokens: jax.Array, key: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            how = {"deterministic": False, "targets": tokens[:, 1:], "rngs": {"dropout": key}}
            return state.apply_fn({"params": params}, tokens[:, :-1], **how).mean()

        value, grads = zerojax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    state = zero.init(create, jax.random.key(0))
    rng = np.random.default_rng(0)
    rows = devices * more.get("gradient_accumulation_steps", 1)
    losses = []
    for i in range(3):
        tokens = rng.integers(0, 96, (rows, 17)).astype(np.int32)
        state, loss = step(state, tokens, jax.random.key(i))
        losses.append(float(loss))
    return losses


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {"bf16": True}),
        (3, {"scan": True, "remat": True, "gradient_accumulation_steps": 2}),
    ],
    ids=["stage 0 in bf16", "accumulation"],
)
def test_fused_layers_compute_the_same(stage: int, more: dict[str, Any]) -> None:
    low = "bf16" in more
    want, got = train(None, stage, **dict(more)), train("xla", stage, **dict(more))
    np.testing.assert_allclose(got, want, rtol=1e-3 if low else 1e-6)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("window", [None, 2])
def test_fused_attention_of_rows_with_padding(window: int | None) -> None:
    """A query without keys has the result 0, and no gradient."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(3, 6, 2, 4)), jnp.float32) for _ in range(3))
    mask = jnp.array([[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 1], [1, 1, 1, 0, 0, 0]], bool)

    @partial(jax.jit, static_argnums=0)
    def with_gradients(attention: Any, *inputs: jax.Array) -> Any:
        y, pullback = jax.vjp(partial(attention, mask=mask, window=window), *inputs)
        return y, pullback(jnp.sin(y))

    fused = partial(fused_causal_attention, implementation="xla")
    got, want = (with_gradients(f, q, k, v) for f in (fused, causal_attention))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), got, want)
    sees_a_key = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, not window, not window, 1], [1] * 6])
    if window:
        sees_a_key[2, 4:] = 0
    np.testing.assert_array_equal(np.abs(got[0]).sum((2, 3)) > 0, sees_a_key)
    assert not got[1][0][sees_a_key == 0].any()


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.sweep
def test_the_kernels_themselves_in_a_decorated_step() -> None:
    """In the simulator, on two devices; 128 wide, as narrower lines are XLA's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIG, "n_embd", 128)
        patch.setitem(CONFIG, "n_layer", 1)
        patch.setitem(CONFIG, "vocab_size", 128)
        want = train(None, 3, devices=2)
        # The simulator takes launches that XLA runs side by side for one kernel that races with
        # itself; each kernel's own tests look for races.
        with compat.simulator(detect_races=False):
            got = train("mosaic_gpu", 3, devices=2)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_the_loss_holds_no_logits() -> None:
    """Eight H100s, stage 3: with the fused loss the step needs less than the logits less."""
    size = Size("small", 256, 32)
    logits = 2 * size.rows * size.block_size * 50304
    whole, fused = (compiled(size, way, "mosaic_gpu") for way in WAYS[1:])
    assert fused.temporaries < whole.temporaries - 0.5 * logits
    assert fused.launches > whole.launches > 0
