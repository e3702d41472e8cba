"""Which step is named, and that no step is waited for."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.monitor.finite import Finiteness, FiniteWatch


class Mask:
    """A mask that the device has not made until `done` is set."""

    def __init__(self, value):
        self.value, self.done, self.read = value, False, False

    def is_ready(self):
        return self.done

    def __array__(self, dtype=None, copy=None):
        self.read = True
        return np.asarray(self.value, np.uint32)


def steps(*values):
    return [Finiteness(np.int32(i), Mask(v), ("grad_norm", "loss")) for i, v in enumerate(values)]


def test_no_step_is_waited_for(caplog):
    watch, (good, bad, worse) = FiniteWatch(), steps(0, 2, 3)
    for step in (good, bad, worse):
        watch.push(step)
    assert not good.wrong.read
    worse.wrong.done = good.wrong.done = True
    watch.drain()
    assert good.wrong.read
    assert not bad.wrong.read
    assert not worse.wrong.read  # in order
    bad.wrong.done = True
    watch.drain()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("zerojax", logging.WARNING)
    assert record.getMessage().startswith("step 1: loss is no longer finite (NaN or inf)")
    watch.push(worse)
    watch.drain(wait=True)
    assert len(caplog.records) == 1
    assert not worse.wrong.read


def test_the_end_waits(caplog):
    watch, (bad,) = FiniteWatch(), steps(3)
    watch.push(bad)
    watch.drain(wait=True)
    assert "step 0: grad_norm, loss are no longer finite" in caplog.text


def test_what_waits_has_a_bound():
    watch, many = FiniteWatch(), steps(*[0] * 300)
    for step in many:
        watch.push(step)
    assert [step.wrong.read for step in many] == [True] * 44 + [False] * 256


@pytest.mark.parametrize(
    ("dtype", "bad"), [(jnp.float32, jnp.nan), (jnp.bfloat16, jnp.inf), (jnp.float16, -jnp.inf)]
)
def test_every_floating_scalar_is_looked_at(dtype, bad):
    out = {"a": {"loss": jnp.asarray(bad, dtype)}, "n": jnp.int32(3), "x": jnp.full(3, jnp.nan)}
    found = jax.jit(lambda out: Finiteness.of(jnp.int32(7), jnp.float32(1), out))(out)
    assert found.names == ("grad_norm", "a/loss")
    assert (found.wrong_names(), int(found.step)) == (["a/loss"], 7)
    assert Finiteness.of(jnp.int32(7), jnp.asarray(bad, dtype), None).wrong_names() == ["grad_norm"]
    assert Finiteness.of(jnp.int32(7), jnp.float32(1), (0.5, True, "x")).wrong_names() == []


def test_more_numbers_than_bits():
    out = {f"m{i:02}": jnp.where(i == 39, jnp.nan, 0.0) for i in range(40)}
    told = Finiteness.of(jnp.int32(1), jnp.float32(1), out).wrong_names()
    assert told == [f"m{i:02}" for i in range(30, 40)]
    assert Finiteness.of(jnp.int32(1), jnp.float32(1), {"m": jnp.nan} | out).wrong_names()[0] == "m"
