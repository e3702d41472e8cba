"""Losses over a large vocabulary run for some tokens at a time, with the numbers of the step."""

from collections.abc import Callable, Mapping
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jaxprs import primitives

import zerojax
from zerojax.graph.rows import RowDimensions
from zerojax.hlo.traffic import collectives
from zerojax.models.loss import cross_entropy
from zerojax.trace.chunked_loss import Sizes, with_chunked_losses
from zerojax.xla import jaxprs

ROWS, TOKENS, WIDTH, WORDS = 4, 12, 3, 64
SIZES = Sizes(devices=1, sharded=False, least=ROWS * TOKENS * WORDS // 3)

Params, Batch = Mapping[str, Any], Mapping[str, Any]
Loss = Callable[[Params, Batch, jax.Array], Any]


def logits_of(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["head"]


def integer_labels(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(p, x), batch["labels"])
    return losses.mean()


def masked(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(p, x), batch["labels"])
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def one_hot(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], WORDS), 0.1)
    return optax.softmax_cross_entropy(logits_of(p, x), labels).mean()


def own_gradient(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    return cross_entropy(logits_of(p, x), batch["labels"]).mean()


def half_precision(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    logits = logits_of({"head": p["head"].astype("bfloat16")}, x.astype("bfloat16"))
    return cross_entropy(logits, batch["labels"]).mean()


def capped_with_z_loss(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    logits = 30 * jnp.tanh((logits_of(p, x) + p["bias"]) / 30)
    lse = jax.nn.logsumexp(logits, -1)
    picked = jnp.take_along_axis(logits, batch["labels"][..., None], -1)[..., 0]
    return (lse - picked + 1e-4 * lse**2).mean()


def tied(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    x = p["head"].T[batch["labels"]] + x
    return cross_entropy(x @ p["head"], batch["labels"]).mean()


def with_accuracy(p: Params, batch: Batch, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = logits_of(p, x)
    return cross_entropy(logits, batch["labels"]).mean(), logits.argmax(-1) == batch["labels"]


def clipped(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    return jnp.minimum(cross_entropy(logits_of(p, x), batch["labels"]), 5.0).mean()


def geometric(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    """Each cotangent depends on the losses of all tokens."""
    return jnp.exp(cross_entropy(logits_of(p, x), batch["labels"]).mean())


def shifted(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    return cross_entropy(logits_of(p, x)[:, :-1], batch["labels"][:, 1:]).mean()


def shifted_and_masked(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    logits, mask = logits_of(p, x), batch["mask"][:, 1:]
    shifted = jnp.clip(logits[..., :-1, :], -20, 20)
    losses = optax.softmax_cross_entropy_with_integer_labels(shifted, batch["labels"][:, 1:])
    return (losses * mask).sum() / mask.sum() + 1e-3 * (logits**2).mean()


def penalised_but_the_last(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    """The gradient of the bias sums over all tokens but the last."""
    logits = (x @ p["head"])[:, :-1] + p["bias"]
    return cross_entropy(logits, batch["labels"][:, 1:]).mean()


def sorted_words(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    return jnp.sort(logits_of(p, x), -1)[..., 0].mean()


def between_tokens(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    return (jnp.cumsum(logits_of(p, x), 1) ** 2).mean()


def mixed_tokens(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    logits = logits_of(p, x)
    return jnp.einsum("btv,bsv->bts", logits, logits).mean()


def without_tokens(p: Params, batch: Batch, x: jax.Array) -> jax.Array:
    flat = x.reshape(-1, WIDTH) @ p["head"]
    return cross_entropy(flat, batch["labels"].reshape(-1)).mean()


CHUNKED = (integer_labels, masked, one_hot, own_gradient, half_precision, capped_with_z_loss, tied,
           with_accuracy, clipped, shifted, shifted_and_masked)  # fmt: skip
UNCHANGED = (geometric, penalised_but_the_last, sorted_words, between_tokens, mixed_tokens,
             without_tokens)  # fmt: skip


def gradients(loss: Loss) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    params = {
        "in": rng.normal(size=(WIDTH, WIDTH)).astype("float32"),
        "head": rng.normal(size=(WIDTH, WORDS)).astype("float32"),
        "bias": rng.normal(size=WORDS).astype("float32"),
    }
    batch = {
        "x": rng.normal(size=(ROWS, TOKENS, WIDTH)).astype("float32"),
        "labels": rng.integers(0, WORDS, size=(ROWS, TOKENS)).astype("int32"),
        "mask": rng.integers(0, 2, size=(ROWS, TOKENS)).astype("float32"),
    }

    def run(params: Params, batch: Batch) -> Any:
        def of(params: Params) -> Any:
            return loss(params, batch, jnp.tanh(batch["x"] @ params["in"]))

        return jax.value_and_grad(of, has_aux=loss is with_accuracy)(params)

    return run, (params, batch)


def chunked(run: Callable[..., Any], sizes: Sizes = SIZES) -> Callable[..., Any]:
    """The function with its loss in chunks."""

    def changed(params: Params, batch: Batch) -> Any:
        closed = jax.make_jaxpr(run)(params, batch)
        dims = [*(None for _ in params), *(0 for _ in batch)]
        new = with_chunked_losses(closed, lambda x: RowDimensions.of_program(x, dims), sizes)
        return jaxprs.evaluate(new, jax.tree.leaves((params, batch)))

    return changed


@pytest.mark.parametrize("loss", CHUNKED)
def test_a_loop_over_tokens_has_the_numbers_of_the_step(loss: Loss) -> None:
    run, arguments = gradients(loss)
    traced = jax.make_jaxpr(chunked(run))(*arguments)
    assert "scan" in primitives(traced)
    sizes = [v.aval.size for eqn in traced.eqns for v in eqn.outvars]
    assert max(sizes) < ROWS * TOKENS * WORDS  # no array has all logits
    if loss is half_precision:  # which plain jit rounds once, and each sum is rounded otherwise
        found, expected = (jax.tree.leaves(f(*arguments)) for f in (chunked(run), run))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3)
    else:
        assert exact.differing(chunked(run), lambda *x: jax.tree.leaves(run(*x)), *arguments) == []


@pytest.mark.parametrize("loss", UNCHANGED)
def test_other_losses_stay_as_they_are(loss: Loss) -> None:
    run, (params, batch) = gradients(loss)
    closed = jax.make_jaxpr(run)(params, batch)
    dims = [*(None for _ in params), *(0 for _ in batch)]
    new = with_chunked_losses(closed, lambda x: RowDimensions.of_program(x, dims), SIZES)
    assert new is closed


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES._replace(least=ROWS * TOKENS * WORDS + 1),
        SIZES._replace(times=TOKENS * ROWS),  # the sum of the head's gradient outweighs the logits
    ],
)
def test_few_logits_stay_together(sizes: Sizes) -> None:
    run, arguments = gradients(own_gradient)
    assert "scan" not in primitives(jax.make_jaxpr(chunked(run, sizes))(*arguments))


def test_a_head_that_stays_sharded_needs_fewer_logits() -> None:
    run, arguments = gradients(own_gradient)
    sizes = SIZES._replace(times=TOKENS * ROWS, sharded=True)
    assert "scan" in primitives(jax.make_jaxpr(chunked(run, sizes))(*arguments))


V, DEVICES = 2**18, 8


def large_vocabulary(words: int) -> tuple[Any, Any]:
    """A step with a tied table, compiled for absent GPUs, and the shapes of its state."""
    mesh = zerojax.topology("h100", DEVICES)

    def create() -> TrainState:
        params = {"table": jnp.zeros((words, 512)), "inner": jnp.zeros((512, 512))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_of(p: Params) -> jax.Array:
            x = jnp.tanh(p["table"][tokens] @ p["inner"])
            logits = (x @ p["table"].T)[:, :-1]
            labels = tokens[:, 1:]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    zero = zerojax.zero(stage=3, bf16=True, mesh=mesh)
    state = zero.abstract_state(create)
    tokens = jax.ShapeDtypeStruct((DEVICES, 1024), jnp.int32)
    return zero(step).lower(state, tokens).compile(), state


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_each_gpu_computes_the_logits_of_its_own_words() -> None:
    compiled, state = large_vocabulary(V)
    sent = sum(each.times * each.moved_bytes for each in collectives(compiled.as_text()))
    assert sent < 0.25 * 2 * state.params["table"].size * 7 / 8  # gathered twice, and reduced: 3
    # A third of the three arrays that the loss of all tokens needs: logits, weights, cotangents.
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 2 * 1024 * V
