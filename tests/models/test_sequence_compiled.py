"""What XLA:GPU compiles of a Llama whose rows are cut along their tokens."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.hlo.traffic import collectives
from zerojax.models.attention import planned_attention
from zerojax.models.llama import Llama, LlamaConfig

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("require_gpu_compiler")]

TOKENS, LAYERS, WIDTH, HEADS, GROUPS = 32768, 4, 512, 16, 8
CONFIG = LlamaConfig(
    vocab_size=2048, block_size=TOKENS, n_layer=LAYERS, n_head=HEADS, n_kv_head=GROUPS,
    n_embd=WIDTH, n_inner=1536, scan=True, remat=True, mlp_chunks=4, loss_chunks=4,
)  # fmt: skip


@pytest.mark.slow
def test_heads_change_places_and_no_row_is_gathered() -> None:
    axes = {"data": 2, "seq": 4}
    zero = zerojax.zero(stage=3, bf16=True, mesh=zerojax.topology("h100", 8, axes=axes))
    attention = planned_attention(zero, "cudnn")
    assert attention is not None
    model = Llama(CONFIG, attention, sequence=zero.sequence)

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, TOKENS), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    def step(state: TrainState, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return state.apply_fn({"params": params}, batch["x"], targets=batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    state = zero.abstract_state(create, jax.random.key(0))
    rows, seq = axes["data"], axes["seq"]
    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((rows, TOKENS), jnp.int32))
    text = zero(step).lower(state, batch).compile().as_text()
    sent, largest = Counter[str](), 0  # the largest array that is gathered
    for each in collectives(text):
        sent[each.kind] += each.moved_bytes
        if each.kind == "all-gather":
            largest = max(largest, *(shape.bytes for shape in each.shapes))

    size = sum(x.size for x in jax.tree.leaves(state.params))
    layer = sum(x.size for x in jax.tree.leaves(state.params["layers"])) // LAYERS
    assert largest <= 2 * layer < 2 * GROUPS * (WIDTH // HEADS) * TOKENS  # of k
    assert sent["all-gather"] == pytest.approx(2 * 2 * size * 7 / 8, rel=0.1)
    assert sent["reduce-scatter"] == pytest.approx(2 * size * 7 / 8, rel=0.1)
    # q, k, v and the result: in the forward pass, its repetition and the backward pass.
    elements = 2 * (HEADS + max(GROUPS, seq)) * (WIDTH // HEADS) * TOKENS // seq
    exchanged = 3 * 2 * elements * LAYERS * (seq - 1) / seq
    assert sent["all-to-all"] == pytest.approx(exchanged, rel=0.05)
    assert sent["all-reduce"] < 1e5
    assert sent["collective-permute"] == 0
