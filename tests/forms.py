"""The forms that a training state has in JAX programs, and a program of ``PROGRAMS`` in each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import struct, traverse_util
from programs import PROGRAMS, Program


@struct.dataclass
class Fields:
    params: Any
    opt_state: Any
    rest: Any


@jax.tree_util.register_static
@dataclass(frozen=True)
class Function:
    """A model's function among its parameters, as a module that is a pytree holds it."""


class Parts(NamedTuple):
    """What a ``TrainState`` carries: parameters, optax's state, and its other fields by name."""

    params: Any
    opt_state: Any
    rest: dict[str, Any]


class Form(NamedTuple):
    """A form of a state.

    Attributes:
      take: the arguments of a step that are the state, of its parts.
      give: the parts again.
      results: what a step returns, of those arguments and its other results.
      read: the arguments and the other results, of what a step has returned.
      batch_first: whether the batch stands before the state.
    """

    take: Callable[[Parts], tuple[Any, ...]]
    give: Callable[..., Parts]
    results: Callable[[tuple[Any, ...], Any], Any]
    read: Callable[[Any], tuple[tuple[Any, ...], Any]]
    batch_first: bool = False


def _one(results: Any) -> Any:
    return (results[0],), results[1]


def _modules(params: Any) -> Any:
    """A tree by module and parameter, {"mlp/linear": {"w": ...}}."""
    modules: dict[str, Any] = {}
    for path, x in traverse_util.flatten_dict(params).items():
        modules.setdefault("/".join(path[:-1]), {})[path[-1]] = x
    return modules


def _nested(modules: Any) -> Any:
    return traverse_util.unflatten_dict(
        {
            (*filter(None, module.split("/")), name): x
            for module, named in modules.items()
            for name, x in named.items()
        }
    )


FORMS = {
    "arguments": Form(
        take=lambda parts: (parts.params, parts.opt_state, parts.rest),
        give=Parts,
        results=lambda state, out: (*state, out),
        read=lambda results: (results[:-1], results[-1]),
    ),
    "tuple": Form(
        take=lambda parts: ((parts.params, parts.opt_state, parts.rest),),
        give=lambda state: Parts(*state),
        results=lambda state, out: (out, *state),
        read=lambda results: (results[1:], results[0]),
    ),
    "dict": Form(
        take=lambda parts: ({"params": parts.params, "opt": parts.opt_state, "rest": parts.rest},),
        give=lambda state: Parts(state["params"], state["opt"], state["rest"]),
        results=lambda state, out: (*state, out),
        read=_one,
    ),
    "NamedTuple": Form(
        take=lambda parts: (parts,),
        give=lambda parts: parts,
        results=lambda state, out: {"metrics": out, "state": state[0]},
        read=lambda results: ((results["state"],), results["metrics"]),
    ),
    "dataclass": Form(
        take=lambda parts: (Fields(*parts),),
        give=lambda state: Parts(state.params, state.opt_state, state.rest),
        results=lambda state, out: (*state, out),
        read=_one,
    ),
    "modules by name": Form(
        take=lambda parts: (_modules(parts.params), parts._replace(params={})),
        give=lambda modules, parts: parts._replace(params=_nested(modules)),
        results=lambda state, out: (*state, out),
        read=lambda results: (results[:-1], results[-1]),
    ),
    "module": Form(
        take=lambda parts: ([parts.params, Function()], parts.opt_state, parts.rest),
        give=lambda module, opt_state, rest: Parts(module[0], opt_state, rest),
        results=lambda state, out: (*state, out),
        read=lambda results: (results[:-1], results[-1]),
    ),
    "batch first": Form(
        take=lambda parts: (parts.params, parts.opt_state, parts.rest),
        give=Parts,
        results=lambda state, out: (out, [*state]),
        read=lambda results: (tuple(results[1]), results[0]),
        batch_first=True,
    ),
}


def has_form(program: Program) -> bool:
    """Whether a program can be written in other forms: one whose state is a ``TrainState`` of
    nested dicts, called in the usual way."""
    own = program.nnx or program.call or program.jit or program.zero or program.step_on
    return not (own or program.axes or program.specs)


def parts_of(state: Any) -> Parts:
    """The parts of a ``TrainState``."""
    static = {"params", "opt_state", "tx", "apply_fn"}
    rest = {
        name: getattr(state, name)
        for name, field in state.__dataclass_fields__.items()
        if name not in static and field.metadata.get("pytree_node", True)
    }
    return Parts(state.params, state.opt_state, rest)


def in_form(form: Form, step: Callable[..., Any], like: Any) -> Callable[..., Any]:
    """A program's step on a state of another form; ``like`` is its ``TrainState``."""
    n = len(form.take(parts_of(like)))

    def run(*given: Any) -> Any:
        objects, others = given[:n], given[n:]
        if form.batch_first:
            others, objects = given[:1] + given[n + 1 :], given[1 : n + 1]
        parts = form.give(*objects)
        state = like.replace(params=parts.params, opt_state=parts.opt_state, **parts.rest)
        new, out = step(state, *others)
        return form.results(form.take(parts_of(new)), out)

    return run


def ordered(form: Form, objects: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of such a step, in order."""
    return (others[0], *objects, *others[1:]) if form.batch_first else (*objects, *others)


NAMES = [name for name, program in PROGRAMS.items() if has_form(program)]
