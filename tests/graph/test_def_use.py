"""Producers and users of values; regions of equations; equations at any depth."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zerojax.graph.def_use import graph_of
from zerojax.graph.regions import regions
from zerojax.graph.search import contains, equations, named, runs_regions
from zerojax.xla import jaxprs

X = jnp.arange(6.0).reshape(2, 3)


def opened(function: Any, *args: Any) -> Any:
    return jaxprs.open_jaxpr(jax.make_jaxpr(function)(*args))[0]


def test_producers_and_users() -> None:
    jaxpr = opened(lambda x, y: (jnp.sin(x) * jnp.sin(x), x + y, y), X, X)
    graph = graph_of(jaxpr)
    x, y = jaxpr.invars
    assert graph.producer(x) is None
    assert [use.equation.primitive.name for use in graph.users(x)] == ["sin", "sin", "add"]
    assert graph.returned(y) == [2]
    assert graph.times_used(y) == 2
    (product,) = graph.named("mul")
    assert [graph.producer(v).primitive.name for v in product.invars] == ["sin", "sin"]
    assert graph.users(product.outvars[0]) == ()
    assert graph.place(product) == 2
    assert [e.primitive.name for e in graph.without([product])] == ["sin", "sin", "add"]
    assert [e.primitive.name for e in graph.named("add", "sin")] == ["sin", "sin", "add"]
    assert graph.where(lambda e: e is product) == [product]
    assert graph.in_order({*reversed(jaxpr.outvars)}) == jaxpr.outvars[:2]  # y is an argument


def test_backward_slice() -> None:
    jaxpr = opened(lambda x, y: (jnp.cos(jnp.sin(x) * y) + 1.0, jnp.tan(y)), X, X)
    graph, (x, y) = graph_of(jaxpr), jaxpr.invars
    equations, ends = graph.backward_slice([jaxpr.outvars[0], x])
    assert [e.primitive.name for e in equations] == ["sin", "mul", "cos", "add"]
    assert {*ends} == {x, y}
    (product,) = graph.named("mul")
    equations, ends = graph.backward_slice(jaxpr.outvars, product.outvars.__contains__)
    assert [e.primitive.name for e in equations] == ["cos", "add", "tan"]
    assert {*ends} == {*product.outvars, y}
    (tangent,) = graph.named("tan")
    equations, ends = graph.backward_slice(product.outvars, also=[tangent])
    assert [e.primitive.name for e in equations] == ["sin", "mul", "tan"]
    assert {*ends} == {x, y}


def test_groups() -> None:
    """Sines wait for each other, and for what they need; other equations do not wait for them."""

    def function(x: Any, y: Any) -> Any:
        first = jnp.sin(x)
        return jnp.sin(jnp.cos(first)), jnp.sin(jnp.tan(y)), jnp.sinh(first)

    graph = graph_of(opened(function, X, X))
    groups = graph.groups(lambda e: "sines" if e.primitive.name == "sin" else None)
    names = [[e.primitive.name for e in group] for group in groups]
    assert names == [["tan"], ["sin", "sin"], ["cos"], ["sinh"], ["sin"]]


def test_slices_end_at_equations_and_follow_some_operands() -> None:
    jaxpr = opened(lambda x, y: jnp.cos(jnp.sin(x) * y), X, X)
    graph, (x, y) = graph_of(jaxpr), jaxpr.invars
    (sine,) = graph.named("sin")
    part = graph.backward_slice(jaxpr.outvars, through=lambda eqn: eqn is not sine)
    assert (part.results, {*part.ends}) == (graph.results(is_product_or_cosine), {*sine.outvars, y})
    assert graph.backward_slice(jaxpr.outvars, operands=lambda eqn, v: eqn.invars[:1]).ends == [x]


def is_product_or_cosine(eqn: Any) -> bool:
    return eqn.primitive.name in ("mul", "cos")


def test_inputs_of_equations() -> None:
    jaxpr = opened(lambda x, y: jnp.cos(jnp.sin(x) * y), X, X)
    graph = graph_of(jaxpr)
    (sine,) = graph.named("sin")
    assert graph.inputs(is_product_or_cosine) == [*sine.outvars, jaxpr.invars[1]]


def test_origin_through_primitives() -> None:
    jaxpr = opened(lambda x: jnp.sin(x).astype(jnp.bfloat16).astype(jnp.float32).T, X)
    graph, (out,) = graph_of(jaxpr), jaxpr.outvars
    (sine,) = graph.named("sin")
    assert graph.origin(out, {"transpose", "convert_element_type"}) is sine.outvars[0]
    assert graph.origin(out, {"sin"}) is out
    assert graph.origin(sine.outvars[0], {"sin"}) is jaxpr.invars[0]


def test_zeros() -> None:
    jaxpr = opened(lambda x: (jnp.zeros(3) + x, jnp.ones(3) + x, x + 0, jnp.arange(3)), jnp.ones(3))
    graph = graph_of(jaxpr)
    terms = [v for eqn in graph.named("add") for v in eqn.invars]
    assert [graph.is_zeros(v) for v in terms] == [True, False, False, False, False, True]
    assert not graph.is_zeros(jaxpr.outvars[-1])


def test_a_graph_is_made_once_and_freed_with_its_jaxpr() -> None:
    jaxpr = opened(lambda x: jnp.sin(x), X)  # jax keeps that of a function that lives on
    graph = weakref.ref(graph_of(jaxpr))
    assert graph_of(jaxpr) is graph()
    del jaxpr
    gc.collect()
    assert graph() is None


def scanned(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, row: (c + row * w, c.sum()), x[0], x)


def looped(x: Any, w: Any) -> Any:
    return lax.while_loop(lambda c: (c[0] * w).sum() < 9, lambda c: (c[0] + x, c[1] * 2), (x, w))


def chosen(x: Any, w: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda x, w: (x, w), lambda x, w: (x + w, x[0]), x, w)


def of_each_device(function: Any) -> Any:
    spec, auto = jax.sharding.PartitionSpec("data"), (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto)
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (scanned, "scan"),
        (looped, "while"),
        (chosen, "cond"),
        (lambda x, w: jax.jit(jnp.dot)(x, w.T), "jit"),
        (lambda x, w: jax.checkpoint(jnp.dot)(x, w.T), "remat2"),
        (lambda x, w: jax.nn.relu(x) + w, "custom_jvp_call"),
    ],
)
def test_arguments_of_regions_are_operands(function: Any, name: str) -> None:
    """Each argument has the dtype and shape of its operand, or of one entry of it."""
    (equation, *_) = [e for e in equations(opened(function, X, X[0])) if e.primitive.name == name]
    inside = regions(equation)
    assert inside
    for region in inside:
        for i, (v, at) in enumerate(zip(region.jaxpr.invars, region.operands, strict=True)):
            operand = equation.invars[at].aval
            shape = operand.shape[1:] if region.is_entry(i) else operand.shape
            assert (v.aval.shape, v.aval.dtype) == (shape, operand.dtype)
            assert region.argument(at) is v
        for result, argument in region.carries:
            carried = region.jaxpr.outvars[result].aval
            assert carried.shape == region.jaxpr.invars[argument].aval.shape
        if not region.decides:
            results = zip(region.jaxpr.outvars, equation.outvars, strict=True)
            for i, (v, out) in enumerate(results):
                shape = out.aval.shape[1:] if region.is_stacked(i) else out.aval.shape
                assert v.aval.shape == shape


def test_regions_of_particular_equations() -> None:
    (loop,) = [e for e in equations(opened(looped, X, X[0])) if e.primitive.name == "while"]
    condition, body = regions(loop)
    assert (condition.decides, body.decides) == (True, False)
    (choice,) = [e for e in equations(opened(chosen, X, X[0])) if e.primitive.name == "cond"]
    assert [region.argument(0) for region in regions(choice)] == [None, None]
    assert regions(opened(jnp.sin, X).eqns[0]) == ()


def test_equations_at_any_depth() -> None:
    layer = jax.jit(lambda x: jnp.tanh(x) * 2)
    jaxpr = opened(lambda x: lax.scan(lambda c, row: (layer(layer(row)), None), x[0], x), X)
    names = [e.primitive.name for e in equations(jaxpr)]
    assert names.count("tanh") == 1  # one program, though it runs twice
    assert "tanh" not in [e.primitive.name for e in equations(jaxpr, lambda eqn: False)]
    assert [e.primitive.name for e in named(jaxpr, "tanh", "scan")] == ["scan", "tanh"]


def is_tanh(eqn: Any) -> bool:
    return bool(eqn.primitive.name == "tanh")


def test_contains() -> None:
    mapped = jax.jit(jax.vmap(lambda x: lax.map(jnp.tanh, x)))
    (call,) = opened(mapped, X).eqns
    assert contains(call, is_tanh)
    assert not contains(call, is_tanh, enters=lambda eqn: eqn.primitive.name == "jit")
    (call,) = opened(jax.jit(of_each_device(jnp.tanh)), X).eqns
    assert contains(call, is_tanh)
    assert not contains(call, is_tanh, enters=runs_regions)
