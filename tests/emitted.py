"""Compares the program that zerojax emits for a step with the user's step, on the same numbers.

Both are traced, neither is compiled: see ``tests/exact.py``. The programs are those of
``tests/programs``, and models with as many layers as it takes for a loop to gather ahead.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import exact
import jax
import jax.numpy as jnp
import numpy as np
from equal import cast, with_masters
from flax import nnx
from flax.training.train_state import TrainState
from programs import PROGRAMS, ROWS, Kind, Program
from programs.basic import gpt

import zerojax
from zerojax.collectives.prefetch import LEAST
from zerojax.devices.mesh import automatic_context
from zerojax.monitor.after_step import AfterStep
from zerojax.placement.states import abstract, split_state
from zerojax.step.arguments import Arguments, slots
from zerojax.step.body import Body
from zerojax.step.call import Call
from zerojax.step.find_optimizer import find_optimizer
from zerojax.step.program import StepSetting
from zerojax.step.resident import ResidentStep
from zerojax.xla import hijax, jaxprs

LAYERS = LEAST  # as many as it takes for a loop to gather ahead


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A training program.

    Attributes:
      create: ``create()`` is the state.
      step: The user's step.
      arguments: Arguments after the state, on the host.
      call: Calls the step with the state and the arguments.
      options: Options of the decorator.
      step_on: ``step_on(zero)`` is the step as written for a ``Zero``, where it uses one.
      rows: Rows of the batch.
    """

    create: Callable[[], Any]
    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    call: Callable[..., Any] = lambda step, state, arguments: step(state, *arguments)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    step_on: Callable[[Any], Callable[..., Any]] | None = None
    rows: int = ROWS


class Reference(NamedTuple):
    """The user's step.

    Attributes:
      call: Its arguments, the state abstract.
      inputs: The numbers of state, batch and further arguments, see ``tests/exact.py``.
      outputs: The state's parts and the results that the step computes from them.
      dtypes: Of each output.
    """

    call: Call
    inputs: Any
    outputs: Any
    dtypes: list[Any]


def in_arguments(step: Any, state: Any, arguments: Any) -> Any:
    """Calls a step whose state is several arguments."""
    return step(*state, *arguments)


@functools.cache
def source(name: str, rows: int = ROWS) -> Source:
    """A program by name, with that many rows of its batch."""
    program = ALL[name]
    usual = in_arguments if program.nnx else Source.call
    arguments = in_float32(program.batch(np.random.default_rng(0)), rows)
    return Source(
        functools.partial(program.create, jax.random.key(5)), program.step, arguments,
        program.call or usual, {**program.jit, **program.zero},
        program.step_on if program.tokens else None, rows,
    )  # fmt: skip


LAYERED = tuple(
    gpt(name, layers=LAYERS, scan=True, remat=remat)
    for name, remat in (("layered", False), ("layered_remat", True))
)
ALL: dict[str, Program] = PROGRAMS | {program.name: program for program in LAYERED}
NAMES = [name for name, program in ALL.items() if program.once.kind is Kind.EQUAL]


def in_float32(tree: Any, rows: int = ROWS) -> Any:
    """Host arrays, the first rows of those that have rows."""

    def taken(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        x = x[:rows] if x.ndim and len(x) == ROWS else x
        return x.astype(np.float32) if np.issubdtype(x.dtype, np.floating) else x

    return jax.tree.map(taken, tree)


def numbers(tree: Any, seed: int) -> Any:
    """A tree of arbitrary floating-point numbers and keys; integers of the host are unchanged."""

    def number(i: int, x: Any) -> np.ndarray:
        x = np.asarray(x) if isinstance(x, int | float) else x
        if jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return exact.arbitrary(x.shape, x.dtype, seed + i)
        return x if isinstance(x, np.ndarray) else np.full(x.shape, 3).astype(x.dtype)

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [number(i, x) for i, x in enumerate(leaves)])


def arguments_of(step: Any, options: Mapping[str, Any]) -> Arguments:
    """The arguments of a step by these options of the decorator."""
    given = {
        option: slots(options.get(f"{option}_argnums"), options.get(f"{option}_argnames"))
        for option in ("static", "batch", "state", "frozen")
    }
    return Arguments(step, **given, batch_axis=options.get("batch_axis", 0))


class Called(Exception):
    """Carries the arguments of a call."""


def called(source: Source, arguments: Arguments) -> Call:
    """The arguments with which a source calls its step, the state abstract."""

    def step(*args: Any, **kwargs: Any) -> Any:
        raise Called(arguments.sort(arguments.by_slot(args, kwargs)))

    state = nnx.eval_shape(source.create)
    try:
        source.call(step, state, source.arguments)
    except Called as call:
        return call.args[0]
    raise AssertionError("not called")


@functools.cache
def reference(source: Source) -> Reference:
    """The undecorated step with its own optimizer."""
    arguments = arguments_of(source.step, source.options)
    call = called(source, arguments)
    opened = split_state(call.objects)
    given = opened.parts, call.batch, call.further
    mine = numbers(given, 1)

    def run(parts: Any, batch: Any, further: Any) -> Any:
        """The step of NNX objects or of any pytree, on the state's parts."""
        body = Body(arguments.rearranged(call.signature), opened.kind, "", ())
        return body(parts, opened.tx, batch, *further)

    if source.call is Source.call and isinstance(call.objects[0], TrainState):
        run, given, inputs = directly(source, call.objects[0], given, mine)
    else:
        inputs = jax.tree.leaves(mine)
    closed, shapes = hijax.trace(run, *given)
    outs = exact.run(closed, inputs)
    leaves, tree = jax.tree.flatten(shapes)
    return Reference(call, mine, jax.tree.unflatten(tree, outs), [x.dtype for x in leaves])


def directly(source: Source, state: TrainState, given: Any, mine: Any) -> tuple[Any, Any, Any]:
    """The call of a step as its user writes it, so that zerojax has no part in it.

    Returns:
      A function from the arrays among the state and the arguments to the state's parts and the
      other results; those arrays; and the numbers that stand for them.
    """
    number = {id(x): y for x, y in zip(*map(jax.tree.leaves, (given, mine)), strict=True)}
    leaves, tree = jax.tree.flatten((state, source.arguments))
    at = [i for i, x in enumerate(leaves) if id(x) in number]

    def run(*arrays: Any) -> Any:
        placed = [*leaves]
        for i, x in zip(at, arrays, strict=True):
            placed[i] = x
        own, arguments = jax.tree.unflatten(tree, placed)
        result = source.step(own, *arguments)
        new, *rest = result if isinstance(result, tuple) else (result,)
        return split_state((new,)).parts, rest

    return run, [leaves[i] for i in at], [number[id(leaves[i])] for i in at]


class Emitted(NamedTuple):
    """The program that zerojax emits for a step.

    Attributes:
      jaxpr: The program.
      parts: Shapes of the state's parts at rest.
      k: Micro-batches.
    """

    jaxpr: Any
    parts: Any
    k: int


def emitted(source: Source, mesh: Any = None, specs: Any = None, **config: Any) -> Emitted:
    """The program for a step of a source, by the config's keywords."""
    config = {"stage3_param_persistence_threshold": 0, **config}
    return emitted_by(zerojax.zero(mesh=mesh, specs=specs, **config), source)


def emitted_by(zero: zerojax.Zero, source: Source) -> Emitted:
    step = source.step_on(zero) if source.step_on else source.step
    arguments, states = arguments_of(step, source.options), zero.states
    call = called(source, arguments)
    function = arguments.rearranged(call.signature)
    with automatic_context(zero.mesh):
        opened = states.open(call.objects)
        if opened.kind.optimizer_in_step:
            opened = dataclasses.replace(opened, tx=find_optimizer(function, opened, call))
        setting = StepSetting(function, states, opened, None)
        setting.layout.check(call.batch)
        setting.layout.check_more(call)
        signals = AfterStep(zero.config).signals
        traced = ResidentStep(setting, True, signals).traced(opened.parts, call.batch, call.further)
    parts = abstract(opened.parts, setting.plan, at_rest=True)
    return Emitted(traced.jaxpr, parts, setting.layout.accumulation)


def differing(source: Source, program: Emitted) -> list[str]:
    """The paths of the results in which an emitted program and the user's step differ."""
    own, k = reference(source), program.k
    mine, batch, arrays = own.inputs
    opt_state = numbers(program.parts.opt_state, 10_000)._replace(inner=mine.opt_state)
    start = jax.tree.map(padded, mine._replace(opt_state=opt_state), program.parts)
    batch = jax.tree.map(lambda x: by_micro_batch(x, k), batch)
    outs = exact.run(program.jaxpr, jax.tree.leaves((start, batch, arrays)))
    n = len(jax.tree.leaves(start))
    after, out = own.outputs
    out = jax.tree.map(
        lambda x: by_micro_batch(x, k) if len(x.shape) and len(x) == source.rows else x, out
    )
    state = of_state(outs[:n], program.parts)
    made = [*state, *outs[n:]]  # the signals of the step come last
    dtypes = [v.aval.dtype for v in jaxprs.open_jaxpr(program.jaxpr)[0].outvars]
    dtypes = [*of_state(dtypes[:n], program.parts), *dtypes[n:]]
    want = jax.tree_util.tree_leaves_with_path((after, out))
    assert len(made) >= len(want)
    return [
        jax.tree_util.keystr(path)
        for i, ((path, x), y) in enumerate(zip(want, made, strict=False))
        if dtypes[i] != own.dtypes[i]
        or (i >= len(state) and y.shape != x.shape)
        or not np.array_equal(x, y[tuple(map(slice, x.shape))])
    ]


def of_state(leaves: list[Any], parts: Any) -> list[Any]:
    """Of values for each array of a state at rest those that the user's state has too."""
    tree = jax.tree.unflatten(jax.tree.structure(parts), leaves)
    return jax.tree.leaves(tree._replace(opt_state=tree.opt_state.inner))


def check(source: Source, stage: int = 3, k: int = 1, mesh: Any = None, **config: Any) -> None:
    """Fails where the program for a step does not compute what the user's step computes.

    Under ``bf16`` that is mixed precision written by hand.

    Args:
      k: Micro-batches.
      config: Further keywords of ``zerojax.zero``.
    """
    program = emitted(source, mesh, stage=stage, gradient_accumulation_steps=k, **config)
    assert differing(by_hand(source) if config.get("bf16") else source, program) == []


@functools.cache
def by_hand(source: Source) -> Source:
    """The step of a ``TrainState`` that computes in bfloat16, with masters in float32."""

    def step(state: Any, *arguments: Any, **more: Any) -> Any:
        low = state.replace(
            params=cast(state.params, jnp.bfloat16), tx=with_masters(state.tx),
            opt_state=(state.params, state.opt_state),
        )  # fmt: skip
        results = source.step(low, *arguments, **more)
        new, *out = results if isinstance(results, tuple) else (results,)
        params, opt_state = new.opt_state
        new = new.replace(params=params, opt_state=opt_state, tx=state.tx)
        return (new, *out) if isinstance(results, tuple) else new

    return dataclasses.replace(source, step=step)


def padded(x: np.ndarray, like: Any) -> np.ndarray:
    """An array padded with zeros, as it is stored."""
    return np.pad(x, [(0, m - n) for n, m in zip(x.shape, like.shape, strict=True)] or 0)


def by_micro_batch(x: np.ndarray, k: int) -> np.ndarray:
    """An array with rows, [k, rows, ...] under accumulation."""
    return x.reshape(k, -1, *x.shape[1:]) if x.ndim and k > 1 else x
