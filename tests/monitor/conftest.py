"""What the tests of the monitors share."""

import jax.numpy as jnp
import pytest


class Slow:
    """A scalar that the device has not finished until `done` is set."""

    def __init__(self, value=0.0):
        self.value, self.done, self.read = value, False, False
        self.shape, self.dtype = (), jnp.dtype(jnp.float32)

    def is_ready(self):
        return self.done

    def __float__(self):
        self.read = self.done = True
        return float(self.value)

    def __int__(self):
        return int(float(self))


@pytest.fixture
def slow():
    return Slow


@pytest.fixture
def report():
    """The telemetry of a step, as device arrays."""

    def make(step=1, lr=0.5, norm=2.0, scale=1.0, skipped=0):
        return {
            "loss_scale": jnp.float32(scale),
            "skipped_steps": jnp.int32(skipped),
            "grad_norm": jnp.float32(norm),
            "learning_rate": jnp.float32(lr),
            "step": jnp.int32(step),
        }

    return make
