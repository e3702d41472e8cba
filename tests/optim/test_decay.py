"""What a weight decay leaves alone, in linen, NNX and stacked models."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from zerojax.models.gpt import GPT, GPTConfig
from zerojax.optim.decay import is_bias_or_norm, names_on_path, no_bias_and_norm


def decayed(params):
    """The paths that decay, and those that do not, as dotted names."""
    flat = jax.tree_util.tree_leaves_with_path(no_bias_and_norm(params))
    named = {".".join(names_on_path(path)): value for path, value in flat}
    return {n for n, v in named.items() if v}, {n for n, v in named.items() if not v}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h_0.attn.kernel", False),
        ("h_0.ln_1.scale", True),
        ("bn2.w", True),
        ("input_layernorm.weight", True),
        ("normalization.w", True),
        ("q_bias", True),
        ("logit_scale", True),
        ("wte.embedding", False),
        ("normal.w", False),
        ("autoscaler.w", False),
        ("AdaLayerNorm_0.Dense_0.kernel", False),
        ("w", False),
    ],
)
def test_names(name, expected):
    assert is_bias_or_norm(tuple(name.split("."))) is expected


@pytest.mark.parametrize("scan", [False, True])
def test_gpt(scan):
    config = GPTConfig(vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=8, scan=scan)
    params = jax.eval_shape(GPT(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    yes, no = decayed(params["params"])
    assert yes
    assert no
    assert all(name.endswith(("kernel", "embedding")) for name in yes)
    assert all(name.endswith(("bias", "scale")) for name in no)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.LayerNorm(4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs)])


@pytest.mark.parametrize("pure", [False, True])
def test_nnx(pure):
    params = nnx.state(nnx.eval_shape(lambda: Block(nnx.Rngs(0))), nnx.Param)
    params = nnx.as_pure(params) if pure else params
    assert decayed(params) == (
        {"layers.0.kernel"},
        {"first.bias", "first.scale", "layers.0.bias"},
    )
