"""The parameters of any pytree, by the optimizer's moments or by a function of the state."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.train_state.pytree import find_parameters, open_pytree

KEYS = "bf16 or fp16"
PARAMS = {"w": np.ones((4, 3)), "b": np.zeros(3)}


def state_of(tx: Any, **more: Any) -> dict[str, Any]:
    return {"params": PARAMS, "opt_state": zerojax.wrap(tx).init(PARAMS), **more}


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)),
        optax.lion(0.1),
    ],
    ids=["adam", "momentum", "chain", "lion"],
)
def test_have_the_form_of_the_moments(tx: Any) -> None:
    """Neither a counter nor another array of a parameter's shape is taken for them."""
    state = state_of(tx, step=np.zeros((), np.int32), bias=np.ones(3))
    opened = open_pytree((state,), find_parameters((state,), KEYS, None))
    assert opened.parts.params is not PARAMS
    assert jax.tree.map(lambda a, b: a is b, opened.parts.params, PARAMS) == {"w": True, "b": True}
    assert opened.parts.opt_state is state["opt_state"]
    assert [*map(np.shape, jax.tree.leaves(opened.parts.rest))] == [(3,), ()]
    (closed,) = opened.kind.close(opened.parts, None)
    assert all(map(lambda a, b: a is b, jax.tree.leaves(closed), jax.tree.leaves(state)))


def test_by_a_function() -> None:
    """The parameters of two networks, in a tree of the function's own."""
    tx = zerojax.wrap(optax.sgd(0.1))
    state = {"one": PARAMS, "two": PARAMS | {"w": np.ones((5, 3))}, "opt_state": tx.init({})}

    def both(state: Any) -> Any:
        return state["two"], state["one"]["w"]

    opened = open_pytree((state,), find_parameters((state,), KEYS, both))
    assert jax.tree.map(np.shape, opened.parts.params) == ({"w": (5, 3), "b": (3,)}, (4, 3))
    (closed,) = opened.kind.close(opened.parts, None)
    assert jax.tree.structure(closed) == jax.tree.structure(state)
    assert closed["two"]["w"] is state["two"]["w"]


@pytest.mark.parametrize(
    ("tx", "more", "words"),
    [
        (optax.sgd(0.1), {}, r"the form.* moments: none.*params=lambda state: state\[0\]"),
        (optax.adam(0.1), {"average": PARAMS}, r"moments: state\['average'\], state\['params'\]\."),
    ],
)
def test_cannot_be_known(tx: Any, more: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"bf16 or fp16: zerojax must know.*{words}"):
        find_parameters((state_of(tx, **more),), KEYS, None)


def test_one_optimizer() -> None:
    state = state_of(optax.adam(0.1))
    two = {"one": state, "two": state}
    with pytest.raises(ValueError, match=r"one state of an optimizer of .* and there are 2"):
        find_parameters((two,), KEYS, None)
    with pytest.raises(ValueError, match="and there are 0"):
        find_parameters((PARAMS,), KEYS, None)


@pytest.mark.parametrize(
    "select",
    [
        lambda state: jnp.ones(3),
        lambda state: state["opt_state"],
        lambda state: [state["params"], state["params"]["w"]],
    ],
    ids=["a constant", "the optimizer", "twice"],
)
def test_a_function_of_something_else(select: Any) -> None:
    with pytest.raises(ValueError, match=r"params= of zerojax\.zero returned .*not part of the"):
        find_parameters((state_of(optax.adam(0.1)),), KEYS, select)


def test_the_plan_knows_them() -> None:
    """Moments lie as their parameters."""
    zero = zero_for(3, axes=2, bf16=True)
    plan = zero.plan(state_of(optax.adam(0.1)))
    assert jax.tree.leaves(plan.params) == jax.tree.leaves(plan.opt_state.inner[0].mu)
    assert plan.opt_state.inner[0].count == plan.step


TWO_AXES = {"data": 2, "expert": 4}
EXPERTS = {"into": P("expert"), "r": None}
FIRST: Any = operator.itemgetter(0)
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
MASKED = optax.partition({"a": ADAM, "b": SGD}, {"into": "a", "r": "b"})


def experts() -> Any:
    into = jnp.sin(jnp.arange(8.0 * 16 * 32)).reshape(8, 16, 32)
    return {"into": into, "r": jnp.cos(jnp.arange(256.0)).reshape(16, 16)}


def of_shapes(params: Any) -> Any:
    return jax.tree.map(lambda x: P("expert") if x.ndim == 3 else None, params)


def step_of(tx: Any) -> Any:
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return jnp.mean(jnp.einsum("bd,edf->bef", x @ params["r"], params["into"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


@pytest.mark.parametrize(
    ("tx", "specs", "more"),
    [
        (ADAM, EXPERTS, {}),
        (ADAM, of_shapes, {"stage": 1}),
        (ADAM, of_shapes, {"gradient_clipping": 1.0}),
        (SGD, EXPERTS, {"params": FIRST}),
        (MASKED, of_shapes, {"params": FIRST}),
    ],
    ids=["a tree", "a function", "wrapped", "named by params=", "masked"],
)
def test_have_the_specs_of_the_user(tx: Any, specs: Any, more: Any) -> None:
    """So do their moments; the numbers are those of plain jit."""
    zero = zero_for(**{"axes": TWO_AXES, "specs": specs} | more)
    tx = zero.wrap(tx)
    step, x = step_of(tx), jnp.sin(jnp.arange(256.0)).reshape(16, 16)
    decorated, plain = zero(step), jax.jit(step)
    got = want = experts(), tx.init(experts()), None
    for _ in range(2):
        got, want = decorated(*got[:2], x), plain(*want[:2], x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
    params, opt_state, _ = got
    assert {name: x.sharding.spec for name, x in params.items()} == {
        "into": P("expert", None, "data"),
        "r": P("data"),
    }
    moments = [x for x in jax.tree.leaves(opt_state) if x.shape == params["into"].shape]
    assert all(x.sharding == params["into"].sharding for x in moments)
    assert len(moments) == (0 if more == {"params": FIRST} and tx is zero.wrap(SGD) else 2)


def test_have_the_specs_of_the_user_without_an_optimizer() -> None:
    """All arrays of an evaluation, or of a step that has no optimizer's state, are parameters."""
    zero = zero_for(axes=TWO_AXES, specs=EXPERTS, params=FIRST)
    spec = zero.evaluate(lambda params, x: params["into"] * x.sum())(experts(), np.ones((8, 2)))
    assert spec.shape == (8, 16, 32)
    plan = zero_for(axes=TWO_AXES, specs=EXPERTS).plan(experts())
    assert plan.rest["state"]["into"] == P("expert", None, "data")


def test_have_the_specs_of_their_boxes() -> None:
    box = nn.Partitioned(experts()["into"], ("expert", None, None))
    state = {"into": box, "opt_state": ADAM.init({"into": box})}
    plan = zero_for(axes=TWO_AXES).plan(state)
    assert {*map(str, jax.tree.leaves(plan.rest))} == {str(P("expert", None, "data")), str(P())}
    plan = zero_for(axes=TWO_AXES, specs=P()).plan(state)
    assert plan.rest["state"]["into"].value == P(None, None, "data")


@pytest.mark.parametrize(
    ("tx", "specs", "words"),
    [
        (SGD, of_shapes, r"specs.*know the state's parameters.*none.*params=lambda state"),
        (MASKED, of_shapes, r"specs.*know the state's parameters.*none.*params=lambda state"),
        (ADAM, {"in": P("expert")}, r"\['in'\] is not a parameter, \['into'\] has no entry"),
        (None, EXPERTS, r"specs.*know the state's parameters.*none.*params=lambda state"),
    ],
    ids=["no moments", "masked", "other keys", "no optimizer"],
)
def test_refuse_specs_that_name_none(tx: Any, specs: Any, words: str) -> None:
    other = {"momentum": np.ones(8)} if tx is None else tx.init(experts())
    zero = zero_for(axes=TWO_AXES, specs=specs)
    with pytest.raises(ValueError, match=words):
        zero.plan(experts(), other)
    with pytest.raises(ValueError, match=r"zerojax\.zero\(params=lambda state"):
        zero.plan({"params": experts(), "other": other})


def test_refuse_specs_of_several_nnx_optimizers() -> None:
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizers = [nnx.Optimizer(model, ADAM, wrt=nnx.Param) for _ in range(2)]
    for specs in (of_shapes, {"kernel": P("expert"), "bias": None}):
        with pytest.raises(ValueError, match=r"apply zerojax\.zero\(specs=.*one nnx\.Optimizer"):
            zero_for(axes=TWO_AXES, specs=specs).plan(model, *optimizers)
    assert zero_for(axes=TWO_AXES, specs=P()).plan(model, *optimizers).rest


@pytest.mark.parametrize("form", ["linen", "nnx"])
def test_refuse_specs_of_dimensions_that_a_parameter_lacks(form: str) -> None:
    """In a state whose optimizer is known; a dict names the parameters of an NNX model too."""

    def create() -> Any:
        if form == "linen":
            params = {"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)}
            return TrainState.create(apply_fn=None, params=params, tx=ADAM)
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    def planned(specs: Any) -> Any:
        zero = zero_for(axes=TWO_AXES, specs=specs)
        return zero.plan(zero.abstract_state(create)).params

    plan = planned({"kernel": P(None, "expert"), "bias": None})
    assert plan["kernel"] == P("data", "expert")
    assert planned(P(None, "expert"))["bias"] == P("data")
    with pytest.raises(
        ValueError, match=r"specs=\.\.\.\): \['bias'\] has only 1 dimensions\. Write"
    ):
        planned({"kernel": None, "bias": P(None, "expert")})
