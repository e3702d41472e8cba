"""The steps of the published tables, for a study to compile.

    Study(gpt2_xl, config, topology("titan-rtx", 1), rates("titan-rtx"), rows=1, seq=128)

All of them scan their layers, so that they compile in seconds.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState

from zerojax.api import Zero
from zerojax.models import gpt, llama
from zerojax.models.assumed_attention import NAME
from zerojax.models.attention import planned_attention
from zerojax.models.blocks import Attention, grouped_attention
from zerojax.trace.gradients import value_and_grad
from zerojax.tuning.workload import Workload

Keep = Literal["nothing", "attention", "selective", "projections", "products", "offloaded"]

SPLASH_BLOCK = 1024
"""Queries and keys of a block of splash attention: twice as many exceed the memory of its kernels
on v6e without further options of XLA."""


def gpt2_xl() -> nn.Module:
    """GPT-2 XL with its own vocabulary; nothing is rematerialised."""
    sizes: dict[str, Any] = gpt.SIZES["gpt2-xl"] | {"vocab_size": 50257}
    return gpt.GPT(gpt.GPTConfig(**sizes, scan=True))


def llama_of(size: str) -> Callable[..., nn.Module]:
    """A Llama by its name in ``zerojax.models.llama.SIZES``, for a study with or without remat."""

    def model(remat: bool) -> nn.Module:
        return llama.Llama(llama.LlamaConfig(**llama.SIZES[size], scan=True, remat=remat))

    return model


def fused_llama(
    sizes: Mapping[str, Any], attention: str = "cudnn", *, keep: Keep = "products"
) -> Callable[..., Workload]:
    """A Llama's step by the sizes of a `LlamaConfig`.

    Args:
      attention: The implementation, as `zerojax.models.attention.planned_attention` takes it, or
        "splash", jax's kernel for TPUs.
      keep: Results that blocks with `remat` keep beside their input: "nothing", those of
        "attention", or those of attention and of products with weights, "products". "selective"
        has every second product with a weight, and attention, as torchtitan's selective activation
        checkpointing; "projections" has those of attention and of its products with weights;
        "offloaded" has the latter without attention's, in host memory.
    """
    kept = {
        "nothing": True,
        "attention": f"names:{NAME}",
        "selective": f"names:{NAME},q_proj,v_proj,gate_proj",
        "projections": f"names:{NAME},q_proj,k_proj,v_proj,o_proj",
        "products": f"names:{NAME},q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
        "offloaded": "offload:q_proj,k_proj,v_proj,o_proj",
    }[keep]

    def build(zero: Zero, rows: int, seq: int, remat: bool) -> Workload:
        own = {"block_size": seq, "scan": True, "remat": remat and kept}
        config = llama.LlamaConfig(**{**sizes, **own})
        if attention == "splash":
            fused = splash_attention(zero)
        else:
            fused = planned_attention(zero, attention) or grouped_attention
        model = llama.Llama(config, fused, zero.sequence)
        shape = jax.ShapeDtypeStruct((rows, seq), jnp.int32)
        batch = {"tokens": shape, "targets": shape}

        def create_state(key: jax.Array) -> TrainState:
            params = model.init(key, jnp.zeros((rows, seq), jnp.int32))["params"]
            return TrainState.create(apply_fn=model.apply, params=params, tx=zero.optimizer())

        def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
            def loss(params: Any) -> jax.Array:
                inputs, targets = batch["tokens"], batch["targets"]
                losses: Any = model.apply({"params": params}, inputs, targets=targets)
                return losses.mean()

            value, grads = value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), {"loss": value}

        return Workload(create_state, train_step, batch, rows * seq)

    return build


def splash_attention(zero: Zero) -> Attention:
    """Returns causal attention of q [B, T, H, d] to k and v [B, T, G, d] by jax's TPU kernel."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    sizes: dict[str, Any] = {f"block_{name}": SPLASH_BLOCK for name in names}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = splash.CausalMask((q.shape[1], k.shape[1]))
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * q.shape[2]),
            block_sizes=splash.BlockSizes(**sizes, use_fused_bwd_kernel=True),
        )
        heads_first = [x.swapaxes(1, 2) for x in (q / math.sqrt(q.shape[-1]), k, v)]
        return jax.vmap(kernel)(*heads_first).swapaxes(1, 2)

    return zero.per_device(attend)
