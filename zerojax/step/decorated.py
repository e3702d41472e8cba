"""The common base of a decorated step and an evaluated function: both stand in for a function."""

from __future__ import annotations

import abc
import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, ParamSpec, Self, TypeVar

import jax
import numpy as np

from zerojax.devices.mesh import relabel_arrays
from zerojax.distributed.equality import require_same_program, require_same_values
from zerojax.distributed.join import require_same
from zerojax.distributed.lockstep import CallsOfFunction, Lockstep, lockstep
from zerojax.distributed.watchdog import Watchdog, watchdog
from zerojax.placement.states import States
from zerojax.plan.places import check_memories
from zerojax.plan.table import Summarized, Summary, Table
from zerojax.step.arguments import Arguments
from zerojax.step.call import Call, Constant, Signature
from zerojax.trace.explicit import Explicit
from zerojax.train_state.nnx import is_nnx
from zerojax.train_state.state_parts import OpenedState
from zerojax.xla import compat
from zerojax.xla.lowered import LoweredProgram
from zerojax.xla.types import PyTree

P = ParamSpec("P")
R = TypeVar("R")
Program = TypeVar("Program")


class Decorated(Summarized, abc.ABC, Generic[P, R]):
    """A function that keeps its author's signature and is compiled by zerojax.

    Args:
      arguments: The function, and the signatures of its calls.
      states: Turns a user's states into sharded states.
    """

    def __init__(self, arguments: Arguments, states: States) -> None:
        functools.update_wrapper(self, arguments.function)
        self._arguments, self._states, self._attribute = arguments, states, arguments.name
        self._programs: dict[Hashable, Any] = {}
        self._compared: set[object] = set()
        self._in_flight: deque[PyTree] = deque()
        self._calls = CallsOfFunction()

    def summary(self) -> Summary:
        """Returns the arguments, the place of the definition, the stage and the devices."""
        mesh, code = self._states.mesh, getattr(self._arguments.function, "__code__", None)
        rows = [
            ("defined", f"{code.co_filename}:{code.co_firstlineno}" if code else "unknown"),
            ("stage", str(self._states.config.stage)),
            ("devices", f"{mesh.size} x {mesh.devices.flat[0].device_kind}"),
            ("programs", f"{len(self._programs):,} so far"),
        ]
        kind, names = type(self).__name__, ", ".join(self._arguments.names)
        return Summary(f"{kind} {self._arguments.name}({names})", (Table(rows),))

    @abc.abstractmethod
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function."""

    @abc.abstractmethod
    def programs(self, *args: PyTree, **kwargs: PyTree) -> Iterator[LoweredProgram]:
        """Lowers every program that a call runs, for abstract or concrete arguments."""

    @abc.abstractmethod
    def _with(self, arguments: Arguments) -> Self:
        """Returns an object like this one for another function."""

    @compat.with_short_traceback
    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """Lowers the function for abstract (or concrete) arguments, as ``jax.jit(f).lower`` does.

        Works for a mesh of absent devices (:func:`zerojax.topology`).
        """
        return next(self.programs(*args, **kwargs)).lowered

    @functools.cached_property
    def _watchdog(self) -> Watchdog | None:
        """The process's watchdog, which expects steps from the first call on."""
        process_watchdog = watchdog()
        if process_watchdog:
            process_watchdog.begin()
        return process_watchdog

    @functools.cached_property
    def _is_on_virtual_devices(self) -> bool:
        local = self._states.mesh.local_devices
        return len(local) > 1 and local[0].platform == "cpu"

    def _limit_in_flight(self, out: PyTree, state: PyTree = ()) -> None:
        """Waits, on virtual devices of a CPU, until at most two programs are in flight.

        XLA ends the process when one device waits 40 s for another in a collective, as it may
        behind many programs.

        Args:
          out: The results of the program just started, without those that the next takes over.
          state: Arrays of its new state, to wait for if there are no other results.
        """
        if self._is_on_virtual_devices:
            results = [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]
            self._in_flight.append(results[:1])
            oldest = self._in_flight.popleft() if len(self._in_flight) > 2 else []
            jax.block_until_ready([x for x in oldest if not x.is_deleted()] if results else state)

    @functools.cached_property
    def _lockstep(self) -> Lockstep | None:
        return lockstep(self._states.mesh)

    @functools.cached_property
    def _is_alone(self) -> bool:
        """True if no other process runs the step."""
        return not self._lockstep and jax.process_count() == 1

    def _agree(self, call: Call, state: str = "...") -> None:
        """Compares the call, and its form, with those of the other processes.

        Args:
          call: The call.
          state: The origin of the state, in words that are equal in all processes.
        """
        if not self._lockstep:
            return
        static = {name: _form(x) for name, x in _named(call).items() if isinstance(x, Constant)}
        form = call.known.described | static
        self._lockstep.agree(self._calls, f"{self._arguments.name}({state})", form)

    def _compare(
        self, program: object, call: Call, lowered: Callable[[], Iterator[LoweredProgram]]
    ) -> None:
        """Refuses a program or values that differ between processes.

        A program's first run waits for the comparison, and later runs do not.
        """
        if not self._lockstep:
            return
        name, values = self._arguments.name, _shared_values(_named(call))
        if program in self._compared:
            self._lockstep.note_values(
                {
                    # A loader may fill its buffer again before a thread compares the values.
                    f"{name}: {where}": x.copy() if isinstance(x, np.ndarray) else x
                    for where, x in values.items()
                    if not isinstance(x, np.ndarray | jax.Array) or x.size <= _COMPARED
                }
            )
            return
        self._compared.add(program)
        self._lockstep.note(f"the first run of a program of {name}")
        require_same(self._states.config, self._states.mesh)
        require_same_values(name, values)
        require_same_program(name, (each.lowered for each in lowered()))

    def _relabelled(self, call: Call) -> Call:
        """Moves the arrays of a call under explicit mesh axes to the step's own mesh."""
        arrays = {"batch": call.batch, "further": call.further}
        return call._replace(**relabel_arrays(arrays, self._states.mesh))

    def _compiled(
        self,
        opened: OpenedState,
        signature: Signature,
        explicit: Explicit | None,
        make: Callable[[], Program],
    ) -> Program:
        """Returns the program for states like this one, created on the first request."""
        leaves, tree = jax.tree.flatten(opened.parts)
        shapes = tuple((np.shape(x), getattr(x, "dtype", None)) for x in leaves)
        # optax's transformations compare by their functions: a new one is traced again.
        key = opened.kind.key, opened.tx, tree, shapes, opened.specs, signature, explicit
        if key not in self._programs:
            check_memories(self._states.config, self._states.mesh)
            self._programs[key] = make()
        program: Program = self._programs[key]
        return program

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the function to an instance, if it is defined in a class. Values that it reads
        from ``self`` are part of the program, unless ``self`` is the state."""
        if instance is None:
            return self
        if is_nnx(instance) or not jax.tree_util.all_leaves([instance]):  # such as a TrainState
            return functools.partial(self, instance)
        if not hasattr(instance, "__dict__"):
            raise TypeError(
                f"{self._attribute} is a step of {type(instance).__name__}, which has only "
                "__slots__. Decorate the bound method of an instance instead."
            )
        bound = vars(instance).get(self._attribute)  # Python looks here first, except for odd names
        if not isinstance(bound, type(self)):
            bound = vars(instance)[self._attribute] = self._with(self._arguments.bound(instance))
        return bound


def check_not_deleted(arrays: Iterable[PyTree]) -> None:
    """Refuses arrays whose memory an earlier step has taken over."""
    if any(x.is_deleted() for x in arrays if hasattr(x, "is_deleted")):
        raise ValueError(
            "an earlier step took over the memory of this state, or of a part of it. Continue "
            "with the state that the step returned, or keep both with zerojax.zero(donate=False)."
        )


def check_concrete(name: str, tree: PyTree) -> None:
    """Refuses the arrays of a trace."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(
            f"{name} is decorated with zero and cannot run inside jax.jit, scan, vmap, pmap, grad "
            "or eval_shape. Call it in a plain Python loop; for shapes, use its lower()."
        )


_COMPARED = 1024  # elements of an array whose values are compared at each call


def _named(call: Call) -> dict[str, PyTree]:
    """Returns the leaves of the batch and of the further arguments of a call by name."""
    known = call.known
    if known.names is None:
        keystr, leaves = jax.tree_util.keystr, jax.tree_util.tree_leaves_with_path
        names = [f"batch{keystr(path)}" for path, _ in leaves(call.batch)]
        further = leaves(call.further, is_leaf=_is_constant)
        names += [f"argument {keystr(path)} behind the batch" for path, _ in further]
        known.names = tuple(names)
        arrays = zip(names, _leaves(call), strict=True)
        known.described = {name: _form(x) for name, x in arrays if not _is_constant(x)}
    return dict(zip(known.names, _leaves(call), strict=True))


def _leaves(call: Call) -> list[PyTree]:
    """Returns the leaves of the batch and of the further arguments of a call, constants too."""
    return [*jax.tree.leaves(call.batch), *jax.tree.leaves(call.further, is_leaf=_is_constant)]


def _is_constant(x: object) -> bool:
    return isinstance(x, Constant)


def _shared_values(named: dict[str, PyTree]) -> dict[str, object]:
    """Returns the values that all processes must share: scalars of the batch, further arguments."""
    return {
        name: x.value if isinstance(x, Constant) else x
        for name, x in named.items()
        if not (name.startswith("batch") and np.ndim(x))
    }


def _form(x: object) -> str:
    """Returns the dtype and shape of an array, or a number, text or flag itself."""
    if isinstance(x, Constant):
        simple = isinstance(x.value, bool | int | float | str | None)
        return repr(x.value) if simple else type(x.value).__name__
    try:
        aval = jax.typeof(x)
    except TypeError:  # a later check names it
        return type(x).__name__
    return f"{aval.dtype}{[*aval.shape]}"
