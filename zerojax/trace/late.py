"""Arrays that a program computes from low-bit weights, computed where they are used.

A quantized weight is a matrix of integer codes and a few scales. A program that dequantizes all
weights at its start would hold all of them in floating point; XLA does not move the dequantization
into a loop over layers, or into a function.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.graph.def_use import Graph, Slice, graph_of
from zerojax.graph.primitives import ELEMENTWISE, RESHAPES
from zerojax.xla import jaxprs
from zerojax.xla.rewriter import renamed
from zerojax.xla.types import AnyJaxpr, Atom, Aval, Equation, Jaxpr, Value


def with_late_weights(closed: AnyJaxpr, weights: int) -> AnyJaxpr:
    """Returns a traced program that computes floating-point arrays from low-bit weights where it
    uses them: loops, calls and branches take the codes and scales in place of the array, and a loop
    over a stack of layers computes one layer in each iteration. The backward pass computes them
    again, so that no array is stored from one pass to the other. The numbers are the same.

    The arrays must be computed from the codes element by element, as by
    :func:`zerojax.quantize.dequantize`. A program without such arrays is returned unchanged.

    Args:
      closed: The program's jaxpr and its constants.
      weights: The number of leading arguments that may be weights; matrices of integers of at most
        one byte among them, and among the constants, are codes. A frozen argument of a step is a
        constant.

    Example:
      >>> def product(codes, scales, x):  # codes [layers, m, m]
      ...     stack = codes.astype(jnp.float32) * scales
      ...     return lax.scan(lambda x, w: (x @ w, None), x, stack)[0]
      >>> codes, scales = jnp.ones((4, 8, 8), jnp.int8), jnp.ones((4, 1, 8))
      >>> traced = jax.make_jaxpr(product)(codes, scales, jnp.ones(8))
      >>> [eqn.primitive.name for eqn in with_late_weights(traced, 2).eqns]
      ['scan']
    """
    # Only the first run has loops compute layers, whose residuals the second run finds.
    for _ in range(2):
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        given, n = [*jaxpr.constvars, *jaxpr.invars], len(consts) + weights
        codes = [i < n and _is_low_bit(v.aval) for i, v in enumerate(given)]
        program = jaxpr.replace(constvars=[], invars=given)
        if len(_recipes(program, codes)) > sum(codes):
            run = functools.partial(_run, program, *consts, codes=codes)
            closed = jax.make_jaxpr(run)(*(jaxprs.like(v.aval) for v in jaxpr.invars))
    return closed


def _is_low_bit(aval: Aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.integer) and aval.dtype.itemsize == 1 and aval.ndim > 1


def _recipes(jaxpr: Jaxpr, codes: Sequence[bool]) -> dict[Atom, Slice | _Layer]:
    """Returns, by variable, the equations that compute an array from codes, and from arrays that
    together take no more bytes than the array. The codes themselves need no equation."""
    graph = graph_of(jaxpr)
    is_code = dict(zip(jaxpr.invars, codes, strict=True))
    recipes: dict[Atom, Slice | _Layer] = {v: Slice((), (v,)) for v in jaxpr.invars if is_code[v]}
    for v in graph.results(_is_by_element):
        if recipes.keys().isdisjoint(jaxprs.variables(graph.producer(v).invars)):
            continue
        found = graph.backward_slice([v], through=_is_by_element)
        if sum(jaxprs.nbytes(end.aval) for end in found.ends) <= jaxprs.nbytes(v.aval):
            recipes[v] = found
    for scan in graph.named("scan"):
        recipes |= _saved_layers(scan, recipes, graph)
    return recipes


class _Layer(NamedTuple):
    """The part of a loop's iteration that computes one layer of a stack from codes.

    Attributes:
      equations: The equations.
      variables: Their operands and results.
      layer: The layer.
      consts, stacks: By operand that is an argument of the iteration, the operand of the loop, of
        which the iteration takes all or one layer.
    """

    equations: Sequence[Equation]
    variables: Sequence[Atom]
    layer: Atom
    consts: Mapping[Atom, Atom]
    stacks: Mapping[Atom, Atom]


def _saved_layers(eqn: Equation, recipes: _Recipes, graph: Graph) -> dict[Atom, _Layer]:
    """Returns, by stack, how the iterations of a loop compute its layers from codes, if other loops
    alone take the stack: differentiation stores it for the backward pass."""
    loop = jaxprs.scan_parts(eqn)
    body, _ = jaxprs.open_jaxpr(loop.body)
    parts = zip(loop.operands(body.invars), loop.operands(eqn.invars), strict=True)
    consts, carry, stacks = (dict(zip(*part, strict=True)) for part in parts)
    codes = [v not in carry and _is_code(x, recipes) for v, x in (consts | carry | stacks).items()]
    inside, found = _recipes(body, codes) if any(codes) else {}, {}
    for v, layer in zip(loop.results(eqn.outvars)[1], loop.results(body.outvars)[1], strict=True):
        recipe = None if isinstance(layer, core.Literal) else inside.get(layer)
        if not isinstance(recipe, Slice) or not recipe.equations or graph.returned(v):
            continue
        known = {x for x, y in (consts | stacks).items() if not isinstance(y, core.Literal)}
        is_known = {*recipe.ends} <= known
        if is_known and all(_is_stack_of_scan(*use) for use in graph.users(v)):
            given = (
                {x: y for x, y in part.items() if x in recipe.ends} for part in (consts, stacks)
            )
            variables = [*recipe.ends, *recipe.results]
            found[v] = _Layer(recipe.equations, variables, layer, *given)
    return found


def _is_code(v: Atom, recipes: _Recipes) -> bool:
    recipe = None if isinstance(v, core.Literal) else recipes.get(v)
    return recipe is not None and not recipe.equations


def _is_stack_of_scan(eqn: Equation, i: int) -> bool:
    loop = jaxprs.scan_parts(eqn)
    return loop is not None and i >= loop.first_stack


def _is_by_element(eqn: Equation) -> bool:
    name = eqn.primitive.name
    is_known = name in ELEMENTWISE or name in RESHAPES or _is_table_lookup(eqn)
    # A requested sharding is one of the whole array's dimensions, which one layer does not have.
    # jax.vmap requests that no dimension is sharded by an explicit axis.
    sharding = jaxprs.param(eqn, "sharding", None)
    return is_known and (sharding is None or not any(sharding.spec))


def _is_table_lookup(eqn: Equation) -> bool:
    """Returns whether an equation looks up a number for each code, as in the table of nf4."""
    if eqn.primitive is not prims.gather_p:
        return False
    return eqn.invars[0].aval.ndim == 1 and jaxprs.param(eqn, "slice_sizes") == (1,)


def _run(
    closed: AnyJaxpr, *args: Value, codes: Sequence[bool], is_block: bool = False
) -> list[Any]:
    """Runs a program; computes arrays from codes at their first use, and again at their first use
    in the backward pass.

    Args:
      closed: The program.
      args: Its arguments.
      codes: For each argument, whether it holds codes.
      is_block: Whether it is a rematerialised block, which is all of one pass.
    """
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    graph, recipes = graph_of(jaxpr), _recipes(jaxpr, codes)
    late = {v for recipe in recipes.values() if isinstance(recipe, Slice) for v in recipe.results}
    env: dict[Atom, Value] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
    )
    again: dict[Atom, Value] = {}

    def value(v: Atom) -> Value:
        if not isinstance(v, core.Literal) and v not in env:
            run(graph.producer(v))
        return jaxprs.read(v, env)

    def value_again(start: Value, v: Atom) -> Value:
        recipe = None if isinstance(v, core.Literal) or v not in env else recipes.get(v)
        if not isinstance(recipe, Slice) or not recipe.equations:
            return value(v)
        if v not in again:
            for end in recipe.ends:
                # Otherwise XLA would take the array of the forward pass, and store it until then.
                again.setdefault(end, lax.optimization_barrier((env[end], start))[0])
            again.update(recipe.evaluate(again))
        return again[v]

    def run(eqn: Equation) -> None:
        operands = jaxprs.variables(eqn.invars)
        takes_late = not recipes.keys().isdisjoint(operands)
        rule = _RULES.get(eqn.primitive, _bind) if takes_late else _bind
        read = value
        if takes_late and jaxprs.is_backward(eqn) and not is_block:
            start = next((env[v] for v in operands if v in env and v not in recipes), None)
            read = functools.partial(value_again, start)
        with jaxprs.traced_where(eqn):
            env.update(zip(eqn.outvars, rule(eqn, recipes, read), strict=True))

    for eqn in jaxpr.eqns:
        if late.isdisjoint(eqn.outvars):
            run(eqn)
    return [value(v) for v in jaxpr.outvars]


class _Program(NamedTuple):
    """A program inside an equation that computes some of its former arguments from codes.

    Attributes:
      closed: The program. Its arguments are those for ``ends``, for ``layers``, and others.
      codes: For each argument, whether it holds codes.
      ends: The outer variables for its first arguments.
      layers: The outer stacks for the next arguments, of which it takes one layer each.
      kept: The positions of the other arguments, among those of the program before.
      is_block: Whether it is a rematerialised block.
    """

    closed: AnyJaxpr
    codes: Sequence[bool]
    ends: Sequence[Atom]
    layers: Sequence[Atom]
    kept: Sequence[int]
    is_block: bool = False

    def given(self, operands: Sequence[Atom], value: _Value) -> Callable[..., list[Any]]:
        """Returns the program as a function of its arguments behind the first operands, and of
        those for ``layers``.

        Args:
          operands: The outer variables for the first arguments of the program before.
          value: Function from an outer variable to its value.
        """
        kept = [value(operands[i]) for i in self.kept if i < len(operands)]
        ends = [*map(value, self.ends)]

        def run(others: Sequence[Any] = (), layers: Sequence[Any] = ()) -> list[Any]:
            arguments = (*ends, *layers, *kept, *others)
            return _run(self.closed, *arguments, codes=self.codes, is_block=self.is_block)

        return run


def _program(
    inner: AnyJaxpr,
    operands: Sequence[Atom],
    recipes: _Recipes,
    carried: range = range(0),
    first_stack: int | None = None,
) -> _Program:
    """Returns a program inside an equation with the equations of recipes at its start.

    Args:
      inner: The program.
      operands: The outer variable for each of its arguments.
      recipes: By outer variable, its recipe.
      carried: The positions of arguments that a loop carries, which have no recipe.
      first_stack: The first position of which an argument is one layer of its operand.
    """
    body, _ = jaxprs.open_jaxpr(inner)
    ends: dict[Atom, Atom] = {}
    layers: dict[Atom, Atom] = {}
    equations: list[Equation] = []
    kept, codes = [], []
    for i, (v, argument) in enumerate(zip(operands, body.invars, strict=True)):
        recipe = None if isinstance(v, core.Literal) or i in carried else recipes.get(v)
        is_layer = first_stack is not None and i >= first_stack
        if isinstance(recipe, _Layer):
            inside = {x: jaxprs.new_variable(x.aval) for x in recipe.variables}
            inside |= {x: layers.setdefault(y, inside[x]) for x, y in recipe.stacks.items()}
            inside |= {x: ends.setdefault(y, y) for x, y in recipe.consts.items()}
            equations += renamed(recipe.equations, inside | {recipe.layer: argument})
            continue
        stacked = _stacked(recipe, v) if recipe is not None and is_layer else set[Atom]()
        if recipe is None or stacked is None or not recipe.equations:
            kept.append(i)
            codes.append(recipe is not None and not recipe.equations)
            continue
        ends |= {end: end for end in recipe.ends if end not in stacked}
        inside = {x: jaxprs.new_variable(x.aval, x.aval.shape[1:]) for x in stacked}
        inside |= {x: layers.setdefault(x, inside[x]) for x in recipe.ends if x in stacked}
        inside[v] = argument
        equations += renamed(recipe.equations, inside, functools.partial(_params, stacked))
    arguments = [*ends.values(), *layers.values(), *(body.invars[i] for i in kept)]
    are_codes = [v in recipes and not recipes[v].equations for v in (*ends, *layers)]
    new = body.replace(invars=arguments, eqns=[*equations, *body.eqns])
    closed = jaxprs.with_body(inner, new)
    return _Program(closed, [*are_codes, *codes], [*ends], [*layers], kept)


def _stacked(recipe: Slice, stack: Atom) -> set[Atom] | None:
    """Returns the variables of a recipe whose first dimension is that of a stack which it computes
    layer by layer; None if it does not."""
    graph = Graph(recipe.equations, [stack])
    by_layer = graph.backward_slice([stack], operands=_operands_with_layers)
    stacked = {*by_layer.results, *by_layer.ends}
    # A vector of as many elements as layers may be read by layer here, and in full there.
    in_full = {*graph.inputs(lambda eqn: stacked.isdisjoint(eqn.outvars))}
    in_full |= {*itertools.chain(*map(_operands_without_layers, by_layer.equations))}
    keeps_layers = all(map(_keeps_layers, by_layer.equations))
    return stacked if keeps_layers and stacked.isdisjoint(in_full) else None


def _operands_with_layers(eqn: Equation, out: Atom) -> list[Atom]:
    return [v for v in jaxprs.variables(eqn.invars) if _has_layers(eqn, v)]


def _operands_without_layers(eqn: Equation) -> list[Atom]:
    return [v for v in jaxprs.variables(eqn.invars) if not _has_layers(eqn, v)]


def _keeps_layers(eqn: Equation) -> bool:
    """Returns whether each layer of an equation's result is computed from the same layer of its
    operands, or from operands without layers."""
    (out,) = eqn.outvars
    if not jaxprs.variables(eqn.invars):
        return True
    match eqn.primitive:
        case prims.broadcast_in_dim_p:
            dims, (operand,) = jaxprs.param(eqn, "broadcast_dimensions"), eqn.invars
            return 0 not in dims or operand.aval.shape[0] == out.aval.shape[0]
        case prims.reshape_p:
            same = eqn.invars[0].aval.shape[:1] == out.aval.shape[:1]
            return same and jaxprs.param(eqn, "dimensions") is None
        case prims.transpose_p:
            return bool(jaxprs.param(eqn, "permutation")[0] == 0)
        case prims.squeeze_p:
            return 0 not in jaxprs.param(eqn, "dimensions")
        case prims.gather_p:
            return 0 not in jaxprs.param(eqn, "dimension_numbers").offset_dims
        case _:  # an operand of one row may stand for all rows
            rows = {v.aval.shape[0] for v in jaxprs.variables(eqn.invars) if v.aval.ndim}
            return rows <= {*out.aval.shape[:1]}


def _has_layers(eqn: Equation, v: Atom) -> bool:
    """Returns whether an operand of an equation that keeps layers has them itself."""
    if eqn.primitive is prims.broadcast_in_dim_p:
        return 0 in jaxprs.param(eqn, "broadcast_dimensions")
    return v.aval.ndim > 0 and not (eqn.primitive is prims.gather_p and v is eqn.invars[0])


def _params(stacked: set[Atom], eqn: Equation) -> dict[str, object]:
    """Returns the parameters that change if an equation on stacks runs on one layer of each."""
    if stacked.isdisjoint(eqn.outvars):
        return {}
    match eqn.primitive:
        case prims.broadcast_in_dim_p:
            dims = jaxprs.param(eqn, "broadcast_dimensions")
            layer_dims = tuple(d - 1 for d in dims if d)
            shape = jaxprs.param(eqn, "shape")[1:]
            return {"shape": shape, "broadcast_dimensions": layer_dims, "sharding": None}
        case prims.reshape_p:
            return {"new_sizes": jaxprs.param(eqn, "new_sizes")[1:], "sharding": None}
        case prims.transpose_p:
            return {"permutation": tuple(d - 1 for d in jaxprs.param(eqn, "permutation")[1:])}
        case prims.squeeze_p:
            return {"dimensions": tuple(d - 1 for d in jaxprs.param(eqn, "dimensions"))}
        case prims.gather_p:
            numbers = jaxprs.param(eqn, "dimension_numbers")
            offsets = tuple(d - 1 for d in numbers.offset_dims)
            return {"dimension_numbers": numbers._replace(offset_dims=offsets)}
        case _:
            return {}


def _bind(eqn: Equation, recipes: _Recipes, value: _Value) -> Sequence[Any]:
    return jaxprs.bind(eqn, [value(v) for v in eqn.invars])


def _call(eqn: Equation, recipes: _Recipes, value: _Value) -> Sequence[Any]:
    program = _program(jaxprs.called_jaxpr(eqn), eqn.invars, recipes)
    program = program._replace(is_block=eqn.primitive is prims.remat_p)
    return program.given(eqn.invars, value)()


def _cond(eqn: Equation, recipes: _Recipes, value: _Value) -> Sequence[Any]:
    index, *operands = eqn.invars
    programs = [_program(branch, operands, recipes) for branch in jaxprs.param(eqn, "branches")]
    # As closures, because each branch may take other codes and scales.
    branches = [program.given(operands, value) for program in programs]
    chosen: list[Any] = lax.switch(value(index), branches)
    return chosen


def _while(eqn: Equation, recipes: _Recipes, value: _Value) -> Sequence[Any]:
    loop = jaxprs.while_parts(eqn)
    a, b = loop.cond_consts, loop.cond_consts + loop.body_consts
    carry = eqn.invars[b:]

    def part(jaxpr: AnyJaxpr, consts: Sequence[Atom]) -> Callable[[Sequence[Any]], list[Any]]:
        operands, n = (*consts, *carry), len(consts)
        program = _program(jaxpr, operands, recipes, carried=range(n, len(operands)))
        return program.given(consts, value)

    cond, body = part(loop.cond, eqn.invars[:a]), part(loop.body, eqn.invars[a:b])
    final: list[Any] = lax.while_loop(lambda state: cond(state)[0], body, [*map(value, carry)])
    return final


def _scan(eqn: Equation, recipes: _Recipes, value: _Value) -> Sequence[Any]:
    loop = jaxprs.scan_parts(eqn)
    a, n = loop.consts, loop.carry
    carried = range(a, a + n)
    jaxpr = jaxprs.param(eqn, "jaxpr")
    program = _program(jaxpr, eqn.invars, recipes, carried, first_stack=a + n)
    iteration = program.given(eqn.invars[:a], value)
    stacks = [value(eqn.invars[i]) for i in program.kept if i >= a + n]
    saved, (_, ys) = (
        {v for v, x in recipes.items() if isinstance(x, _Layer)},
        loop.results(eqn.outvars),
    )

    def body(carry: list[Any], xs: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        layers, others = xs
        outs = iteration([*carry, *others], layers)
        return outs[:n], [None if v in saved else y for v, y in zip(ys, outs[n:], strict=True)]

    carry, ys = lax.scan(
        body,
        [value(eqn.invars[i]) for i in carried],
        ([*map(value, program.layers)], stacks),
        length=jaxprs.param(eqn, "length"),
        reverse=jaxprs.param(eqn, "reverse"),
        unroll=jaxprs.param(eqn, "unroll"),
    )
    return [*carry, *ys]


_Recipes = Mapping[Atom, Slice | _Layer]
_Value = Callable[[Atom], Any]

_RULES: Mapping[core.Primitive, Callable[[Equation, _Recipes, _Value], Sequence[Any]]] = {
    prims.scan_p: _scan,
    prims.while_p: _while,
    prims.cond_p: _cond,
    **dict.fromkeys(jaxprs.CALLS, _call),
}
"""By primitive: the rule that runs an equation with programs on arrays that have recipes."""
