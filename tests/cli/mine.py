"""Models of a user, sound and broken."""

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.tensor_parallel import TensorParallel
from zerojax.tuning.tasks import seq2seq


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


def cut(zero, seq, width=16):
    config = GPTConfig(vocab_size=64, block_size=seq, n_layer=2, n_head=4, n_embd=width)
    return GPT(config, tensor=TensorParallel.of(zero.mesh))


def wide(zero, seq):
    return cut(zero, seq, width=128)


def narrow():
    return Model(width=15)


def raises():
    raise KeyError("no such thing")


def three():
    return 3


class CNN(nn.Module):
    """Images in, classes out."""

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(8, (3, 3))(images))
        return nn.Dense(10)(x.mean((1, 2)))


def nnx_cnn():
    return nnx.Conv(3, 8, (3, 3), rngs=nnx.Rngs(0))


def translator(zero, rows, seq):
    return seq2seq("blenderbot-tiny", zero, rows, seq)
