"""Products in fp8 as XLA compiles them for H100s: the gathers, the kernels, and the forecast."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.devices.network import nodes_of
from zerojax.devices.rates import rates
from zerojax.hlo.program import parse
from zerojax.hlo.timeline import program_time
from zerojax.hlo.traffic import collectives
from zerojax.hlo.work import Product, products
from zerojax.models import llama

pytestmark = pytest.mark.slow

ROWS, TOKENS, LEAST = 32, 1024, 2**20
KERNELS = '"__cublas$lt$matmul$f8"'


@functools.cache
def compiled(layers: int, *, scan: bool, fp8: bool) -> str:
    """The compiled step of a Llama of 8B's widths, of few layers and words, on 8 H100s."""
    zero = zerojax.zero(stage=3, bf16=True, fp8=fp8, mesh=zerojax.topology("h100", 8))
    sizes = {**llama.SIZES["llama3-8b"], "n_layer": layers, "vocab_size": 2048}
    model = llama.Llama(llama.LlamaConfig(**sizes, scan=scan, remat=True))

    def create_state() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-4))

    def step(state: TrainState, tokens: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            losses: Any = model.apply({"params": params}, tokens[:, :-1], targets=tokens[:, 1:])
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    batch = jax.ShapeDtypeStruct((ROWS, TOKENS + 1), jnp.int32)
    lowered = zero(step).lower(zero.abstract_state(create_state), batch)
    return lowered.compile().as_text() or ""


def products_of(text: str) -> list[Product]:
    """The products of each computation once, however often a loop runs it."""
    program = parse(text)
    found: list[Product] = []
    fused = {c.name for o in program.computations.values() for i in o.instructions
             if i.opcode != "while" for c in program.callees(i)}  # fmt: skip
    for computation in program.computations.values():
        if computation.name not in fused:
            for each in computation.instructions:
                found += products(program, computation, each)
    return found


def seconds(text: str) -> float:
    mesh = zerojax.topology("h100", 8)
    nodes = nodes_of(mesh)
    return program_time(parse(text), collectives(text), [], rates("h100"), nodes).seconds


@pytest.mark.parametrize("scan", [False, True])
def test_layers_are_gathered_and_multiplied_as_codes(scan: bool) -> None:
    text = compiled(5 if scan else 2, scan=scan, fp8=True)
    gathered = [each.bytes_by_dtype for each in collectives(text) if each.kind == "all-gather"]
    assert sum("f8e4m3fn" in each for each in gathered) >= 4
    # Not in bf16: but for the head and the table.
    assert all(each.get("bf16", 0) < 2 * 2048 * 4096 + LEAST for each in gathered)
    of_layers = [x for x in products_of(text) if "_proj" in x.op_name]
    assert {x.dtype for x in of_layers} == {"f8e4m3fn", "f8e5m2"}
    assert text.count(KERNELS) == len(of_layers)
    (maxima,) = (each for each in collectives(text) if each.bytes_by_dtype.get("bf16", 0) < 100
                 and each.kind == "all-reduce" and "bf16" in each.bytes_by_dtype)  # fmt: skip
    assert maxima.times == 1


def test_most_work_is_in_fp8_and_the_forecast_is_shorter() -> None:
    texts = [compiled(2, scan=False, fp8=fp8) for fp8 in (True, False)]
    found = products_of(texts[0])
    codes = sum(x.flops for x in found if x.dtype.startswith("f8"))
    assert codes > 0.9 * sum(x.flops for x in found)
    assert KERNELS not in texts[1]
    assert seconds(texts[0]) < 0.85 * seconds(texts[1])
