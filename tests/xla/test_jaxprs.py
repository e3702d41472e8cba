"""What zerojax reads of jaxprs stands where this version of jax has it."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives as prims
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.graph.search import equations
from zerojax.xla import jaxprs

X = np.ones((4, 6), np.float32)
AT = np.array([[0], [1]])


def double(x: jax.Array) -> jax.Array:
    return 2 * x


@jax.custom_vjp
def with_vjp(x: jax.Array) -> jax.Array:
    return 2 * x


with_vjp.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@jax.custom_jvp
def with_jvp(x: jax.Array) -> jax.Array:
    return 2 * x


with_jvp.defjvps(lambda g, *_: 2 * g)


def looped(x: jax.Array) -> Any:
    return lax.scan(lambda c, y: (c + y * x[0, 0], c), x[0], x, reverse=True)


def until(x: jax.Array) -> jax.Array:
    most = x.max() + 9
    return lax.while_loop(lambda c: c.sum() < most, lambda c: c + x, x)


def chosen(x: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] < 9, double, lambda x: x, x)


def constrained(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))


def windowed(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID")


def convolved(x: jax.Array) -> jax.Array:
    return lax.conv(x[None, None], x[None, None], (1, 1), "SAME")


def mapped(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(double, mesh=mesh, in_specs=PartitionSpec("data"),
                         out_specs=PartitionSpec("data"))(x)  # fmt: skip


def resharded(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.sharding.reshard(x, PartitionSpec("data"))


def permuted(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    return jax.shard_map(
        lambda x: lax.ppermute(x, "data", [(0, 0)]), mesh=mesh, in_specs=spec, out_specs=spec
    )(x)


# By primitive: a function that uses it, and the parameters that zerojax reads.
PARAMETERS: dict[str, tuple[Callable[[jax.Array], Any], str]] = {
    "jit": (jax.jit(double), "jaxpr name in_shardings"),
    "remat2": (jax.checkpoint(double), "jaxpr differentiated prevent_cse"),
    "shard_map": (mapped, "mesh jaxpr in_specs out_specs newly_manual_axes"),
    "random_bits": (
        lambda x: x * jax.random.uniform(jax.random.key(0), x.shape),
        "bit_width shape",
    ),
    "ppermute": (permuted, "axis_name"),
    "custom_vjp_call": (with_vjp, "call_jaxpr"),
    "custom_jvp_call": (with_jvp, "call_jaxpr"),
    "scan": (looped, "jaxpr length reverse unroll"),
    "while": (until, "cond_jaxpr body_jaxpr cond_nconsts body_nconsts"),
    "cond": (chosen, "branches"),
    "name": (lambda x: checkpoint_name(x, "mark"), "name"),
    "sharding_constraint": (constrained, "sharding"),
    "reshard": (resharded, "dst_sharding"),
    "dot_general": (
        lambda x: x @ x.T,
        "dimension_numbers out_sharding precision preferred_element_type",
    ),
    "ragged_dot_general": (
        lambda x: lax.ragged_dot(x, x[None, 0, :, None], jnp.array([len(x)])),
        "ragged_dot_dimension_numbers",
    ),
    "conv_general_dilated": (
        convolved,
        "dimension_numbers batch_group_count feature_group_count",
    ),
    "iota": (lambda x: lax.broadcasted_iota("int32", x.shape, 0) * x, "dimension shape sharding"),
    "broadcast_in_dim": (lambda x: x[:, None], "shape broadcast_dimensions sharding"),
    "reshape": (lambda x: lax.reshape(x, (24,), (1, 0)), "dimensions new_sizes sharding"),
    "transpose": (jnp.transpose, "permutation"),
    "device_put": (lambda x: jax.device_put(x, jax.devices()[0]), "devices"),
    "squeeze": (lambda x: lax.squeeze(x[:1], (0,)), "dimensions"),
    "rev": (lambda x: lax.rev(x, (0,)), "dimensions"),
    "concatenate": (lambda x: lax.concatenate([x, x], 0), "dimension"),
    "stack": (lambda x: jnp.stack([x, x]), "axis"),
    "unstack": (jnp.unstack, "axis"),
    "split": (lambda x: jnp.split(x, 2), "axis sizes"),
    "tile": (lambda x: jnp.tile(x, (2, 1)), "reps"),
    "slice": (lambda x: lax.slice(x, (0, 1), (4, 5)), "start_indices limit_indices strides"),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (0, 0), (2, 2)), "slice_sizes"),
    "pad": (lambda x: jnp.pad(x, 1), "padding_config"),
    "sort": (lax.sort, "dimension"),
    "top_k": (lambda x: lax.top_k(x, 2), "axis"),
    "approx_top_k": (lambda x: lax.approx_max_k(x, 2), "reduction_dimension"),
    "fft": (jnp.fft.fft, "fft_lengths"),
    "gather": (lambda x: x[AT[:, 0]], "dimension_numbers slice_sizes"),
    "scatter-add": (lambda x: x.at[AT[:, 0]].add(1), "dimension_numbers mode update_jaxpr"),
    "scatter": (lambda x: x.at[AT[:, 0]].set(1), "dimension_numbers update_jaxpr"),
    "reduce_window_max": (
        windowed,
        "window_dimensions window_strides base_dilation window_dilation padding",
    ),
    **{
        name: (function, "axes")
        for name, function in {
            "reduce_sum": lambda x: x.sum(0),
            "reduce_max": lambda x: x.max(0),
            "reduce_min": lambda x: x.min(0),
            "reduce_prod": lambda x: x.prod(0),
            "reduce_and": lambda x: jnp.all(x > 0, 0),
            "reduce_or": lambda x: jnp.any(x > 0, 0),
            "argmax": lambda x: x.argmax(0),
            "argmin": lambda x: x.argmin(0),
        }.items()
    },
    **{
        name: (lambda x, name=name: getattr(lax, name)(x, axis=0), "axis")
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    },
}


def traced(function: Callable[..., Any], name: str) -> Any:
    """The first equation of that primitive in a function of X."""
    closed = jax.make_jaxpr(function)(X)
    return next(e for e in equations(jaxprs.open_jaxpr(closed)[0]) if e.primitive.name == name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_primitive_has_the_parameters_that_are_read(name: str) -> None:
    function, params = PARAMETERS[name]
    eqn = traced(function, name)
    assert {*params.split()} <= {*eqn.params}


def test_no_other_parameter_is_read() -> None:
    """Each name in the package that asks for a parameter is one of the table above."""
    known = {name for _, names in PARAMETERS.values() for name in names.split()}
    known |= {"num_consts", "num_carry", "ft_in"}  # either, see test_the_parts_of_a_scan
    known |= {"_prim"}  # see test_hijax.py
    asked = {
        node.args[1].value
        for path in Path(jaxprs.__file__).parent.parent.rglob("*.py")
        if "param(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) == "param"
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    }
    assert asked
    assert asked <= known


def test_a_parameter_that_is_gone_is_named() -> None:
    eqn = traced(lambda x: x.sum(0), "reduce_sum")
    assert jaxprs.param(eqn, "axes") == (0,)
    assert jaxprs.param(eqn, "other", None) is None
    with pytest.raises(NotImplementedError, match=r"no parameter 'other' of reduce_sum, only axes"):
        jaxprs.param(eqn, "other")


@pytest.mark.parametrize("name", ["jit", "remat2", "custom_vjp_call", "custom_jvp_call"])
def test_the_body_of_a_call(name: str) -> None:
    eqn = traced(PARAMETERS[name][0], name)
    assert eqn.primitive in jaxprs.CALLS
    (body,) = jaxprs.bodies(eqn)
    assert len(body.invars) == len(eqn.invars)
    assert [e.primitive.name for e in body.eqns] == ["mul"]
    assert jaxprs.programs(eqn) == (jaxprs.CALLS[eqn.primitive],)


def test_the_parts_of_a_scan() -> None:
    eqn = traced(looped, "scan")
    scan = jaxprs.scan_parts(eqn)
    assert scan[1:] == (1, 1, 4, True, 1)
    assert [[v.aval.shape for v in part] for part in scan.operands(eqn.invars)] == [
        [(4, 6)], [(6,)], [(4, 6)]
    ]  # fmt: skip
    assert [[v.aval.shape for v in part] for part in scan.results(eqn.outvars)] == [
        [(6,)], [(4, 6)]
    ]  # fmt: skip
    body, _ = jaxprs.open_jaxpr(scan.body)
    assert [v.aval.shape for v in body.invars] == [(4, 6), (6,), (6,)]
    assert scan.first_stack == 2
    assert [*scan.order] == [3, 2, 1, 0]
    assert [*scan._replace(reverse=False).order] == [0, 1, 2, 3]
    assert not jaxprs.bodies(eqn)
    assert len([*jaxprs.inner(eqn)]) == 1
    assert jaxprs.scan_parts(traced(until, "while")) is None


def test_a_scan_runs_another_body_as_it_runs_its_own() -> None:
    scan = jaxprs.scan_parts(traced(looped, "scan"))

    def body(carry: jax.Array, y: jax.Array) -> Any:
        return carry + y * X[0, 0], carry

    np.testing.assert_array_equal(scan.scan(body, X[0], X)[1], looped(X)[1])


def test_the_backward_pass_is_known() -> None:
    """By the flag of a rematerialised block, and the name stack of what transposition makes."""

    def loss(x: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum()

    (forward,) = [e for e in equations(jax.make_jaxpr(loss)(X).jaxpr)
                  if e.primitive is prims.remat_p]  # fmt: skip
    backward = traced(jax.grad(loss), "remat2")
    assert not jaxprs.runs_backward(forward)
    assert jaxprs.runs_backward(backward)

    product = jax.make_jaxpr(jax.grad(lambda x: (x @ np.ones((6, 2), np.float32)).sum()))(X)
    made = {e.primitive.name: jaxprs.is_transposed(e) for e in product.jaxpr.eqns}
    assert made["broadcast_in_dim"]
    assert made["dot_general"]  # the last one
    assert not jaxprs.is_transposed(traced(lambda x: x.sum(0), "reduce_sum"))


@pytest.mark.parametrize(
    "function",
    [
        double,
        with_vjp,
        with_jvp,
        jax.jit(double),
        jax.checkpoint(double),
        looped,
        until,
        chosen,
        windowed,
        mapped,
    ],
)
def test_equations_run_again(function: Callable[..., Any]) -> None:
    """Those with functions among their parameters too; kept calls, and opened ones."""
    closed = jax.make_jaxpr(function)(X)
    expected = jax.tree.leaves(function(X))
    for opens in (lambda eqn: True, lambda eqn: False):
        found = jaxprs.evaluate(closed, [X], opens=opens)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_program_is_interpreted() -> None:
    """Here on the number of operations behind each value."""
    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(lambda x: (jnp.sin(x) * 2.0 + x, 3.0))(1.0))
    known = {jaxpr.invars[0]: 0}
    depths = jaxprs.interpret(jaxpr, known, lambda eqn, ins: [1 + max(ins)], lambda literal: -1)
    assert depths == [3, -1]
    assert [known[eqn.outvars[0]] for eqn in jaxpr.eqns] == [1, 2, 3]
    assert jaxprs.operands(jaxpr.eqns[1:]) == [jaxpr.eqns[0].outvars[0], *jaxpr.eqns[2].invars]


def test_calls_are_written_out() -> None:
    def nested(x: jax.Array) -> jax.Array:
        return jax.jit(lambda x: jax.checkpoint(with_vjp)(with_jvp(x)))(x)

    flat = jaxprs.without_calls(jax.make_jaxpr(nested)(X))
    assert [e.primitive.name for e in flat.jaxpr.eqns] == ["mul", "mul"]
    weak = jaxprs.without_calls(jax.make_jaxpr(double)(1.0))
    assert weak.in_avals[0].weak_type


def test_the_context_of_an_equation_is_that_of_its_trace() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        eqn = traced(double, "mul")
    assert jax.sharding.get_abstract_mesh().empty
    with jaxprs.context(eqn):
        assert jax.sharding.get_abstract_mesh().axis_names == ("data",)


def test_what_differentiation_makes_of_an_equation_has_its_place() -> None:
    """Not so the backward function of a custom_vjp, also in the same line."""

    @jax.custom_vjp
    def flipped(x: jax.Array) -> jax.Array:
        return 2 * x

    flipped.defvjp(lambda x: (2 * x, None), lambda _, g: (jnp.flip(g),))

    def loss(x: jax.Array) -> jax.Array:
        return (flipped(x[1:]) * x[:-1]).sum()

    def places(function: Any, name: str) -> set[Any]:
        made = equations(jax.make_jaxpr(function)(X).jaxpr)
        found = [e for e in made if e.primitive.name == name]
        return {jaxprs.bound_at(jaxprs.source(e).traceback) for e in found}

    forward, pads = places(loss, "slice"), places(jax.grad(loss), "pad")
    assert len(forward) == 2  # two slices of one line
    assert {place[0] for place in forward} == {place[0] for place in pads}
    (backward,) = places(jax.grad(loss), "rev")
    assert backward[0] not in {place[0] for place in forward}
    assert backward[0][0] is loss.__code__
    assert jaxprs.bound_at(None) == ()
