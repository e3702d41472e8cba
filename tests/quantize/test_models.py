"""Quantized models in ``zero.evaluate`` compute what plain jit does, and are saved and restored."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax.core import meta
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import Checkpointer
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.llama import Llama, LlamaConfig
from zerojax.models.tensor_parallel import TensorParallel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile")]

SIZES: Any = {"vocab_size": 64, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 32}
TOKENS = jax.random.randint(jax.random.key(1), (16, 8), 0, 64)
MODELS: dict[str, Any] = {
    "gpt scanned": GPT(GPTConfig(**SIZES, scan=True)),
    "gpt unrolled": GPT(GPTConfig(**SIZES)),
    "llama scanned": Llama(LlamaConfig(**SIZES, n_inner=64, scan=True)),
    "llama unrolled": Llama(LlamaConfig(**SIZES, n_inner=64)),
}


def creator(model: Any) -> Any:
    def create(key: jax.Array) -> TrainState:
        params = model.init(key, TOKENS[:1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    return create


def kernels(path: str, x: Any) -> bool:
    return "kernel" in path and len(x.shape) > 1


def logits(state: TrainState, tokens: jax.Array) -> jax.Array:
    return state.apply_fn({"params": state.params}, tokens)


def check(zero: zerojax.Zero, state: Any, plain: Any, dtype: Any = None) -> None:
    found = zero.evaluate(logits)(state, TOKENS)
    params = meta.unbox(jax.device_get(state.params))
    if dtype is not None:
        params = jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
        )
    run = jax.jit(lambda p, x: plain.apply({"params": zerojax.dequantize(p)}, x))
    np.testing.assert_allclose(
        found.astype(jnp.float32), run(params, TOKENS).astype(jnp.float32), atol=1e-6
    )


@pytest.mark.parametrize(("name", "stage"), [("gpt scanned", 1), *((name, 3) for name in MODELS)])
def test_models(name: str, stage: int) -> None:
    zero, model = zero_for(stage), MODELS[name]
    state = zero.init(creator(model), jax.random.key(0))
    check(zero, zerojax.quantize_weights(state, select=kernels), model)


@pytest.mark.parametrize("bits", [8, 4])
def test_scales_are_cast_to_the_compute_dtype(bits: int) -> None:
    zero, model = zero_for(3, bf16=True), MODELS["gpt scanned"]
    state = zero.init(creator(model), jax.random.key(0))
    check(zero, zerojax.quantize_weights(state, bits, select=kernels), model, jnp.bfloat16)


def test_weights_in_host_memory_stay_there() -> None:
    host = {"device": "cpu"}
    zero = zero_for(3, offload_param=host, offload_optimizer=host, train_micro_batch_size_per_gpu=1)
    model = MODELS["gpt scanned"]
    state = zero.init(creator(model), jax.random.key(0))
    quantized = zerojax.quantize_weights(state, select=kernels)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(quantized.params)}
    assert kinds == {"pinned_host"}
    check(zero, quantized, model)


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 4)])
def test_tensor_parallel_specs_are_kept(bits: int, group_size: int | None) -> None:
    mesh = zerojax.mesh(axes={"data": 4, "model": 2})
    config = LlamaConfig(**SIZES, n_inner=64, scan=True)
    model = Llama(config, tensor=(tensor := TensorParallel(mesh)))
    zero = zero_for(3, mesh=mesh, specs=tensor.specs)
    state = zero.init(creator(model), jax.random.key(0))
    quantized = zerojax.quantize_weights(state, bits, group_size=group_size, select=kernels)
    before = [x.sharding.spec for x in jax.tree.leaves(state.params)]
    nodes = jax.tree.leaves(meta.unbox(quantized.params), is_leaf=lambda x: hasattr(x, "qvalue"))
    after = [getattr(x, "qvalue", x).sharding.spec for x in nodes]
    assert before == after
    assert any("model" in str(spec) for spec in after)
    check(zero, quantized, Llama(config))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_a_checkpoint_has_the_codes(bits: int, tmp_path: Path) -> None:
    zero, other = zero_for(3), zero_for(1)
    state = zero.init(creator(MODELS["gpt unrolled"]), jax.random.key(0))
    quantized = zerojax.quantize_weights(state, bits, select=kernels)
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, quantized)
    with Checkpointer(tmp_path, other) as checkpointer:
        shapes = jax.eval_shape(lambda: quantized)
        restored = checkpointer.restore(shapes)
    assert jax.tree.structure(restored.params) == jax.tree.structure(quantized.params)
    for a, b in zip(
        jax.tree.leaves(restored.params), jax.tree.leaves(quantized.params), strict=True
    ):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
