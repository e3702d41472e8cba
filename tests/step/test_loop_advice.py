"""Advice on loops of a step, once, with the loop's line; silence on other loops."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from step.test_batch import several, several_in_train_state
from step.test_updates_in_loops import LOOPS
from train_state.test_pytree import BATCH, ROWS, TX, loss_of, params_and_opt_state, train_state

import zerojax

PARTS = 4


def updated_with(params: Any, opt_state: Any, loss: Any, grads: Any) -> Any:
    grads = jax.tree.map(lambda g: g / PARTS, grads)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss / PARTS


def by_index(params: Any, opt_state: Any, batch: Any) -> Any:
    """As big_vision's ``accumulate_gradient`` does."""
    size = ROWS // PARTS

    def part(i: Any) -> Any:
        rows = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size), batch)
        return jax.value_and_grad(loss_of)(params, rows)

    def add(i: Any, sums: Any) -> Any:
        return jax.tree.map(jnp.add, sums, part(i))

    return updated_with(params, opt_state, *lax.fori_loop(1, PARTS, add, part(0)))


def by_scan(params: Any, opt_state: Any, batch: Any) -> Any:
    """With an inner jit, from zeros."""
    parts = jax.tree.map(lambda x: x.reshape(PARTS, -1, *x.shape[1:]), batch)

    @jax.jit
    def add(sums: Any, part: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, part)
        return (sums[0] + loss, jax.tree.map(lambda a, b: a + b, sums[1], grads)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return updated_with(params, opt_state, *lax.scan(add, zeros, parts)[0])


def advice(caplog: pytest.LogCaptureFixture, step: Any, *given: Any, **options: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "zerojax"):
        zerojax.zero(stage=2)(step, **options).lower(*given)
    return [x.getMessage() for x in caplog.records]


@pytest.mark.parametrize("step", [by_index, by_scan])
def test_a_loop_over_micro_batches(step: Any, caplog: pytest.LogCaptureFixture) -> None:
    (text,) = advice(caplog, step, *params_and_opt_state(), BATCH)
    assert f"{step.__name__}: the loop at test_loop_advice.py:" in text
    assert "set gradient_accumulation_steps" in text


def test_updates_along_the_dimension_of_rows(caplog: pytest.LogCaptureFixture) -> None:
    batch = jax.tree.map(lambda x: x.reshape(8, 4, -1), BATCH)
    as_train_state = several_in_train_state, (train_state(0),)
    for step, state in ((several, params_and_opt_state()), as_train_state):
        (text,) = advice(caplog, step, *state, batch)
        assert "the scan at test_batch.py:" in text
        assert "zero(step, batch_axis=1)" in text
    wide = jax.tree.map(lambda x: x.reshape(4, 8, -1), BATCH)
    assert not advice(caplog, several, *params_and_opt_state(), wide, batch_axis=1)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_other_loops(loop: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    assert not advice(caplog, loop, *params_and_opt_state(), BATCH)
