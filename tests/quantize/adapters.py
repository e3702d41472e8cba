"""A Llama with adapters over a base in nf4, and the bytes of that base."""

from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import optax
import qwix
from flax.training.train_state import TrainState

from zerojax.models.llama import Llama, LlamaConfig
from zerojax.xla.jaxprs import nbytes


class Sizes(NamedTuple):
    n_layer: int
    n_embd: int
    n_inner: int
    n_head: int = 8
    n_kv_head: int = 8
    vocab_size: int = 512


class AdapterState(TrainState):
    base: Any


def adapters_of_llama(sizes: Sizes, *, scan: bool, remat: bool, dtype: Any = None) -> Any:
    """Returns functions that create the state and train it. With a dtype the base has its scales
    and its other arrays in that dtype."""
    fields: Any = sizes._asdict()
    config = LlamaConfig(**fields, block_size=32, scan=scan, remat=remat, dtype=dtype)
    nf4 = {"weight_qtype": "nf4", "tile_size": 64}
    provider = qwix.LoraProvider(module_path=".*_proj", rank=8, alpha=16.0, **nf4)
    model: Any = qwix.apply_lora_to_model(Llama(config), provider)
    flat = flax.traverse_util.flatten_dict

    def create(key: jax.Array) -> AdapterState:
        params = flat(model.init(key, jnp.zeros((1, 8), jnp.int32))["params"])
        lora = {name: x for name, x in params.items() if "_lora_" in name[-1]}
        base = {name: x for name, x in params.items() if name not in lora}
        parts: Any = {
            "params": flax.traverse_util.unflatten_dict(lora),
            "base": jax.tree.map(_cast(dtype), flax.traverse_util.unflatten_dict(base)),
        }
        return AdapterState.create(apply_fn=model.apply, tx=optax.adamw(1e-4), **parts)

    def step(state: AdapterState, batch: jax.Array) -> tuple[AdapterState, jax.Array]:
        def loss_fn(lora: Any) -> jax.Array:
            params = flax.traverse_util.unflatten_dict(flat(lora) | flat(state.base))
            tokens, targets = batch[:, :-1], batch[:, 1:]
            losses: jax.Array = state.apply_fn({"params": params}, tokens, targets=targets)
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return create, step


def _cast(dtype: Any) -> Any:
    is_cast = dtype is not None
    return lambda x: x.astype(dtype) if is_cast and x.dtype == jnp.float32 else x


def quantized(base: Any) -> list[qwix.QArray]:
    """Returns the quantized arrays of a base."""
    nodes = jax.tree.leaves(base, is_leaf=lambda x: isinstance(x, qwix.QArray))
    return [x for x in nodes if isinstance(x, qwix.QArray)]


def quantized_bytes(base: Any) -> int:
    """Returns the bytes of their codes and scales."""
    return sum(map(nbytes, jax.tree.leaves(quantized(base))))
