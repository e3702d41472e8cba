"""Programs of generation as the GPU compiler makes them: memory, collectives, bytes read."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.devices.mesh import laid_out
from zerojax.foresight.devices import parse_devices
from zerojax.generation.forecast import Batch, GenerationForecast, forecast
from zerojax.models.llama import SIZES, Llama, LlamaConfig
from zerojax.models.tensor_parallel import TensorParallel

pytestmark = [pytest.mark.gpu_compile, pytest.mark.slow]

SMALL = SIZES["llama-7b"] | {"n_layer": 2, "vocab_size": 4096}


def found(
    sizes: Any,
    devices: int = 1,
    weights: Any = "gathered",
    bits: int = 16,
    kind: str = "h100",
    rows: int = 1,
    axis: str = "model",
    **keywords: Any,
) -> GenerationForecast:
    mesh, rates = parse_devices(f"{kind}:{devices}")
    tensor = None
    if devices > 1 and axis == "model":
        mesh = laid_out(mesh, {"data": 1, "model": devices})
        tensor = TensorParallel(mesh)
    model = Llama(LlamaConfig(**sizes | {"scan": True}), tensor=tensor)
    zero = zerojax.zero(
        stage=3, bf16=True, mesh=mesh, specs=tensor.specs if tensor else None, **keywords
    )

    def create() -> TrainState:
        params = model.init(jax.random.key(0), jnp.ones((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    params = zero.abstract_state(create).params
    params = params if bits == 16 else zerojax.quantize_weights(params, bits)
    batch = Batch(rows, prompt=128, new=128)
    return forecast(model, params, batch, mesh=mesh, rates=rates, weights=weights)


def test_13b_from_host_memory_fits_in_6_gb() -> None:
    from_host = found(
        SIZES["llama-13b"], weights="by_layer", offload_param="cpu", offload_optimizer="cpu"
    )
    assert from_host.on_host
    assert from_host.peak - from_host.cache_bytes < 6e9
    (copies,) = (t for t in from_host.token.traffic if t.kind == "to the device")
    assert copies.bytes < 1.05 * from_host.parameter_bytes


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_token_reads_each_weight_once(bits: int) -> None:
    one = found(SMALL, bits=bits)
    assert one.token_bytes < 1.1 * (one.parameter_bytes + one.cache_bytes)


def test_a_token_reads_the_cache_once() -> None:
    """XLA does not transpose it: it lies as attention reads it, and each row's part is written in
    place."""
    many = found(SMALL | {"n_kv_head": 8}, rows=512)
    assert many.cache_bytes > many.parameter_bytes
    assert many.token_bytes < 1.35 * (many.parameter_bytes + many.cache_bytes)


@pytest.mark.parametrize(("kind", "devices"), [("a100", 8), ("a100", 4), ("h100", 2)])
def test_a_token_reads_each_shard_once(kind: str, devices: int) -> None:
    one = found(SMALL, devices, kind=kind)
    assert one.token_bytes < 1.1 * (one.parameter_bytes + one.cache_bytes)


def test_by_layer_a_token_reads_each_shard_once() -> None:
    """Rows are sent, and weights stay sharded: no layer is copied out of its stack."""
    at_rest = found(SMALL, devices=8, weights="by_layer", rows=8, axis="data")
    least = at_rest.parameter_bytes + at_rest.cache_bytes
    assert at_rest.token_bytes < 1.15 * least
    assert sum(at_rest.token.memory.values()) < 1.1 * least


@pytest.mark.parametrize("rows", [8, 1])
def test_few_layers_are_gathered_at_once(rows: int) -> None:
    sizes = SMALL | {"n_layer": 6}
    at_rest = found(sizes, devices=8, weights="by_layer", bits=8, rows=rows, axis="data")
    layer = 8 * at_rest.parameter_bytes / sizes["n_layer"]
    assert at_rest.token.memory["gathered parameters"] < 1.5 * layer


def test_tensor_parallel_tokens_have_megatrons_collectives() -> None:
    token = found(SMALL, devices=4).token
    counts = {t.kind: (t.times, t.bytes) for t in token.traffic}
    # Two a layer, one after the embedding, one of the largest logits.
    assert counts["all-reduce"][0] <= 2 * SMALL["n_layer"] + 2
    assert sum(b for kind, (_, b) in counts.items() if kind != "all-reduce") < 1024
