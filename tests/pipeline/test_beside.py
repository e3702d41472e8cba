"""Pipeline stages beside tensor parallelism and fp16."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline import models
from pipeline.models import batches

import zerojax
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
