"""Rows cut along their tokens: a mesh with the axis "seq"."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import megatron_specs
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_equality import assert_near, host

import zerojax
from zerojax.checkpoint import Checkpointer
from zerojax.config import OffloadOptimizer, OffloadParam
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.llama import Llama, LlamaConfig
from zerojax.models.names import mini
from zerojax.models.tensor_parallel import TensorParallel
from zerojax.tuning.workload import workload

pytestmark = pytest.mark.usefixtures("quick_compile", "in_float64")

MESHES = {
    "4x2": {"data": 4, "seq": 2},
    "2x4": {"data": 2, "seq": 4},
    "1x8": {"data": 1, "seq": 8},
    "2x2x2": {"replica": 2, "data": 2, "seq": 2},
}
T, V = 16, 32
# Two heads of keys and values for eight of queries: repeated where more devices share the tokens.
LLAMA = LlamaConfig(
    vocab_size=V, block_size=T, n_layer=4, n_head=8, n_kv_head=2, n_embd=32, n_inner=48, scan=True,
    remat=True, mlp_chunks=2, loss_chunks=2,
)  # fmt: skip
PLAIN_LLAMA = LlamaConfig(
    vocab_size=V, block_size=T, n_layer=2, n_head=8, n_kv_head=4, n_embd=32, n_inner=48
)
GPT_2 = GPTConfig(vocab_size=V, block_size=T, n_layer=2, n_head=8, n_embd=32)
MODELS: dict[str, Callable[[Any], Any]] = {
    "llama_scan_remat_tiled": lambda sequence: Llama(LLAMA, sequence=sequence),
    "llama": lambda sequence: Llama(PLAIN_LLAMA, sequence=sequence),
    "gpt": lambda sequence: GPT(GPT_2, sequence=sequence),
}
TX = optax.adamw(1e-2, eps=1e-4)  # what a key's bias gets is rounding, and stays little


@functools.cache
def start(name: str) -> TrainState:
    """On one device."""
    model = MODELS[name](None)
    variables = model.init(jax.random.key(0), jnp.zeros((1, T), jnp.int32))
    params = jax.tree.map(lambda x: x.astype(jnp.float64), variables["params"])
    return TrainState.create(apply_fn=model.apply, params=params, tx=TX)


def train_step(state: TrainState, batch: Any) -> Any:
    """The mean loss of the tokens that the mask leaves."""

    def loss_fn(params: Any) -> jax.Array:
        losses = state.apply_fn({"params": params}, batch["tokens"], targets=batch["targets"])
        return zerojax.weighted_mean(losses, batch["mask"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def batches(steps: int = 3, tokens: int = T) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    rows = rng.integers(V, size=(steps, 8, tokens + 1))
    mask = rng.integers(2, size=(steps, 8, tokens)).astype(np.float64)
    return [
        {"tokens": row[:, :-1], "targets": row[:, 1:], "mask": m}
        for row, m in zip(rows, mask, strict=True)
    ]


def run(step: Any, state: Any) -> tuple[list[float], Any]:
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, host(state.params)


@functools.cache
def plain(name: str) -> tuple[list[float], Any]:
    """Under ``jax.jit``, on one device."""
    return run(jax.jit(train_step), start(name))


COMMON = {
    ("llama_scan_remat_tiled", "2x4", 3, 1), ("gpt", "1x8", 3, 1), ("llama", "4x2", 2, 2),
    ("llama", "2x2x2", 3, 1), ("gpt", "4x2", 1, 1),
}  # fmt: skip
# A fifth of all, in which any two values meet.
MANY = {
    case for i, case in enumerate(itertools.product(MODELS, MESHES, range(4), (1, 2))) if i % 5 == 0
}


@pytest.mark.parametrize(
    ("name", "mesh", "stage", "accumulation"),
    [
        pytest.param(*case, marks=() if case in COMMON else pytest.mark.sweep)
        for case in sorted(COMMON | MANY)
    ],
)
def test_a_step_computes_what_the_plain_one_computes(
    name: str, mesh: str, stage: int, accumulation: int
) -> None:
    zero = zerojax.zero(
        stage=stage,
        mesh=zerojax.mesh(axes=MESHES[mesh]),
        gradient_accumulation_steps=accumulation,
        stage3_param_persistence_threshold=0,
    )
    model = MODELS[name](zero.sequence)
    state = start(name).replace(apply_fn=model.apply)
    losses, params = run(zero(train_step), zero.init(lambda: state))
    want, want_params = plain(name)
    np.testing.assert_allclose(losses, want, rtol=1e-9)
    assert_near(params, want_params, 1e-9)


def zero_on(mesh: str, **keywords: Any) -> zerojax.Zero:
    keywords = {"stage": 3, "stage3_param_persistence_threshold": 0} | keywords
    return zerojax.zero(**keywords, mesh=zerojax.mesh(axes=MESHES[mesh]))


def placed(zero: zerojax.Zero, name: str) -> Any:
    state = start(name).replace(apply_fn=MODELS[name](zero.sequence).apply)
    return zero.init(lambda: state)


def follows_plain(zero: zerojax.Zero, name: str) -> None:
    losses, params = run(zero(train_step), placed(zero, name))
    np.testing.assert_allclose(losses, plain(name)[0], rtol=1e-9)
    assert_near(params, plain(name)[1], 1e-9)


@pytest.mark.parametrize(
    "keywords",
    [
        {"offload_optimizer": OffloadOptimizer()},
        pytest.param(
            {
                "offload_optimizer": OffloadOptimizer(),
                "offload_param": OffloadParam(),
                "cpu_checkpointing": True,
            },
            marks=pytest.mark.sweep,
        ),
        pytest.param({"zero_hpz_partition_size": 4}, marks=pytest.mark.sweep),
    ],
    ids=["optimizer", "all", "hpz"],
)
def test_offload_and_partitions(keywords: Any) -> None:
    follows_plain(zero_on("4x2", **keywords), "llama_scan_remat_tiled")


def test_the_state_is_cut_over_both_axes_and_the_plan_says_so() -> None:
    zero = zero_on("4x2")
    state = placed(zero, "gpt")
    for x in jax.tree.leaves(state.params):
        assert len({str(shard.index) for shard in x.addressable_shards}) == 8
    title = str(zero.plan(state)).splitlines()[0]
    assert title == "ZeRO stage 3 over 8 devices (axis 'data+seq')"


def test_a_batch_lies_by_rows_and_tokens() -> None:
    step = zero_on("2x4")(train_step)
    lowered = step.lower(placed(zero_on("2x4"), "gpt"), batches(1)[0])
    shapes = lowered.compile().input_shardings[0]
    batch = jax.tree.leaves(shapes)[-3:]
    assert [x.shard_shape((8, T)) for x in batch] == [(4, T // 4)] * 3


def test_evaluation() -> None:
    zero = zero_on("2x4", train_micro_batch_size_per_gpu=1)

    def losses(state: TrainState, batch: Any) -> Any:
        each = state.apply_fn({"params": state.params}, batch["tokens"], targets=batch["targets"])
        return {"each": each, "mean": zerojax.weighted_mean(each, batch["mask"])}

    batch = {name: x[:7] for name, x in batches(1)[0].items()}
    got = zero.evaluate(losses)(placed(zero, "llama"), batch)
    assert_near(host(got), host(jax.jit(losses)(start("llama"), batch)), 1e-9)


class Own(nn.Module):
    """A model of a user's: one head a feature pair, and the shift of labels inside the step."""

    sequence: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(V, 16, param_dtype=jnp.float64)(tokens)
        dense = functools.partial(nn.DenseGeneral, use_bias=False, param_dtype=jnp.float64)
        q, k, v = (dense((8, 2), name=name)(x) for name in "qkv")
        attend = functools.partial(nn.dot_product_attention, mask=nn.make_causal_mask(tokens))
        attend = self.sequence.attention(attend) if self.sequence else attend
        return dense(V, axis=(-2, -1), name="out")(attend(q, k, v))


def own_step(state: TrainState, batch: Any) -> Any:
    tokens = batch["tokens"]
    seen = jnp.broadcast_to(jnp.arange(T) < T - 1, tokens.shape)

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.roll(tokens, -1, axis=1)
        )
        return zerojax.weighted_mean(losses, seen)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


@pytest.mark.parametrize("asked", [True, False])
def test_a_model_of_the_users(asked: bool) -> None:
    """Right with the one line around attention, and without."""
    zero = zero_on("2x4")
    params = Own().init(jax.random.key(0), jnp.zeros((1, T), jnp.int32))["params"]
    make = functools.partial(TrainState.create, params=params, tx=TX)
    want = run(jax.jit(own_step), make(apply_fn=Own().apply))
    model = Own(zero.sequence if asked else None)
    state = make(apply_fn=model.apply)
    losses, got = run(zero(own_step), zero.init(lambda: state))
    np.testing.assert_allclose(losses, want[0], rtol=1e-9)
    assert_near(got, want[1], 1e-9)


def test_with_a_model_axis() -> None:
    """Heads and features cut over "model" by specs of the user's."""
    mesh = zerojax.mesh(axes={"data": 2, "seq": 2, "model": 2})
    zero = zerojax.zero(
        stage=3, mesh=mesh, specs=megatron_specs(start("gpt").params),
        stage3_param_persistence_threshold=0,
    )  # fmt: skip
    follows_plain(zero, "gpt")
    title = str(zero.plan(placed(zero, "gpt"))).splitlines()[0]
    assert title == "ZeRO stage 3 over 4 devices (axis 'data+seq'), other axes {'model': 2}"


@pytest.mark.parametrize("name", ["llama_scan_remat_tiled", "gpt"])
def test_with_tensor_parallelism(name: str) -> None:
    """Tokens are cut over both axes between blocks, heads in attention."""
    mesh = zerojax.mesh(axes={"data": 2, "seq": 2, "model": 2})
    tensor = TensorParallel(mesh)
    zero = zerojax.zero(
        stage=3, mesh=mesh, specs=tensor.specs, stage3_param_persistence_threshold=0
    )
    model = MODELS[name](zero.sequence).copy(tensor=tensor)
    state = start(name).replace(apply_fn=model.apply)
    losses, params = run(zero(train_step), zero.init(lambda: state))
    np.testing.assert_allclose(losses, plain(name)[0], rtol=1e-9)
    assert_near(params, plain(name)[1], 1e-9)


def test_another_mesh_restores_the_state(tmp_path: Path) -> None:
    zero, other = zero_on("4x2"), zero_on("2x4")
    step = zero(train_step)
    state, _ = step(placed(zero, "gpt"), batches(1)[0])
    with Checkpointer(tmp_path, zero) as saver:
        saver.save(1, state)
    with Checkpointer(tmp_path, other) as reader:
        back = reader.restore(placed(other, "gpt"))
    assert_near(host(back.params), host(state.params), 0)


def test_a_bare_model_by_name() -> None:
    """As `zerojax plan` takes one: inputs and labels are two arrays."""
    zero = zero_on("2x4")
    made = workload(functools.partial(mini, zero=zero), zero, rows=2, seq=128)
    rng = np.random.default_rng(0)
    batch = jax.tree.map(lambda x: rng.integers(256, size=x.shape, dtype=x.dtype), made.batch)
    _, metrics = zero(made.train_step)(zero.init(made.create_state, jax.random.key(0)), batch)
    assert 5 < metrics["loss"] < 6  # ln(256) is 5.55


def test_tokens_that_do_not_divide() -> None:
    zero = zero_on("2x4")
    with pytest.raises(ValueError, match=r"'mask'.* \(8, 15\): its dimension of 15 tokens does"):
        zero(train_step)(placed(zero, "gpt"), batches(1, 15)[0])
    with pytest.raises(ValueError, match=r"4 devices of the axis 'seq': make it 12 or 16"):
        zero(train_step)(placed(zero, "gpt"), batches(1, 15)[0])
    with pytest.raises(ValueError, match=r"15 tokens does not divide"):
        zero.evaluate(lambda state, batch: batch["mask"])(placed(zero, "gpt"), batches(1, 15)[0])


def test_heads_that_do_not_divide() -> None:
    zero = zero_on("2x4")
    model = GPT(GPTConfig(vocab_size=V, block_size=T, n_layer=1, n_head=2, n_embd=32))
    params = model.init(jax.random.key(0), jnp.zeros((1, T), jnp.int32))
    with pytest.raises(ValueError, match="its 2 heads do not divide among the 4 devices of 'seq'"):
        model.copy(sequence=zero.sequence).apply(params, batches(1)[0]["tokens"])


def test_meshes_and_specs_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"write axes=\{'data': 1, 'seq': 8\}"):
        zerojax.zero(stage=3, mesh=zerojax.mesh(axes={"seq": 8}))
    zero = zerojax.zero(stage=3, mesh=zerojax.mesh(axes=MESHES["4x2"]), specs=P(None, "seq"))
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=TX)
    with pytest.raises(ValueError, match="names the axis 'seq', but ZeRO shards over 'data' and"):
        zero.init(lambda: state)


def test_explicit_axes() -> None:
    zero = zero_on("2x4")
    q = jnp.ones((2, T, 8, 2))
    with (
        jax.set_mesh(jax.make_mesh((2, 4), ("data", "seq"), (AxisType.Explicit,) * 2)),
        pytest.raises(ValueError, match="axes 'data', 'seq' explicit: call the step outside of"),
    ):
        zero.sequence.attention(nn.dot_product_attention)(q, q, q)


def test_an_axis_of_one_device_changes_nothing() -> None:
    zero = zerojax.zero(stage=3, mesh=zerojax.mesh(axes={"data": 8, "seq": 1}))
    assert zero.sequence is None
    assert zero.states.axis == "data"
