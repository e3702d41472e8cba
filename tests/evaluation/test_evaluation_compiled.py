"""What an evaluation moves and holds, from compiling for H100s that are not there."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import zerojax
from benchmarks.measure import Case, create_state_of
from benchmarks.offload_programs import OffloadCase
from zerojax.hlo.traffic import collectives
from zerojax.models.loss import loss_fn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]

GIGA = 10**9
# Few rows leave the weights of a wider model sharded.
TOY: Any = {"n_layer": 8, "n_head": 8, "n_embd": 448, "vocab_size": 512, "block_size": 32}
SMALL = Case(stage=3, scan=True, micro_batch=1, **TOY)
LAYER = 2 * 12 * SMALL.n_embd**2  # bytes of its matrices in bf16
HOST = OffloadCase(
    stage=3, optimizer=True, param=True, devices=1, scan=True, n_layer=40, n_embd=5120, n_head=40
)


class Cost(NamedTuple):
    """Of one device, in bytes; ``gathers`` in units of the parameters' bytes in bf16."""

    arguments: int
    temporaries: int
    host: int
    gathers: float
    kinds: set[str]


@functools.cache
def cost(case: Case, rows: int) -> Cost:
    config: Any = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case.stage},
    }
    config = case.config if isinstance(case, OffloadCase) else config
    zero = zerojax.zero(config, mesh=zerojax.topology(case.device, case.devices))
    state = zero.abstract_state(create_state_of(case.model), jax.random.key(0))

    @zero.evaluate
    def loss(state: Any, batch: Any) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        return loss_fn(state.apply_fn({"params": state.params}, inputs), targets)

    shape = jax.ShapeDtypeStruct((rows, case.block_size + 1), jnp.int32)
    ((name, lowered, times),) = loss.programs(state, {"tokens": shape})
    assert (name, times) == ("evaluation", 1)
    compiled: Any = lowered.compile()
    memory, found = compiled.memory_analysis(), collectives(compiled.as_text())
    gathered = sum(x.payload_bytes * x.times for x in found if x.kind == "all-gather")
    return Cost(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.host_argument_size_in_bytes,
        gathered / (2 * sum(x.size for x in jax.tree.leaves(state.params))),
        {x.kind for x in found},
    )


@pytest.mark.slow
def test_every_parameter_is_gathered_once() -> None:
    found = cost(SMALL, 8)
    assert found.gathers == pytest.approx(1, abs=0.05)
    assert found.kinds == {"all-gather", "all-reduce"}


@pytest.mark.slow
def test_every_micro_batch_gathers_once_at_stage_3() -> None:
    found = cost(SMALL, 20)  # the third with copies of the last row
    assert found.gathers == pytest.approx(3, abs=0.15)
    assert found.kinds == {"all-gather", "all-reduce"}
    assert found.temporaries < cost(SMALL, 8).temporaries + LAYER


@pytest.mark.slow
def test_all_micro_batches_gather_once_at_stage_2() -> None:
    found = cost(dataclasses.replace(SMALL, stage=2), 20)
    assert found.gathers == pytest.approx(1, abs=0.05)
    assert found.kinds == {"all-gather", "all-reduce"}


@pytest.mark.slow
def test_peak_is_a_layer_above_the_inputs() -> None:
    # The layer in use, as gathered and in the layout of its products, and the next layer.
    assert cost(SMALL, 8).temporaries < 3.2 * LAYER


@pytest.mark.sweep
def test_13b_in_host_memory_evaluates_in_3_gb() -> None:
    found = cost(HOST, 1)
    assert found.arguments + found.temporaries < 3 * GIGA
    assert found.host == pytest.approx(25.7 * GIGA, rel=0.01)
    several = cost(HOST, 4)
    assert several.temporaries == pytest.approx(found.temporaries, rel=0.01)
