"""Functions that read jaxprs, and run them equation by equation.

``jax.extend.core`` exports jaxprs and their equations, but guarantees nothing about their contents:
the names of an equation's parameters, its context, the line of source that it comes from. Other
modules read them through this one, and ``tests/xla/test_jaxprs.py`` checks it on every tested
version of jax.
"""

from __future__ import annotations

import contextlib
import math
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util
from jax.extend.core import primitives as prims
from jax.interpreters import partial_eval

from zerojax.xla.types import (
    AnyJaxpr,
    Atom,
    Aval,
    Equation,
    HasEquations,
    Jaxpr,
    MaybeNone,
    PyTree,
    Shaped,
    Traceback,
)

T = TypeVar("T")

CALLS: dict[core.Primitive, str] = {
    prims.jit_p: "jaxpr",
    prims.closed_call_p: "call_jaxpr",
    prims.custom_jvp_call_p: "call_jaxpr",
    prims.custom_vjp_call_p: "call_jaxpr",
    prims.remat_p: "jaxpr",
}
"""Equations that run a jaxpr once on their own operands, and the parameter that holds it."""

SHARDINGS = ("dst_sharding", "out_sharding", "sharding")
"""Parameters of an equation that request the sharding of its result."""

_JAXPRS = (core.ClosedJaxpr, core.Jaxpr)
_JAX, _PYTHON = str(Path(jax.__file__).parent), sysconfig.get_path("stdlib")
_REQUIRED = object()


def param(eqn: Equation, name: str, default: object = _REQUIRED) -> Any:
    """Returns a parameter of an equation; ``default``, if given, if its primitive has none.

    The rules of this package know primitives by their parameters, whose names jax may change.

    Raises:
      NotImplementedError: this version of jax has no such parameter.
    """
    if name in eqn.params:
        return eqn.params[name]
    if default is not _REQUIRED:
        return default
    raise NotImplementedError(
        f"jax {jax.__version__} has no parameter {name!r} of {eqn.primitive.name}, only "
        f"{', '.join(sorted(eqn.params))}: install a jax that zerojax is tested with."
    )


def open_jaxpr(jaxpr: AnyJaxpr) -> tuple[Jaxpr, tuple[jax.Array, ...]]:
    """Returns the open jaxpr and the constants of a jaxpr."""
    # jax 0.10 has separate classes for open and closed jaxprs, 0.11 and newer have one class.
    return cast(Jaxpr, getattr(jaxpr, "jaxpr", jaxpr)), tuple(getattr(jaxpr, "consts", ()))


def is_jaxpr(value: object) -> bool:
    """Returns whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, _JAXPRS)


def with_body(jaxpr: Any, body: Jaxpr) -> Any:
    """Replaces the open jaxpr of a jaxpr, open or closed, and keeps the constants."""
    return jaxpr.replace(jaxpr=body) if open_jaxpr(jaxpr)[0] is not jaxpr else body


def shaped_like(jaxpr: AnyJaxpr, closed: AnyJaxpr) -> AnyJaxpr:
    """Returns ``closed``, opened if ``jaxpr`` is open."""
    # In jax 0.10 the body of a checkpoint is open and that of a scan is closed.
    return closed if hasattr(jaxpr, "jaxpr") else open_jaxpr(closed)[0]


def called_jaxpr(eqn: Equation) -> AnyJaxpr:
    """Returns the jaxpr that a call runs, open or closed."""
    return cast(AnyJaxpr, param(eqn, CALLS[eqn.primitive]))


def is_plain_call(eqn: Equation) -> bool:
    """Returns whether an equation is a call that states no shardings of its operands."""
    if eqn.primitive is not prims.jit_p:
        return eqn.primitive is prims.closed_call_p
    # They are the shardings of the present operands, which a rewrite exchanges.
    shardings = param(eqn, "in_shardings")
    return not any(isinstance(each, jax.sharding.Sharding) for each in shardings)


def bodies(eqn: Equation) -> list[Jaxpr]:
    """Returns the open jaxprs of a call, or of the branches of a cond; [] for other equations."""
    programs = [called_jaxpr(eqn)] if eqn.primitive in CALLS else []
    programs = list(param(eqn, "branches")) if eqn.primitive is prims.cond_p else programs
    return [open_jaxpr(jaxpr)[0] for jaxpr in programs]


def programs(eqn: Equation) -> tuple[str, ...]:
    """Returns the names of the parameters that hold the jaxprs of a loop, conditional or call."""
    if eqn.primitive is prims.scan_p:
        return ("jaxpr",)
    if eqn.primitive is prims.while_p:
        return ("body_jaxpr", "cond_jaxpr")
    if eqn.primitive is prims.cond_p:
        return ("branches",)
    return (CALLS[eqn.primitive],) if eqn.primitive in CALLS else ()


def inner(eqn: Equation) -> Iterator[Jaxpr]:
    """Yields the open jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(x):
                yield open_jaxpr(x)[0]


class ScanParts(NamedTuple):
    """A scan, whose operands are the constants of ``body``, the carry, and stacks, of which each
    iteration takes one entry; its results are the carry, and stacks of the entries that iterations
    return.

    Attributes:
      body: jaxpr of the constants, the carry and the entries.
      consts: number of operands that each iteration reads in full.
      carry: number of operands, and of leading results, that iterations pass on.
      length: number of iterations.
      reverse: whether the first iteration takes the last entries.
      unroll: number of iterations that XLA's loop runs at once.
    """

    body: AnyJaxpr
    consts: int
    carry: int
    length: int
    reverse: bool
    unroll: int

    @property
    def first_stack(self) -> int:
        """The position of the first stack among the operands."""
        return self.consts + self.carry

    @property
    def order(self) -> range:
        """The indices of the entries, in the order of the iterations."""
        return range(self.length)[:: -1 if self.reverse else 1]

    def operands(self, values: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Splits what belongs to the operands, or to the arguments of ``body``, into that of the
        constants, of the carry and of the stacks."""
        stacks = self.first_stack
        return values[: self.consts], values[self.consts : stacks], values[stacks:]

    def results(self, values: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """Splits what belongs to the results, of the scan or of ``body``, into that of the carry
        and of the stacks."""
        return values[: self.carry], values[self.carry :]

    def scan(self, body: Callable[..., Any], init: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Runs ``lax.scan`` on another body, carry and stacks, with this scan's iterations."""
        length, reverse, unroll = self.length, self.reverse, self.unroll
        return jax.lax.scan(body, init, xs, length=length, reverse=reverse, unroll=unroll)


def scan_parts(eqn: Equation) -> ScanParts | MaybeNone:
    """Returns the parts of a scan; None for another primitive."""
    if eqn.primitive is not prims.scan_p:
        return None
    if "num_consts" in eqn.params:  # jax 0.10; newer versions have a tree
        counts = param(eqn, "num_consts"), param(eqn, "num_carry")
    else:
        consts, carry, _ = param(eqn, "ft_in").unpack()
        counts = len(list(consts)), len(list(carry))
    names = "length", "reverse", "unroll"
    return ScanParts(param(eqn, "jaxpr"), *counts, *(param(eqn, name) for name in names))


class WhileParts(NamedTuple):
    """A while loop, whose operands are the constants of ``cond``, those of ``body``, the carry.

    Attributes:
      cond, body: jaxprs of their constants and the carry.
      cond_consts, body_consts: numbers of their constants.
    """

    cond: AnyJaxpr
    body: AnyJaxpr
    cond_consts: int
    body_consts: int


def while_parts(eqn: Equation) -> WhileParts:
    """Returns the parts of a while loop."""
    names = "cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"
    return WhileParts(*(param(eqn, name) for name in names))


def runs_backward(eqn: Equation) -> bool:
    """Returns whether ``eqn`` is a rematerialised block that runs again for the backward pass."""
    return eqn.primitive is prims.remat_p and bool(param(eqn, "differentiated"))


def is_recomputed(eqn: Equation) -> bool:
    """Returns whether ``eqn``, by its name stack, recomputes a value of a rematerialised block for
    the backward pass."""
    # Under jax_remat3 no block encloses such equations.
    return "rematted_computation" in str(source(eqn).name_stack)


def is_transposed(eqn: Equation) -> bool:
    """Returns whether differentiation, by the name stack, derived ``eqn`` for the backward pass."""
    return "transpose(" in str(source(eqn).name_stack)


def is_backward(eqn: Equation) -> bool:
    """Returns whether ``eqn`` belongs to the backward pass."""
    return is_transposed(eqn) or is_recomputed(eqn) or runs_backward(eqn)


def is_differentiated(eqn: Equation) -> bool:
    """Returns whether differentiation derived ``eqn``, for the forward or the backward pass."""
    return "jvp(" in str(source(eqn).name_stack)


def is_batched(eqn: Equation) -> bool:
    """Returns whether ``eqn``, by its name stack, comes from ``jax.vmap``."""
    return "vmap(" in str(source(eqn).name_stack)


def source(eqn: Equation) -> source_info_util.SourceInfo:
    """Returns the origin of an equation: a name stack and a traceback, with its frames."""
    return eqn.source_info


def bound_at(traceback: Traceback | None) -> tuple[tuple[CodeType, int], ...]:
    """Returns the place that binds an equation: code and instruction of each frame, the innermost
    first, without the frames of jax and of Python's library; empty if unknown.

    An equation and the equations that differentiation derives from it have the same place.
    Equations of the backward function of a ``jax.custom_vjp`` have the place of the call.
    """
    frames = () if traceback is None else zip(*traceback.raw_frames(), strict=True)
    return tuple((code, at) for code, at in frames if not is_library(code.co_filename))


def is_library(file: str) -> bool:
    """Returns whether a file is part of jax or of Python's library."""
    # Installed packages, in site-packages or dist-packages, lie below Python's library.
    return file.startswith(_JAX) or (file.startswith(_PYTHON) and "-packages" not in file)


def source_within(
    call: source_info_util.SourceInfo, inside: source_info_util.SourceInfo, *, own_line: bool
) -> source_info_util.SourceInfo:
    """Returns the source of an equation of a call after the call is inlined: the call's names come
    first, and the line is the call's unless ``own_line``."""
    return inside.replace(
        name_stack=call.name_stack + inside.name_stack,
        traceback=inside.traceback if own_line else call.traceback,
    )


def variables(atoms: Iterable[Atom]) -> list[Atom]:
    """Returns the atoms that are not literals, in order."""
    return [v for v in atoms if not isinstance(v, core.Literal)]


def operands(equations: Iterable[Equation]) -> list[Atom]:
    """Returns the variables that equations take, each once, in order."""
    return [*dict.fromkeys(v for eqn in equations for v in variables(eqn.invars))]


def is_zero(atom: Atom) -> bool:
    """Returns whether an atom is a literal zero."""
    if not isinstance(atom, core.Literal):
        return False
    aval: Aval = atom.aval
    return not (jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) or np.any(atom.val))


def read(atom: Atom, env: Mapping[Atom, Any]) -> Any:
    """Returns the value of a literal, or of a variable in ``env``."""
    return atom.val if isinstance(atom, core.Literal) else env[atom]


def bind(
    eqn: Equation, values: Sequence[object], params: Mapping[str, object] | None = None
) -> Sequence[Any]:
    """Runs an equation on other operands, and with other parameters if given; returns its
    results."""
    primitive = eqn.primitive
    # Primitives take functions among their parameters in another form than equations hold them.
    out = primitive.bind(
        *values, **primitive.get_bind_params(eqn.params if params is None else params)
    )
    return out if primitive.multiple_results else [out]


def bind_anywhere(eqn: Equation, values: Sequence[object]) -> Sequence[Any]:
    """Runs an equation under another mesh than it was traced for, which its literals and the
    sharding of its result may name."""
    params = {name: None if name in SHARDINGS else x for name, x in eqn.params.items()}
    return bind(eqn, [x if isinstance(x, jax.Array) else np.asarray(x) for x in values], params)


def context(eqn: Equation) -> contextlib.AbstractContextManager[object]:
    """Returns the context in which ``eqn`` was traced: its mesh, compute type and metadata."""
    return eqn.ctx.manager


@contextlib.contextmanager
def traced_where(eqn: Equation) -> Iterator[None]:
    """Traces equations in the context of ``eqn``, as if they came from its line."""
    with named_as(eqn), context(eqn):
        yield


def named_as(eqn: Equation) -> contextlib.AbstractContextManager[None]:
    """Traces equations as if they came from the line of ``eqn``, under any mesh."""
    names = source_info_util.current_name_stack() + source(eqn).name_stack
    return source_info_util.user_context(source(eqn).traceback, name_stack=names)


def whole(eqn: Equation, used: Sequence[bool]) -> Equation | None:
    """Returns ``eqn`` itself if a result of it is used, or if it has an effect; else None."""
    return eqn if any(used) or eqn.effects else None


def pruned(eqn: Equation, used: Sequence[bool]) -> Equation | None:
    """Returns ``eqn`` in a form that computes only the used results; None if nothing needs it.

    Args:
      used: whether each result is used; an effect keeps an equation that has no used result.
    """
    rule: Any = partial_eval.dce_rules.get(eqn.primitive)
    if rule is None:
        return whole(eqn, used)
    # From 0.12 on, rules also take whether each operand, if it is a reference, is read later.
    read_later = [[True] * len(eqn.invars)] if jax.version.__version_info__ >= (0, 12) else []
    return cast("Equation | None", rule([*used], *read_later, eqn)[1])


def bind_in_context(eqn: Equation, values: Sequence[object]) -> Sequence[Any]:
    """Runs an equation on other operands, in the context in which it was traced, under its own
    names, which tell the passes of differentiation apart."""
    with traced_where(eqn):
        return bind(eqn, values)


def interpret(
    program: HasEquations,
    env: MutableMapping[Atom, T],
    run: Callable[[Equation, list[T]], Sequence[T]],
    literal: Callable[[Any], T] = lambda v: v.val,
) -> list[T]:
    """Runs a program equation by equation: on arrays, or on what stands for them, such as facts of
    an analysis or variables of another program.

    Args:
      program: The program; only its equations and results are read.
      env: The values of its arguments and constants; receives those of the other variables.
      run: Function from an equation and its operands to its results.
      literal: Function from a literal to its value.
    """

    def known(v: Atom) -> T:
        return literal(v) if isinstance(v, core.Literal) else env[v]

    for eqn in program.eqns:
        outs = run(eqn, [*map(known, eqn.invars)])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [*map(known, program.outvars)]


def evaluate(
    closed: AnyJaxpr,
    args: Sequence[object],
    run: Callable[[Equation, list[Any]], Sequence[Any]] = bind_in_context,
    opens: Callable[[Equation], bool] = lambda eqn: eqn.primitive in CALLS,
) -> list[Any]:
    """Runs a jaxpr equation by equation; if this is traced, the opened calls are inlined.

    Args:
      closed: a jaxpr and its constants.
      args: one value for each of its arguments.
      run: function from an equation and its operands to its results.
      opens: whether a call (jit, remat, custom derivatives) is inlined; other calls go to ``run``.
    """
    jaxpr, consts = open_jaxpr(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def run_or_open(eqn: Equation, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive in CALLS and opens(eqn):
            return evaluate(called_jaxpr(eqn), values, run, opens)
        return run(eqn, values)

    return interpret(jaxpr, env, run_or_open)


def like(aval: Shaped, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """Returns the abstract value of a variable for tracing; with another shape, if given."""
    # Without it, what comes from a Python number would promote the dtypes that it meets.
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape if shape is None else shape, aval.dtype, weak_type=weak)


def bits(dtype: np.dtype) -> int:
    """Returns the number of bits of an element, 4 for a 4-bit integer, which NumPy stores in 8."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return int(jnp.iinfo(dtype).bits) if is_integer else 8 * dtype.itemsize


def nbytes(aval: Shaped) -> int:
    """Returns the number of bytes of an array."""
    return math.prod(aval.shape) * bits(aval.dtype) // 8


def new_variable(aval: Any, shape: Sequence[int] | None = None) -> Atom:
    """Returns a variable of no jaxpr yet; with another shape than ``aval``, if given."""
    return cast(Atom, core.Var(aval if shape is None else aval.update(shape=tuple(shape))))


def without_calls(
    closed: AnyJaxpr, opens: Callable[[Equation], bool] = lambda eqn: True
) -> core.ClosedJaxpr:
    """Returns the closed jaxpr of the same function with the calls that `opens` selects inlined."""
    shapes = [like(v.aval) for v in open_jaxpr(closed)[0].invars]
    return jax.make_jaxpr(lambda *args: evaluate(closed, args, opens=opens))(*shapes)
