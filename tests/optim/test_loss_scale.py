"""The loss scale against a plain model of it, and what one bad element does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerojax
from zerojax.config import ConfigError
from zerojax.optim.loss_scale import LossScale


class Model:
    """The dynamic loss scale as `deepspeed.md` tells it, in plain Python."""

    def __init__(self, knobs: LossScale) -> None:
        self.knobs = knobs
        self.it, self.last = 0, -1
        self.h = knobs.hysteresis
        self.scale = 2.0**knobs.initial_scale_power
        self.exhausted = False

    def step(self, overflow: bool) -> None:
        knobs, self.exhausted = self.knobs, False
        if overflow:
            if self.h == 1:
                self.exhausted = self.scale <= knobs.min_loss_scale
                self.scale = max(self.scale / 2, knobs.min_loss_scale)
            else:
                self.h -= 1
            self.last = self.it
        else:
            if knobs.consecutive_hysteresis:
                self.h = knobs.hysteresis
            s = self.it - self.last - 1
            if s > 0 and s % knobs.loss_scale_window == 0:
                self.scale = min(self.scale * 2, 2.0**126)
                if not knobs.consecutive_hysteresis:
                    self.h = knobs.hysteresis
        self.it += 1


@st.composite
def knobs(draw: st.DrawFn) -> LossScale:
    power = draw(st.integers(0, 30))
    return LossScale(
        initial_scale_power=power,
        loss_scale_window=draw(st.integers(1, 6)),
        hysteresis=draw(st.integers(1, 4)),
        consecutive_hysteresis=draw(st.booleans()),
        min_loss_scale=2.0 ** draw(st.integers(-3, power)),
    )


# Runs of one kind, so that windows fill and the minimum is reached.
patterns = st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=20).map(
    lambda runs: [overflow for overflow, n in runs for _ in range(n)]
)


@settings(max_examples=100)
@given(knobs(), patterns)
def test_equals_the_plain_model(knobs: LossScale, pattern: list[bool]) -> None:
    model, state = Model(knobs), knobs.init()
    for i, overflow in enumerate(pattern):
        model.step(overflow)
        state = knobs.next(state, not overflow)
        assert float(state.scale) == model.scale, i
        assert int(state.hysteresis) == model.h, i
        assert bool(state.exhausted) == model.exhausted, i


@pytest.mark.parametrize(("bad", "element"), [(jnp.nan, 0), (-jnp.inf, 63)])
def test_one_bad_element_of_one_shard_skips_the_step_everywhere(bad: float, element: int) -> None:
    mesh = zerojax.mesh()
    cut = jax.NamedSharding(mesh, jax.P("data"))
    tx = zerojax.wrap(optax.adam(0.1), loss_scale=LossScale(hysteresis=1), gradient_clipping=1.0)
    params = {"a": jax.device_put(jnp.linspace(-1, 1, 64), cut), "b": jnp.full(3, -0.0)}
    grads = {"a": jnp.ones(64).at[element].set(bad), "b": jnp.ones(3)}
    grads["a"] = jax.device_put(grads["a"], cut)
    before = tx.init(params)
    updates, after = jax.jit(tx.update)(grads, before, params)
    new = optax.apply_updates(params, updates)
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True):
        assert x.tobytes() == y.tobytes()  # signed zeros too
    for x, y in zip(jax.tree.leaves(after.inner), jax.tree.leaves(before.inner), strict=True):
        np.testing.assert_array_equal(x, y)
    assert (int(after.skipped), int(after.steps)) == (1, 1)
    assert float(after.grad_norm) == jnp.inf
    pieces = [float(s.data) for s in after.loss_scale.scale.addressable_shards]
    assert set(pieces) == {2.0**15}


def test_the_schedule_counts_only_steps_that_were_made() -> None:
    rate = zerojax.schedule(
        {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}, 1.0
    )
    tx = zerojax.wrap(optax.sgd(rate), skip_nonfinite=True, learning_rate=rate)
    params, state = jnp.zeros(1), tx.init(jnp.zeros(1))
    seen = []
    for bad in (1, jnp.nan, 1, jnp.inf, jnp.nan, 1, 1):
        _, state = tx.update(jnp.ones(1) * bad, state, params)
        seen.append(float(state.learning_rate))
    assert seen == [0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_scale": -1.0},
        {"loss_scale": True},
        {"loss_scale_window": 0},
        {"hysteresis": 0},
        {"min_loss_scale": 0.0},
        {"initial_scale_power": 4, "min_loss_scale": 17.0},
        {"initial_scale_power": 127},
    ],
)
def test_wrong_knobs_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=list(wrong)[-1]):
        LossScale(**wrong)


def test_wrap_refuses_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="gradient_clipping"):
        zerojax.wrap(optax.sgd(0.1), gradient_clipping=-1.0)
    with pytest.raises(TypeError, match=r"loss_scale=128.0: pass a LossScale"):
        zerojax.wrap(optax.sgd(0.1), loss_scale=128.0)  # type: ignore[arg-type]
