"""What an evaluation of quantized weights gathers and holds, compiled for H100s."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import zerojax
from benchmarks.measure import Case, create_state_of
from zerojax.hlo.traffic import collectives
from zerojax.models.loss import loss_fn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]

CASE = Case(
    stage=3,
    scan=True,
    micro_batch=1,
    n_layer=8,
    n_head=8,
    n_embd=448,  # few rows leave the weights of a wider model sharded
    vocab_size=512,
    block_size=32,
)
LAYER = 2 * 12 * CASE.n_embd**2  # bytes of its matrices in bf16
BITS_AND_STAGES = pytest.mark.parametrize(("bits", "stage"), [(8, 3), (4, 1)])


class Cost(NamedTuple):
    """Of one device: bytes at rest and gathered for each parameter, temporary bytes in layers."""

    arguments: float
    gathered: float
    temporary: float


@functools.cache
def cost(bits: int, stage: int) -> Cost:
    config: Any = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100_000},
    }
    zero = zerojax.zero(config, mesh=zerojax.topology(CASE.device, CASE.devices))
    state = zero.abstract_state(create_state_of(CASE.model), jax.random.key(0))
    count = sum(x.size for x in jax.tree.leaves(state.params))

    @zero.evaluate
    def loss(state: Any, batch: Any) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        return loss_fn(state.apply_fn({"params": state.params}, inputs), targets)

    if bits < 16:
        state = zerojax.quantize_weights(state, bits)
    shape = jax.ShapeDtypeStruct((8, CASE.block_size + 1), jnp.int32)
    ((_, lowered, _),) = loss.programs(state, {"tokens": shape})
    compiled: Any = lowered.compile()
    found = collectives(compiled.as_text())
    gathered = sum(x.payload_bytes * x.times for x in found if x.kind == "all-gather")
    memory = compiled.memory_analysis()
    return Cost(
        CASE.devices * memory.argument_size_in_bytes / count,
        gathered / count,
        memory.temp_size_in_bytes / LAYER,
    )


@BITS_AND_STAGES
def test_codes_are_stored_and_gathered(bits: int, stage: int) -> None:
    found, plain = cost(bits, stage), cost(16, stage)
    assert found.gathered < bits / 8 + 0.03
    assert found.arguments < bits / 8 + 0.2 < plain.arguments / 3  # and replicated embeddings
    assert plain.gathered > 1.9


@BITS_AND_STAGES
def test_no_stack_is_dequantized(bits: int, stage: int) -> None:
    """Two layers' codes are gathered at a time, and one is dequantized."""
    at_stage_1 = CASE.n_layer * bits / 16 + 1.6
    assert cost(bits, stage).temporary < (at_stage_1 if stage == 1 else 2 * bits / 16 + 0.6)


@functools.cache
def quantized_alone(bits: Any, group_size: int | None) -> Any:
    mesh = zerojax.topology("h100", devices=8)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    x = jax.ShapeDtypeStruct((8, 4096, 4096), jnp.float32, sharding=sharding)

    def quantize(x: jax.Array) -> Any:
        return zerojax.quantize_weights({"w": x}, bits, group_size=group_size)

    return x, jax.jit(quantize).lower(x).compile()


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (8, 128), ("nf4", 64)])
def test_each_device_quantizes_its_shards(bits: Any, group_size: int | None) -> None:
    x, compiled = quantized_alone(bits, group_size)
    sent = sum(each.payload_bytes for each in collectives(compiled.as_text()))
    assert sent < x.size // 500  # the largest elements of columns
    shard = 4 * x.size // 8
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * shard
