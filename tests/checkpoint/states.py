"""States to save: linen and NNX, with every kind of leaf, filled with numbers that all differ."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.checkpoint import state_tree
from zerojax.plan import layout
from zerojax.plan.stored import pad, unwrap_stored, user_leaf

KEY = jax.random.key(0)
SPECS = {
    "embed": PartitionSpec("model"),
    "layer": {"kernel": PartitionSpec(None, "model"), "bias": PartitionSpec("model")},
    "odd": PartitionSpec(),
}


class KeyedState(TrainState):
    """Batch statistics and keys beside the parameters."""

    batch_stats: Any
    key: jax.Array
    old_key: jax.Array


def create_linen(key: jax.Array) -> KeyedState:
    params = {
        "embed": jax.random.normal(key, (32, 8)),
        "layer": {"kernel": jax.random.normal(key, (8, 16)), "bias": jnp.zeros(16)},
        "odd": jax.random.normal(key, (3, 5)),
    }
    return KeyedState.create(
        apply_fn=None,
        params=params,
        tx=optax.adamw(1e-3),
        batch_stats={"mean": jnp.zeros(5), "wide": jnp.zeros((104, 100))},
        key=jax.random.split(key, 2),
        old_key=jax.random.PRNGKey(3),
    )


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def create_nnx(key: jax.Array) -> tuple[nnx.Module, nnx.Optimizer]:
    model = Net(nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def create_uneven(key: jax.Array) -> TrainState:
    """Leaves that many numbers of devices do not divide: over 3, 6 and 7 some are padded, over 8
    ``both`` is sharded along two dimensions."""
    shapes = {"rows": (100, 200), "both": (60, 150), "small": (3, 5)}
    params = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))


class UnevenNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(100, 200, rngs=rngs)


def create_uneven_nnx(key: jax.Array) -> tuple[nnx.Module, nnx.Optimizer]:
    model = UnevenNet(nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def zero_of(
    stage: int,
    devices: int = 8,
    precision: str = "fp32",
    model_axis: bool = False,
    replicas: int | None = None,
) -> zerojax.Zero:
    """Every leaf that can be cut is cut."""
    keywords: dict[str, Any] = {} if precision == "fp32" else {precision: True}
    groups = {} if replicas is None else {"replica": replicas}
    models = {"model": 2} if model_axis else {}
    each = devices // (replicas or 1) // (2 if model_axis else 1)
    axes = {**groups, "data": each, **models}
    return zerojax.zero(
        stage=stage,
        mesh=zerojax.mesh(devices, axes),
        specs=SPECS if model_axis else None,
        stage3_param_persistence_threshold=0,
        **keywords,
    )


def filled(state: Any) -> Any:
    """The same state, which may be abstract, with random numbers in every leaf, a function of its
    path alone."""
    tree = state_tree.tree_of(state)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    made = [
        _put(_random(state_tree.strings(keys), x), unwrap_stored(x).sharding) for keys, x in leaves
    ]
    tree = jax.tree.unflatten(structure, made)
    if state_tree.form_of(state) == "linen":
        return tree
    graph, _ = nnx.split(state)
    return nnx.merge(graph, tree)


def _put(x: Any, sharding: jax.sharding.Sharding) -> Any:
    if not isinstance(sharding, NamedSharding):
        return jax.device_put(x, sharding)
    padded = layout.padded_shape(x.shape, layout.full(sharding.spec, x.ndim), sharding.mesh)
    return user_leaf(jax.device_put(pad(x, padded), sharding), x.shape)


def _random(path: tuple[str, ...], x: jax.Array) -> Any:
    seed = sum(ord(c) for c in ".".join(path))
    rng = np.random.default_rng(seed)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = rng.integers(2**32, size=jax.random.key_data(x).shape, dtype=np.uint32)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.dtype == bool:
        return np.asarray(True)
    if np.issubdtype(x.dtype, np.integer):
        return rng.integers(100, size=x.shape).astype(x.dtype)
    return rng.normal(size=x.shape).astype(x.dtype)


def values(state: Any) -> dict[str, np.ndarray]:
    """Every leaf on the host by its name."""

    def host(x: Any) -> np.ndarray:
        key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if key else x)

    return {
        name: host(x) for name, x in state_tree.arrays_by_name(state_tree.tree_of(state)).items()
    }


def assert_same(got: Any, expected: Any, *, but: str = "loss_scale") -> None:
    """Every leaf, bit for bit, but those whose name contains ``but``."""
    a, b = ({k: v for k, v in values(s).items() if but not in k} for s in (got, expected))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name, strict=True)
