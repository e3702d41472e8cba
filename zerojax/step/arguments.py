"""The signatures of the calls of a decorated function: its state, its batch, other arguments.

    arguments = Arguments(function, static=3)
    call = arguments.sort(arguments.by_slot(args, kwargs))
    function = arguments.rearranged(call.signature)
    function(*call.objects, call.batch, *call.further)  # the function as it was called

The rest of zerojax calls every function in this order, whatever order its author chose.
"""

from __future__ import annotations

import copy
import inspect
import operator
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zerojax.step.call import (
    Call,
    Constant,
    Frozen,
    Known,
    RearrangedFunction,
    Signature,
    is_array,
    is_key,
)
from zerojax.step.find_state import find_state, may_be_batch
from zerojax.step.jitted import Slot, name_of, open_jit, without_self
from zerojax.train_state.linen import is_train_state
from zerojax.train_state.nnx import is_nnx
from zerojax.train_state.pytree import is_part
from zerojax.xla.types import PyTree

Slots = Slot | Sequence[Slot] | None
"""Arguments that the user names, by position or name."""


class Arguments:
    """Finds the signature of each call of a function.

    Args:
      function: ``(state, batch, ...)`` with a ``TrainState`` or other pytrees, or a function of NNX
        objects, a batch and more in any order; with or without ``jax.jit`` or ``nnx.jit``.
      static: The arguments that are part of the program, as for ``jax.jit``.
      batch: The arguments that are the batch, if it is not the first argument after the state with
        rows: a position or a name, or several, whose tuple is the batch.
      state: The arguments that are the state, if they cannot be found.
      frozen: The arguments that are parameters, and that the step does not train.
      returns_state: Whether the function returns the new state.
      batch_axis: The dimension of the batch's arrays that has the rows.

    Attributes:
      function: The function without its jit.
      name: The function's name for messages.
      names: The names of its parameters.
      batch_axis: The argument of this name.

    Raises:
      ValueError: The function has no such arguments, or a jit with options that zerojax does not
        support.
      TypeError: The positions or names have a wrong type.
    """

    function: Callable[..., PyTree]
    name: str
    names: list[str]
    batch_axis: int

    def __init__(
        self,
        function: Callable[..., PyTree],
        static: Slots = None,
        batch: Slots = None,
        state: Slots = None,
        frozen: Slots = None,
        returns_state: bool = True,
        batch_axis: int = 0,
    ) -> None:
        self.function, static_of_jit, donated = open_jit(function)
        self.name = name_of(self.function)
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # a builtin without a signature
            signature = inspect.signature(lambda *args, **kwargs: None)
        parameters = signature.parameters.values()
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.names = [p.name for p in parameters]
        self._positional = [p.name for p in parameters if p.kind in kinds]
        self._variadic = {p.kind for p in parameters}.difference(kinds)
        options = {"static": static, "batch": batch, "state": state, "frozen": frozen}
        named = {option: self._slots(option, given) for option, given in options.items()}
        named["static"] += tuple(map(self._slot_of, static_of_jit))
        named["donated"] = tuple(map(self._slot_of, donated))
        self._named, self._known = named, dict[Hashable, Known]()
        self._returns_state, self.batch_axis = returns_state, _dimension(batch_axis)
        self._several = isinstance(batch, Sequence) and not isinstance(batch, str)
        pairs = ("batch", "static"), ("frozen", "static"), ("frozen", "batch"), ("frozen", "state")
        for one, other in pairs:
            if twice := {*named[one]}.intersection(named[other]):
                raise ValueError(
                    f"{self.name}: {one}_argnums and {other}_argnums both name the argument "
                    f"{self._text(twice)}. Remove it from one of them."
                )

    def by_slot(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> dict[Slot, PyTree]:
        """Returns the arguments of a call by slot: by position, also if they are passed by name,
        and by name if the function takes them only by name."""
        given: dict[Slot, PyTree] = dict(enumerate(args))
        for name, x in kwargs.items():
            slot = self._slot_of(name)
            # Python refuses an argument that is passed twice, when the function is called.
            given[name if slot in given else slot] = x
        return given

    def sort(self, given: dict[Slot, PyTree], left: RearrangedFunction | None = None) -> Call:
        """Sorts the arguments of a call.

        Args:
          given: The arguments, from :meth:`by_slot`.
          left: The function of the last step, if the call has the state that this step left.

        Raises:
          TypeError: The call has no state, or no batch for a function that returns no state.
          ValueError: The function's own jit donates an argument other than the state.
        """
        known = self._known_of(given, left)
        signature = known.signature
        further = tuple([self._further(slot, given[slot]) for slot in signature.further])
        batch = tuple([given[slot] for slot in signature.batch])
        objects = tuple([given[slot] for slot in signature.state])
        return Call(objects, batch if signature.several else batch[0], further, known)

    def _known_of(self, given: dict[Slot, PyTree], left: RearrangedFunction | None) -> Known:
        """Returns what is known of a call, found once for calls of equal kinds."""
        skipped = self._named["static"]
        if left is not None:
            skipped += left.signature.state  # a program determines the state that it left
        others = [x for slot, x in given.items() if slot not in skipped]
        if not self._returns_state or (left is None and any(map(is_nnx, others))):
            return Known(self._signature(given))
        leaves, tree = jax.tree_util.tree_flatten(others)
        key = (*given, left, tree, *map(_kind, leaves))
        try:
            known = self._known.get(key)
        except TypeError:  # an argument is not hashable
            return Known(self._signature(given))
        if known is None:
            known = self._known[key] = Known(self._signature(given))
        return known

    def _signature(self, given: dict[Slot, PyTree]) -> Signature:
        """Finds what each argument of a call is."""
        # The first argument with rows is the batch: the first of the definition, not of the call.
        given = self._in_order(given)
        frozen = self._named["frozen"]
        free = [slot for slot in given if slot not in (*self._named["static"], *frozen)]
        if modules := [slot for slot in given if slot in frozen and is_nnx(given[slot])]:
            raise TypeError(
                f"{self.name}: frozen_argnums names {self._text(modules)}, an NNX object, which is "
                "part of the state. Remove it from frozen_argnums."
            )
        objects = self._objects(given, free)
        left = [slot for slot in free if slot not in objects]
        batch = self._slots_of_batch(given, left, [given[slot] for slot in objects])
        if not objects or not (batch or self._returns_state):
            only = f"only the state ({self._text(objects)})"
            got = only if objects else f"{len(given)} arguments"
            raise TypeError(
                f"{self.name} got {got}. Call it with a state and a batch: (state, batch, ...) or "
                "(model, optimizer, batch, ...)."
            )
        if states := [slot for slot in batch if is_train_state(given[slot])]:
            raise TypeError(
                f"{self.name} got a TrainState as the batch ({self._text(states)}). If the "
                "function only reads it, pass it after the batch; if it is part of the state, "
                "return its new value."
            )
        donated = self._named["donated"]
        if wrong := [slot for slot in given if slot in donated and slot not in objects]:
            raise ValueError(
                f"the jit of {self.name} donates {self._text(wrong)}. Remove donate_argnums and "
                "donate_argnames: zerojax donates the state, and nothing else."
            )
        several = self._several or not batch
        further = tuple(slot for slot in given if slot not in {*objects, *batch})
        return Signature(tuple(objects), tuple(batch), several, further, self.batch_axis)

    def bound(self, instance: object) -> Arguments:
        """Returns the arguments of the function as a bound method of ``instance``."""
        arguments = copy.copy(self)
        arguments.function = types.MethodType(self.function, instance)
        arguments.names, arguments._positional = self.names[1:], self._positional[1:]
        arguments._named = {option: without_self(slots) for option, slots in self._named.items()}
        # Slots count without self now, so that what is known of calls does not hold.
        arguments._known = {}
        return arguments

    def rearranged(self, signature: Signature) -> RearrangedFunction:
        """Returns the function, called in the order of :class:`Call`."""
        return RearrangedFunction(self.function, self.name, self._positional, signature)

    def _objects(self, given: dict[Slot, PyTree], free: list[Slot]) -> list[Slot]:
        """Returns the arguments that are the state."""
        if objects := [slot for slot in free if is_nnx(given[slot])]:
            return objects
        if self._named["state"]:
            return self._given("state", free)
        states = [slot for slot in free if is_train_state(given[slot])]
        if len(states) == 1 or not self._returns_state:
            return states[:1] or free[:1]
        others = tuple(slot for slot in given if slot not in free)
        function = self.rearranged(Signature(tuple(free), (), True, others, self.batch_axis))
        return find_state(function, given, self._named["batch"], self._text)

    def _given(self, option: str, free: Collection[Slot]) -> list[Slot]:
        """Returns the arguments that an option names, which are among those that it may name."""
        slots = self._named[option]
        if missing := [slot for slot in slots if slot not in free]:
            raise TypeError(
                f"{self.name}: {option}_argnums names {self._text(missing)}, which this call does "
                f"not have, or which is {'static' if option == 'state' else 'part of the state'}."
            )
        return [*slots]

    def _slots_of_batch(
        self, given: dict[Slot, PyTree], left: list[Slot], objects: list[PyTree]
    ) -> list[Slot]:
        """Returns the arguments that are the batch; none for a step of which all other arguments
        are random keys and numbers."""
        if self._named["batch"]:
            return self._given("batch", left)
        # An argument with the form of the state, such as a target network, is read; where nothing
        # else has rows, it is data.
        others = [slot for slot in left if not is_part(given[slot], objects)]
        if not self._named["state"]:
            others += [slot for slot in left if slot not in others]
        rows = [slot for slot in others if may_be_batch(given[slot]) and not is_key(given[slot])]
        if self._returns_state:  # a container without rows is refused as an empty batch
            others = [x for x in others if not (is_key(given[x]) or _is_number(given[x]))]
        return rows[:1] or others[:1]

    def _further(self, slot: Slot, value: PyTree) -> PyTree:
        """Returns an argument beside the state and the batch in the form of :data:`Further`."""
        if slot in self._named["static"]:
            name, remedy = f"the static argument {self._text([slot])}", "do not make it static"
            return self._constant(name, value, remedy)

        def traced(path: jax.tree_util.KeyPath, x: PyTree) -> PyTree:
            if is_array(x):
                return x
            name = f"the argument {self._text([slot])}{jax.tree_util.keystr(path)}"
            return self._constant(name, x, "bind it with functools.partial")

        if not all(map(is_array, jax.tree.leaves(value))):
            value = jax.tree_util.tree_map_with_path(traced, value)
        return Frozen(value) if slot in self._named["frozen"] else value

    def _constant(self, name: str, value: object, remedy: str) -> Constant:
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"{self.name}: {name} is a {type(value).__name__}, which is not hashable. Pass a "
                f"tuple or a frozen dataclass, or {remedy}."
            ) from None
        return Constant(value)

    def _in_order(self, given: dict[Slot, PyTree]) -> dict[Slot, PyTree]:
        """Sorts arguments in the order of the function's parameters, unknown ones last."""
        known: list[Slot] = sorted(slot for slot in given if isinstance(slot, int))
        known += [name for name in self.names if name in given]
        return {slot: given[slot] for slot in known} | given

    def _slots(self, option: str, given: Slots) -> tuple[Slot, ...]:
        """Returns the slots of the arguments that an option names: positions, counted from 0, or
        from -1 for the last, and names."""
        if given is None:
            return ()
        several = given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
        n, found = len(self._positional), list[Slot]()
        for x in several:
            if isinstance(x, str):
                fits = x in self.names or inspect.Parameter.VAR_KEYWORD in self._variadic
            elif hasattr(x, "__index__"):
                beyond = x >= n and inspect.Parameter.VAR_POSITIONAL in self._variadic
                fits = beyond or -n <= x < n
            else:
                raise TypeError(f"{option}_argnums: expected positions or names, got {x!r}.")
            if not fits:
                raise ValueError(
                    f"{option}_arg{'names' if isinstance(x, str) else 'nums'} has {x!r}, but "
                    f"{self.name} takes {', '.join(self.names)}."
                )
            found.append(self._slot_of(x) if isinstance(x, str) else range(n)[x] if x < n else x)
        return tuple(found)

    def _slot_of(self, given: Slot) -> Slot:
        """Returns the position of an argument that may be passed by position, else its name."""
        return self._positional.index(given) if given in self._positional else given

    def _text(self, slots: Iterable[Slot]) -> str:
        names = dict[Slot, str](enumerate(self._positional))
        return ", ".join(f"{x} ({names[x]})" if x in names else f"{x}" for x in slots)


def slots(nums: int | Sequence[int] | None, names: str | Iterable[str] | None) -> Slots:
    """Returns arguments by positions and by names as one value."""
    if names is None:
        return nums
    if nums is None and isinstance(names, str):
        return names
    positions = () if nums is None else nums if isinstance(nums, Sequence) else (nums,)
    return (*positions, *((names,) if isinstance(names, str) else names))


def _is_number(x: PyTree) -> bool:
    """Returns whether an argument is a number, by itself."""
    return isinstance(x, bool) or (is_array(x) and not np.ndim(x))


def _kind(x: Any) -> Hashable:
    """Returns the type of a leaf with its shape, dtype and sharding, or with its value if the leaf
    is neither an array nor a number."""
    kind, shape = type(x), getattr(x, "shape", None)
    if isinstance(x, jax.core.Tracer):  # has no sharding
        return kind, shape
    if shape is not None:
        return kind, shape, getattr(x, "dtype", None), getattr(x, "sharding", None)
    return kind, None if kind in (int, float, complex) else x


def _dimension(axis: Any) -> int:
    """Checks and returns ``batch_axis``."""
    if isinstance(axis, bool) or not hasattr(axis, "__index__") or axis < 0:
        raise ValueError(
            f"batch_axis: expected a dimension counted from 0, got {axis!r}. Pass 0 for rows as in "
            "[rows, ...], 1 for [steps, rows, ...]."
        )
    return operator.index(axis)
