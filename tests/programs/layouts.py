"""Networks whose parameters the user shards over axes of their own, beside ZeRO's."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from programs import basic, basic_nnx
from programs.basic import ADAMW, INPUT, vectors
from programs.basic_nnx import nnx_creator
from programs.program import Program, creator, regression_step

RULES = (("batch", "data"), ("embed", "fsdp"), ("mlp", "tensor"))


class PartitionedMLP(nn.Module):
    """Layers that are sharded over "model" by columns, then rows, then columns again."""

    logical: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def sharded(*names: str | None) -> tuple[Any, Any]:
            kernel, bias = nn.initializers.lecun_normal(), nn.initializers.zeros
            if self.logical:
                logical = tuple(name and "features" for name in names)
                rules = (("features", "model"),)
                return (
                    nn.with_logical_partitioning(kernel, logical, rules=rules),
                    nn.with_logical_partitioning(bias, logical[1:], rules=rules),
                )
            return nn.with_partitioning(kernel, names), nn.with_partitioning(bias, names[1:])

        for width, names in ((32, (None, "model")), (24, ("model", None)), (8, (None, "model"))):
            kernel, bias = sharded(*names)
            x = nn.tanh(nn.Dense(width, kernel_init=kernel, bias_init=bias)(x))
        return x


class NNXPartitionedMLP(nnx.Module):
    """The same network with NNX's metadata."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        with nnx.use_eager_sharding(False):
            self.first = linear(16, 32, None, "model", rngs=rngs)
            self.second = linear(32, 24, "model", None, rngs=rngs)
            self.third = linear(24, 8, None, "model", rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.third(nnx.tanh(self.second(nnx.tanh(self.first(x)))))


def linear(
    n_in: int, n_out: int, *names: str | None, bias: bool = True, rngs: nnx.Rngs
) -> nnx.Linear:
    kernel, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros
    return nnx.Linear(
        n_in, n_out, use_bias=bias, rngs=rngs, kernel_init=nnx.with_partitioning(kernel, names),
        bias_init=nnx.with_partitioning(zeros, names[1:]),
    )  # fmt: skip


class Logical(nn.Module):
    """Two layers that logical axes shard, and a head, [B, 10] -> [B, 4]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def sharded(init: Any, *names: str | None) -> Any:
            return nn.with_logical_partitioning(init, names, rules=RULES)

        kernel, dense = nn.initializers.lecun_normal(), nn.Dense
        up = sharded(kernel, "embed", "mlp")
        x = dense(32, kernel_init=up, bias_init=sharded(nn.zeros, "mlp"), name="up")(x)
        x = nn.with_logical_constraint(jnp.tanh(x), ("batch", "mlp"), rules=RULES)
        down = sharded(kernel, "mlp", "embed")
        x = jnp.tanh(dense(12, kernel_init=down, use_bias=False, name="down")(x))
        return dense(
            4, kernel_init=sharded(kernel, "embed", None), use_bias=False, name="head"
        )(x)  # fmt: skip


class NNXLogical(nnx.Module):
    """The same network with NNX's metadata."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        with nnx.use_eager_sharding(False):
            self.up = linear(10, 32, "fsdp", "tensor", rngs=rngs)
            self.down = linear(32, 12, "tensor", "fsdp", bias=False, rngs=rngs)
            self.head = linear(12, 4, "fsdp", None, bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.down(jnp.tanh(self.up(x)))))


def unboxed(key: jax.Array) -> Any:
    """A state of ``Logical`` without its metadata, for specs that the user gives."""
    state = creator(Logical(), np.ones((1, 10), np.float32), ADAMW)(key)
    return state.replace(params=(params := nn.unbox(state.params)), opt_state=state.tx.init(params))


def spec_tree(_: Any = None) -> Any:
    specs = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"), "head": P("fsdp")}
    bias = {"bias": P("tensor")}
    return {n: {"kernel": spec} | (bias if n == "up" else {}) for n, spec in specs.items()}


def megatron_specs(params: Any) -> Any:
    """PartitionSpecs of a GPT's parameters over "model", as Megatron shards them."""

    def spec(path: Any, x: jax.Array) -> P:
        module, name = jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-2:]
        free = (None,) * x.ndim
        if module in ("c_attn", "c_fc"):
            return P(*free[1:], "model")
        if module == "c_proj" and name == "kernel":
            return P(*free[2:], "model", None)
        return P("model") if module == "wte" else P()

    return jax.tree_util.tree_map_with_path(spec, params)


def ten(rng: np.random.Generator) -> tuple[Any, ...]:
    return vectors(rng, 10, 4)


def megatron(name: str) -> Program:
    (program,) = (p for p in basic.PROGRAMS if p.name == name)
    return Program(
        f"{name}_megatron", program.create, program.step, program.batch, specs=megatron_specs,
        axes=("model",),
    )  # fmt: skip


LOGICAL = creator(Logical(), np.ones((1, 10), np.float32), ADAMW)
PARTITIONED, FACTORED = {"axes": ("model",)}, {"axes": ("fsdp", "tensor")}
PROGRAMS = (
    Program(
        "partitioned", creator(PartitionedMLP(), INPUT, ADAMW), regression_step, vectors,
        **PARTITIONED,
    ),
    Program(
        "logical", creator(PartitionedMLP(logical=True), INPUT, ADAMW), regression_step, vectors,
        **PARTITIONED,
    ),
    Program(
        "nnx_partitioned", nnx_creator(NNXPartitionedMLP), basic_nnx.regression_step, vectors,
        nnx=True, **PARTITIONED,
    ),
    megatron("gpt"),
    megatron("gpt_scan_remat"),
    Program("logical_factored", LOGICAL, regression_step, ten, **FACTORED),
    Program(
        "nnx_factored", nnx_creator(NNXLogical), basic_nnx.regression_step, ten, nnx=True,
        **FACTORED,
    ),
    Program("specs_factored", unboxed, regression_step, ten, specs=spec_tree, **FACTORED),
)  # fmt: skip
