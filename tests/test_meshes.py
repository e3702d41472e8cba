"""Meshes of several axes: dimensions that the user cuts, and axes of one device."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import zerojax
from zerojax.plan import layout

pytestmark = pytest.mark.usefixtures("quick_compile", "in_float64")

P = PartitionSpec
RULES = (("batch", "data"), ("embed", "fsdp"), ("mlp", "tensor"))
MESHES = (
    {"data": 4, "fsdp": 1, "tensor": 2},
    {"data": 8, "fsdp": 1, "tensor": 1},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"replica": 2, "data": 2, "fsdp": 1, "tensor": 2},
)
BOTH = ("tensor", "data")
# Of each mesh how stage 3 cuts up [10, 32] and down [32, 12], which the model cuts as
# P("fsdp", "tensor") and P("tensor", "fsdp"), the bias [32] and the head [12, 4].
CUTS = (
    (P(None, BOTH), P("tensor", "data"), P(BOTH), P("data")),
    (P(None, "data"), P("data"), P("data"), P()),
    (P("fsdp", BOTH), P(BOTH, "fsdp"), P(BOTH), P("fsdp", "data")),
    (P("data", "tensor"), P("tensor", "data"), P(BOTH), P("data")),
)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(32, 10)), "y": rng.normal(size=(32, 4))}


class Linen(nn.Module):
    """Two layers that logical axes cut, and a head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def cut(init: Any, *names: str | None) -> Any:
            return nn.with_logical_partitioning(init, names, rules=RULES)

        kernel, dense = (
            nn.initializers.lecun_normal(),
            functools.partial(nn.Dense, param_dtype=jnp.float64),
        )
        x = dense(
            32, kernel_init=cut(kernel, "embed", "mlp"), bias_init=cut(nn.zeros, "mlp"), name="up"
        )(x)
        x = nn.with_logical_constraint(jnp.tanh(x), ("batch", "mlp"), rules=RULES)
        x = dense(12, kernel_init=cut(kernel, "mlp", "embed"), use_bias=False, name="down")(x)
        return dense(4, kernel_init=cut(kernel, "embed", None), use_bias=False, name="head")(
            jnp.tanh(x)
        )


class NNX(nnx.Module):
    """The same with NNX's metadata."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def linear(n_in: int, n_out: int, *names: str | None, bias: bool = False) -> nnx.Linear:
            kernel, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros
            kernel = nnx.with_partitioning(kernel, names)
            zeros = nnx.with_partitioning(zeros, names[1:])
            return nnx.Linear(
                n_in, n_out, use_bias=bias, kernel_init=kernel, bias_init=zeros, rngs=rngs,
                param_dtype=jnp.float64,
            )  # fmt: skip

        with nnx.use_eager_sharding(False):
            self.up = linear(10, 32, "fsdp", "tensor", bias=True)
            self.down = linear(32, 12, "tensor", "fsdp")
            self.head = linear(12, 4, "fsdp", None)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.down(jnp.tanh(self.up(x)))))


TX = optax.adamw(1e-2)


def create_linen(key: jax.Array) -> TrainState:
    model = Linen()
    params = model.init(key, batch()["x"])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=TX)


def create_bare(key: jax.Array) -> TrainState:
    """Without metadata."""
    model = Linen()
    params = nn.unbox(model.init(key, batch()["x"])["params"])
    return TrainState.create(apply_fn=model.apply, params=params, tx=TX)


def linen_step(state: TrainState, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def nnx_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def create_nnx() -> Any:
    model = NNX(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def spec_tree() -> Any:
    specs = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"), "head": P("fsdp")}
    bias = {"bias": P("tensor")}
    return {n: {"kernel": spec} | (bias if n == "up" else {}) for n, spec in specs.items()}


def kernels(params: Any) -> tuple[Any, ...]:
    return (
        params["up"]["kernel"], params["down"]["kernel"], params["up"]["bias"],
        params["head"]["kernel"],
    )  # fmt: skip


def train(form: str, zero: zerojax.Zero | None, steps: int = 2) -> tuple[list[float], Any, Any]:
    """Losses, parameters as host arrays, and how they lie, of ``zero`` or plain jit."""
    losses = []
    if form != "nnx":
        key, create = jax.random.key(0), create_linen if form == "linen" else create_bare
        state = jax.jit(create)(key) if zero is None else zero.init(create, key)
        step = jax.jit(linen_step) if zero is None else zero(linen_step)
        for _ in range(steps):
            state, loss = step(state, batch())
            losses.append(float(loss))
        params = nn.unbox(state.params)
    else:
        model, optimizer = create_nnx() if zero is None else zero.init(create_nnx)
        nnx_run = nnx.jit(nnx_step) if zero is None else zero(nnx_step)
        losses = [float(nnx_run(model, optimizer, batch())) for _ in range(steps)]
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    arrays = kernels(params)
    return losses, [np.asarray(x) for x in arrays], [x.sharding for x in arrays]


@functools.cache
def plain(form: str) -> tuple[list[float], Any, Any]:
    return train(form, None)


def zero_for(stage: int, axes: dict[str, int], form: str = "linen", **keywords: Any) -> Any:
    keywords = {"stage3_param_persistence_threshold": 0} | keywords
    specs = spec_tree() if form == "specs" else None
    return zerojax.zero(stage=stage, mesh=zerojax.mesh(axes=axes), specs=specs, **keywords)


FORMS = (
    ("linen", 0, 1), ("linen", 1, 1), ("linen", 1, 2), ("linen", 2, 1), ("linen", 3, 1),
    ("linen", 3, 2), ("nnx", 1, 1), ("nnx", 3, 1), ("specs", 2, 1), ("specs", 3, 1),
)  # fmt: skip


@pytest.mark.parametrize(
    ("form", "stage", "accumulation", "axes"),
    [
        pytest.param(
            *form, axes, id=f"{axes}-{form}",
            marks=() if axes == MESHES[2] or form == ("linen", 3, 2) else pytest.mark.sweep,
        )
        for axes in MESHES
        for form in FORMS
    ],
)  # fmt: skip
def test_what_the_model_cuts_is_cut_again_and_gathered_back(
    form: str, stage: int, accumulation: int, axes: dict[str, int]
) -> None:
    zero = zero_for(stage, axes, form, gradient_accumulation_steps=accumulation)
    losses, params, lying = train(form, zero)
    np.testing.assert_allclose(losses, plain(form)[0], rtol=1e-9)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), params, plain(form)[1]
    )
    if stage:
        for x, there, cut in zip(params, lying, CUTS[MESHES.index(axes)], strict=True):
            assert there.is_equivalent_to(layout.sharding(zero.mesh, cut), x.ndim), (there, cut)


def planned(shape: tuple[int, ...], own: PartitionSpec | None, axes: dict[str, int]) -> Any:
    """The plan's leaf of one parameter."""
    params = {"w": np.zeros(shape, np.float32)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    zero = zerojax.zero(
        stage=3, mesh=zerojax.mesh(axes=axes), specs={"w": own},
        stage3_param_persistence_threshold=0,
    )  # fmt: skip
    return zero.plan(state).leaves["params"][0]


@pytest.mark.parametrize(
    ("shape", "own", "axes", "spec", "reason"),
    [
        ((6, 16), P("tensor"), MESHES[0], P("tensor", "data"), ""),
        ((64, 6), P("tensor"), MESHES[0], P(BOTH), ""),
        # A free dimension goes first, however small.
        ((64, 8), P("tensor"), MESHES[0], P("tensor", "data"), ""),
        ((16, 64), P("fsdp", "tensor"), MESHES[2], P("fsdp", BOTH), ""),
        ((64,), P(("fsdp", "tensor")), MESHES[2], P(("fsdp", "tensor", "data")), ""),
        ((64, 8), P("fsdp", "tensor"), MESHES[1], P("data"), ""),
        ((7, 9), None, MESHES[0], P(), "no dimension of (7, 9) is divisible by 4"),
        (
            (12, 7), P("tensor"), MESHES[0], P("tensor"),
            "no dimension of (6, 7), a piece of (12, 7), is divisible by 4",
        ),
        ((7, 9), P("fsdp", "tensor"), MESHES[1], P(), "no dimension of (7, 9) is divisible by 8"),
        ((8, 8), P("data"), MESHES[0], P("data"), "its own spec takes the 'data' axis"),
    ],
)  # fmt: skip
def test_which_dimension_is_cut(
    shape: tuple[int, ...], own: Any, axes: dict[str, int], spec: Any, reason: str
) -> None:
    leaf = planned(shape, own, axes)
    assert (leaf.spec, leaf.reason) == (spec, reason)
    devices = np.prod([axes[a] for e in spec for a in ((e,) if isinstance(e, str) else e or ())])
    assert leaf.bytes_per_device == leaf.bytes // int(devices)


def test_an_axis_twice_in_a_spec_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"params\['w'\].*names the axis 'tensor' twice"):
        planned((8, 8), P("tensor", "tensor"), MESHES[0])


def test_an_explicit_mesh_that_is_not_set_is_automatic() -> None:
    mesh = jax.make_mesh((4, 1, 2), ("data", "fsdp", "tensor"))
    zero = zerojax.zero(stage=3, mesh=mesh, stage3_param_persistence_threshold=0)
    np.testing.assert_allclose(train("specs", zero)[0], plain("specs")[0], rtol=1e-9)
