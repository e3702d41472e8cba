"""Rows split along their tokens: a mesh with the axis "seq"."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal import arguments, assert_near, assert_same, check, follow, host, start, zero_for
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs import PROGRAMS
from programs.layouts import megatron_specs
from programs.sequences import LLAMA, TX, UNROLLED_LLAMA, T, V, step_of

import zerojax
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.llama import Llama
from zerojax.models.tensor_parallel import TensorParallel

pytestmark = pytest.mark.usefixtures("quick_compile", "in_float64")

MESHES = {"4x2": {"data": 4, "seq": 2}, "2x4": {"data": 2, "seq": 4}}
WITH_MODEL = {"data": 2, "seq": 2, "model": 2}
TITLE = "ZeRO stage 3 over 4 devices (axis 'data+seq'), other axes {'model': 2}"


def zero_on(mesh: str, **keywords: Any) -> zerojax.Zero:
    return zero_for(3, axes=MESHES[mesh], **keywords)


def placed(zero: zerojax.Zero, name: str = "sequence_gpt") -> Any:
    state = start(name, "float64")
    return zero.init(lambda: state)


def batch_of(rows: int = 8, tokens: int = T) -> dict[str, np.ndarray]:
    ((given,),) = arguments("sequence_gpt", "float64", steps=1)
    return {name: x[:rows, :tokens] for name, x in given.items()}


def aware(zero: zerojax.Zero) -> Any:
    """The step of a model that knows the axis."""
    return PROGRAMS["sequence_gpt"].step_on(zero)


def test_the_state_is_cut_over_both_axes_and_the_plan_says_so() -> None:
    zero = zero_on("4x2")
    state = placed(zero)
    for x in jax.tree.leaves(state.params):
        assert len({str(shard.index) for shard in x.addressable_shards}) == 8
    title = str(zero.plan(state)).splitlines()[0]
    assert title == "ZeRO stage 3 over 8 devices (axis 'data+seq')"


def test_a_batch_lies_by_rows_and_tokens() -> None:
    zero = zero_on("2x4")
    lowered = zero(aware(zero)).lower(placed(zero), batch_of())
    shapes = lowered.compile().input_shardings[0]
    batch = jax.tree.leaves(shapes)[-3:]
    assert [x.shard_shape((8, T)) for x in batch] == [(4, T // 4)] * 3


@pytest.mark.slow
def test_evaluation() -> None:
    zero = zero_on("2x4", train_micro_batch_size_per_gpu=1)

    def losses(model: Any) -> Any:
        def evaluated(state: TrainState, batch: Any) -> Any:
            variables = {"params": state.params}
            each = model.apply(variables, batch["tokens"], targets=batch["targets"])
            return {"each": each, "mean": zerojax.weighted_mean(each, batch["mask"])}

        return evaluated

    batch, name = batch_of(7), "sequence_llama"
    split = losses(Llama(UNROLLED_LLAMA, sequence=zero.sequence))
    got = zero.evaluate(split)(placed(zero, name), batch)
    want = jax.jit(losses(Llama(UNROLLED_LLAMA)))(start(name, "float64"), batch)
    assert_near(host(got), host(want), 1e-9)


@pytest.mark.slow
def test_with_a_model_axis() -> None:
    """Heads and features sharded over "model" by specs of the user's."""
    specs = megatron_specs(start("sequence_gpt", "float64").params)
    check("sequence_gpt", axes=WITH_MODEL, created_by_zero=True, specs=specs)
    zero = zero_for(axes=WITH_MODEL, specs=specs)
    assert str(zero.plan(start("sequence_gpt", "float64"))).splitlines()[0] == TITLE


@pytest.mark.slow
def test_with_tensor_parallelism() -> None:
    """Tokens are split over both axes between blocks, heads in attention."""
    tensor = TensorParallel(zerojax.mesh(axes=WITH_MODEL))
    zero = zero_for(axes=WITH_MODEL, specs=tensor.specs)
    name = "sequence_llama_scan"
    step = step_of(Llama(LLAMA).copy(sequence=zero.sequence, tensor=tensor))
    got = follow(PROGRAMS[name], zero(step), placed(zero, name))
    assert_same(PROGRAMS[name], got, "float64")


def test_tokens_that_do_not_divide() -> None:
    zero = zero_on("2x4")
    with pytest.raises(
        ValueError,
        match=r"'mask'.* \(8, 15\): the 4 devices .* do not divide its 15",
    ):
        zero(aware(zero))(placed(zero), batch_of(tokens=15))
    with pytest.raises(ValueError, match=r"4 devices of the axis 'seq'.*Pad it to 12 or 16"):
        zero(aware(zero))(placed(zero), batch_of(tokens=15))
    with pytest.raises(ValueError, match=r"do not divide its 15 tokens"):
        zero.evaluate(lambda state, batch: batch["mask"])(placed(zero), batch_of(tokens=15))


@pytest.mark.slow
def test_heads_that_do_not_divide() -> None:
    zero = zero_on("2x4")
    model = GPT(GPTConfig(vocab_size=V, block_size=T, n_layer=1, n_head=2, n_embd=32))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, T), jnp.int32))
    with pytest.raises(ValueError, match="the 4 devices of 'seq' do not divide the 2 heads"):
        jax.eval_shape(model.copy(sequence=zero.sequence).apply, params, batch_of()["tokens"])


def test_meshes_and_specs_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"add it: axes=\{'data': 1, 'seq': 8\}"):
        zerojax.zero(stage=3, mesh=zerojax.mesh(axes={"seq": 8}))
    zero = zerojax.zero(stage=3, mesh=zerojax.mesh(axes=MESHES["4x2"]), specs=P(None, "seq"))
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=TX)
    with pytest.raises(ValueError, match="names the axis 'seq', over which"):
        zero.init(lambda: state)


def test_explicit_axes() -> None:
    zero = zero_on("2x4")
    q = jnp.ones((2, T, 8, 2))
    with (
        jax.set_mesh(jax.make_mesh((2, 4), ("data", "seq"), (AxisType.Explicit,) * 2)),
        pytest.raises(ValueError, match=r"declares 'data', 'seq' explicit\. Call the step"),
    ):
        zero.sequence.attention(nn.dot_product_attention)(q, q, q)


def test_an_axis_of_one_device_changes_nothing() -> None:
    zero = zerojax.zero(stage=3, mesh=zerojax.mesh(axes={"data": 8, "seq": 1}))
    assert zero.sequence is None
    assert zero.states.axis == "data"
