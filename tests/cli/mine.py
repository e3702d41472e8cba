"""Models of a user, sound and broken."""

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from zerojax.tuning.workload import workload


class Model(nn.Module):
    """Two layers of a width, or of two that do not fit together."""

    width: int = 16
    remat: bool = True

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 16, name="wte")(tokens)
        for _ in range(2):
            x = self.layer(x)
        return nn.Dense(64)(x)

    def layer(self, x):
        return nn.relu(nn.Dense(16)(x @ jnp.ones((self.width, 16))))


def sound(seq, remat=True):
    return Model(remat=remat)


def plain():
    return Model()


def narrow():
    return Model(width=15)


def raises():
    raise KeyError("no such thing")


def three():
    return 3


def demanding(width):
    return Model(width)


def nnx_model():
    return nnx.Linear(3, 5, rngs=nnx.Rngs(0))


def whole_workload(zero, rows, seq):
    return workload(plain, zero, rows, seq)
