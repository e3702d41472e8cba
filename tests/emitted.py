"""Compares the program that zerojax emits for a step with the user's step, on the same numbers.

Both are traced, neither is compiled: see ``tests/exact.py``. The programs are those of
``tests/programs``, and models with as many layers as it takes for a loop to gather ahead.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import exact
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from programs import PROGRAMS, ROWS, Kind, Program
from programs.basic import gpt

import zerojax
from zerojax.collectives.ahead import LEAST
from zerojax.placement.states import abstract, split_state
from zerojax.step.arguments import Arguments
from zerojax.step.body import Body
from zerojax.step.call import Call, divide, join
from zerojax.xla import hijax

LAYERS = LEAST  # as many as it takes for a loop to gather ahead


class Source(NamedTuple):
    """A training program.

    Attributes:
      create: ``create()`` is the state.
      step: The user's step.
      arguments: Arguments after the state, on the host.
      call: Calls the step with the state and the arguments.
      options: Options of the decorator.
      nnx: Whether the state is a tuple of NNX objects.
    """

    create: Callable[[], Any]
    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    call: Callable[..., Any]
    options: dict[str, Any]
    nnx: bool


class Users(NamedTuple):
    """The user's step.

    Attributes:
      call: Its arguments, the state abstract.
      inputs: The numbers of state, batch and further arguments, see ``tests/exact.py``.
      outputs: The state's parts and the results that the step computes from them.
    """

    call: Call
    inputs: Any
    outputs: Any


def of_program(program: Program) -> Source:
    def call(step: Any, state: Any, arguments: Any) -> Any:
        if program.call is not None:
            return program.call(step, state, arguments)
        return step(*state, *arguments) if program.nnx else step(state, *arguments)

    batch = in_float32(program.batch(np.random.default_rng(0)))
    create = functools.partial(program.create, jax.random.key(5))
    return Source(
        create, program.step, batch, call, {**program.jit, **program.zero}, program.nnx
    )  # fmt: skip


LAYERED = tuple(
    gpt(name, layers=LAYERS, scan=True, remat=remat)
    for name, remat in (("layered", False), ("layered_remat", True))
)
SOURCES: dict[str, Callable[[], Source]] = {
    program.name: functools.partial(of_program, program)
    for program in (*PROGRAMS.values(), *LAYERED)
    if program.once.kind is Kind.EQUAL
}


def in_float32(tree: Any) -> Any:
    def cast(x: Any) -> Any:
        floating = isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating)
        return x.astype(np.float32) if floating else x

    return jax.tree.map(cast, tree)


def numbers(tree: Any, seed: int) -> Any:
    """A tree of arbitrary floating-point numbers and keys; integers of the host are unchanged."""

    def number(i: int, x: Any) -> np.ndarray:
        x = np.asarray(x) if isinstance(x, int | float) else x
        if jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return exact.arbitrary(x.shape, x.dtype, seed + i)
        return x if isinstance(x, np.ndarray) else np.full(x.shape, 3).astype(x.dtype)

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [number(i, x) for i, x in enumerate(leaves)])


class Called(Exception):
    """Carries the arguments of a call."""


def called(arguments: Arguments, run: Callable[[Callable[..., Any]], Any]) -> Call:
    """The arguments with which ``run`` calls the step that it is given."""

    def step(*args: Any, **kwargs: Any) -> Any:
        raise Called(arguments.sort(args, kwargs))

    try:
        run(step)
    except Called as call:
        return call.args[0]
    raise AssertionError("not called")


@functools.cache
def users(name: str) -> Users:
    """The undecorated step with its own optimizer."""
    source = SOURCES[name]()
    state = (nnx.eval_shape if source.nnx else jax.eval_shape)(source.create)
    arguments = Arguments(source.step, **source.options)
    call = called(arguments, lambda step: source.call(step, state, source.arguments))
    opened = split_state(call.objects)
    body = Body(arguments.rearranged(call.form), opened, "", ())
    arrays, static = divide(call.args, call.kwargs)

    def run(parts: Any, batch: Any, arrays: list[Any]) -> Any:
        args, kwargs = join(arrays, static)
        return body(parts, opened.tx, batch, args, kwargs)

    given = opened.parts, call.batch, arrays
    closed, shapes = hijax.trace(run, *given)
    given = numbers(given, 1)
    outs = exact.run(closed, jax.tree.leaves(given))
    return Users(call, given, jax.tree.unflatten(jax.tree.structure(shapes), outs))


class Emitted(NamedTuple):
    """The program that zerojax emits for a step.

    Attributes:
      jaxpr: The program.
      parts: Shapes of the state's parts at rest.
      results: The tree of results.
      k: Micro-batches.
    """

    jaxpr: Any
    parts: Any
    results: Any
    k: int


def emitted(name: str, mesh: Any = None, **config: Any) -> Emitted:
    source, call = SOURCES[name](), users(name).call
    zero = zerojax.zero(mesh=mesh, **{"stage3_param_persistence_threshold": 0, **config})
    step = zero(source.step, **source.options)
    opened = step._states.open(call.objects)
    program: Any = step._program(opened, call, None)
    setting = program.setting
    parts = abstract(opened.parts, setting.plan, at_rest=True)
    arrays, further = setting.divide(call.args, call.kwargs)
    traced = program._jitted.trace(parts, setting.layout.abstract(call.batch), arrays, further)
    return Emitted(traced.jaxpr, parts, traced.out_info, setting.layout.accumulation)


def differing(name: str, program: Emitted) -> list[str]:
    """The paths of the results in which an emitted program and the user's step differ."""
    own, k = users(name), program.k
    mine, batch, arrays = own.inputs
    opt_state = numbers(program.parts.opt_state, 10_000)._replace(inner=mine.opt_state)
    start = jax.tree.map(padded, mine._replace(opt_state=opt_state), program.parts)
    batch = jax.tree.map(lambda x: by_micro_batch(x, k), batch)
    outs = exact.run(program.jaxpr, jax.tree.leaves((start, batch, arrays)))
    result = jax.tree.unflatten(jax.tree.structure(program.results), outs)
    made = result.parts._replace(opt_state=result.parts.opt_state.inner), result.out
    after, out = own.outputs
    out = jax.tree.map(
        lambda x: by_micro_batch(x, k) if len(x.shape) and len(x) == ROWS else x, out
    )
    want = jax.tree_util.tree_leaves_with_path((after, out))
    return [
        jax.tree_util.keystr(path)
        for (path, x), y in zip(want, jax.tree.leaves(made), strict=True)
        if not np.array_equal(x, y[tuple(map(slice, x.shape))])
    ]


def padded(x: np.ndarray, like: Any) -> np.ndarray:
    """An array padded with zeros, as it is stored."""
    return np.pad(x, [(0, m - n) for n, m in zip(x.shape, like.shape, strict=True)] or 0)


def by_micro_batch(x: np.ndarray, k: int) -> np.ndarray:
    """An array with rows, [k, rows, ...] under accumulation."""
    return x.reshape(k, -1, *x.shape[1:]) if x.ndim and k > 1 else x
