"""Pipeline stages beside kernels, tensor parallelism, fp16 and checkpoints."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline import models
from pipeline.models import batches
from pipeline.test_program import zero_on

import zerojax
from zerojax.checkpoint import Checkpointer
from zerojax.models.llama import Llama, LlamaConfig
from zerojax.models.tensor_parallel import TensorParallel

pytestmark = pytest.mark.usefixtures("quick_compile")


def losses(step: Any, state: Any, rows: int = 16, steps: int = 3) -> tuple[list[float], Any]:
    found = []
    for tokens in batches(rows, steps):
        state, loss = step(state, tokens)
        found.append(float(loss))
    return found, state


@pytest.mark.slow
def test_a_kernel_runs_on_the_rows_of_a_micro_batch() -> None:
    zero = zero_on(2, 2, 4)

    def create(per_device: Any) -> Any:
        model = models.KernelStack(per_device)
        plain = models.state_of(models.KernelStack(), jnp.zeros((1, models.TOKENS), jnp.int32))
        return plain.replace(apply_fn=model.apply)

    got, _ = losses(zero(models.train_step), zero.init(lambda: create(zero.per_device)))
    want, _ = losses(jax.jit(models.train_step), create(None))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.slow
def test_tensor_parallelism() -> None:
    mesh = zerojax.mesh(axes={"stage": 2, "data": 2, "model": 2})
    tensor = TensorParallel(mesh)
    zero = zerojax.zero(
        stage=1, gradient_accumulation_steps=4, gradient_clipping=0.0, mesh=mesh,
        specs=tensor.specs,
    )  # fmt: skip
    config = LlamaConfig(
        vocab_size=32, block_size=8, n_layer=4, n_head=4, n_kv_head=2, n_embd=16, n_inner=32,
        scan=True, remat=True,
    )  # fmt: skip
    tokens = jnp.zeros((1, 8), jnp.int32)
    plain = models.state_of(Llama(config), tokens, tx=models.SGD)
    cut = plain.replace(apply_fn=Llama(config, tensor=tensor).apply)
    got, _ = losses(zero(models.train_step), zero.init(lambda: cut))
    want, _ = losses(jax.jit(models.train_step), plain)
    np.testing.assert_allclose(got, want, rtol=1e-5)


FP16: dict[str, Any] = {
    "fp16": {"enabled": True, "initial_scale_power": 30},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 0.0,
}


def in_fp16(zero: zerojax.Zero) -> tuple[int, Any]:
    """Returns the number of skipped steps of four, and the parameters."""
    _, state = losses(zero(models.train_step), zero.init(models.stack), steps=4)
    return int(zerojax.telemetry(state)["skipped_steps"]), jax.device_get(state.params)


@pytest.mark.slow
def test_fp16_skips_as_without_stages() -> None:
    mesh = zerojax.mesh(4, axes={"stage": 2, "data": 2})
    skipped, params = in_fp16(zerojax.zero(FP16 | {"gradient_accumulation_steps": 4}, mesh=mesh))
    other, others = in_fp16(zerojax.zero(FP16, mesh=zerojax.mesh(4)))
    assert skipped == other > 0
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)


@pytest.mark.slow
def test_a_checkpoint_goes_to_other_stages(tmp_path: Path) -> None:
    zero = zero_on(4, 2, 4)
    step, state = zero(models.train_step), zero.init(models.stack)
    state, _ = step(state, batches(16, 1)[0])
    with Checkpointer(tmp_path, zero) as checkpoints:
        checkpoints.save(1, state)
    for other in (zero_on(2, 2, 4, stage=3), zerojax.zero(stage=2)):
        with Checkpointer(tmp_path, other) as checkpoints:
            restored = checkpoints.restore(other.abstract_state(models.stack))
        trees = (jax.tree.leaves((s.params, s.opt_state)) for s in (state, restored))
        for x, y in zip(*trees, strict=True):
            np.testing.assert_array_equal(jax.device_get(x), jax.device_get(y))


@pytest.mark.slow
def test_a_sharded_teacher_as_a_further_argument() -> None:
    def distill(state: Any, tokens: jax.Array, teacher: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            (logits, _), (other, _) = (
                state.apply_fn({"params": p}, tokens) for p in (params, teacher)
            )
            return ((logits - other) ** 2).mean() + models.cross_entropy(logits, tokens)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    def create(factor: float = 1.0) -> Any:
        state = models.state_of(
            models.Stack(layers=2), jnp.zeros((1, models.TOKENS), jnp.int32), tx=models.SGD
        )
        return state.replace(params=jax.tree.map(lambda x: x * factor, state.params))

    found = []
    zero = zero_on(2, 2, 4, 3)
    for step, init in ((zero(distill), zero.init), (jax.jit(distill), lambda create: create())):
        state, teacher = init(create), init(lambda: create(0.5)).params
        for tokens in batches(24, 2):
            state, loss = step(state, tokens, teacher)
            found.append(float(loss))
    np.testing.assert_allclose(found[:2], found[2:], rtol=1e-5)
