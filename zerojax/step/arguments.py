"""The signatures of the calls of a decorated function: its state, its batch, other arguments.

    arguments = Arguments(function, static=3)
    call = arguments.sort(args, kwargs)
    function = arguments.rearranged(call.signature)
    args, kwargs = call.further
    function(*call.objects, call.batch, *args, **kwargs)  # the function as it was called

The rest of zerojax calls every function in this order, whatever order its author chose.
"""

from __future__ import annotations

import copy
import inspect
import operator
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


class LastSlots(NamedTuple):
    """The arguments of a call that are the state which the last step left.

    Attributes:
      slots: Their slots.
      program: The program of the last step.
    """

    slots: tuple[Slot, ...] = ()
    program: object = None


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
      batch_axis: The argument of this name.

    Raises:
      ValueError: The function has no such arguments, or a jit with options that zerojax does not
        support.
      TypeError: The positions or names have a wrong type.
    """

    function: Callable[..., PyTree]
    name: str
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
        jitted = open_jit(function)
        self.function = jitted.function
        self.name = name_of(self.function)
        try:
            self._parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):  # a builtin without a signature
            self._parameters = []
        self._static = self._both((*self._slots("static", static), *jitted.static))
        self._donated = self._both(jitted.donated)
        self._batch, self._state = self._slots("batch", batch), self._slots("state", state)
        self._frozen = self._both(self._slots("frozen", frozen))
        self._returns_state, self.batch_axis = returns_state, _dimension(batch_axis)
        self._found: dict[Hashable, Known] = {}
        self._several = isinstance(batch, Sequence) and not isinstance(batch, str)
        named = {"static": self._static, "frozen": self._frozen}
        named |= {"batch": self._both(self._batch), "state": self._both(self._state)}
        pairs = ("batch", "static"), ("frozen", "static"), ("frozen", "batch"), ("frozen", "state")
        for one, other in pairs:
            if twice := named[one] & named[other]:
                raise ValueError(
                    f"{self.name}: {one}_argnums and {other}_argnums both name the argument "
                    f"{min(twice, key=str)}. Remove it from one of them."
                )

    def sort(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        last: LastSlots | None = None,
    ) -> Call:
        """Sorts the arguments of a call.

        Args:
          args, kwargs: The arguments.
          last: The slots in which the call has the state that the last step left, if it has.

        Raises:
          TypeError: The call has no state, or no batch for a function that returns no state.
          ValueError: The function's own jit donates an argument other than the state.
        """
        given: dict[Slot, PyTree] = dict(enumerate(args))
        given.update(kwargs)
        known = self._known(given, last or LastSlots())
        signature = known.signature
        further = [(slot, self._further(slot, given[slot])) for slot in signature.further]
        batch = tuple([given[slot] for slot in signature.batch])
        args = tuple([x for slot, x in further if isinstance(slot, int)])
        kwargs = {slot: x for slot, x in further if isinstance(slot, str)}
        objects = tuple([given[slot] for slot in signature.state])
        return Call(objects, batch if signature.several else batch[0], (args, kwargs), known)

    def _known(self, given: dict[Slot, PyTree], last: LastSlots) -> Known:
        """Returns what is known of a call, found once for calls of equal kinds."""
        skipped = self._static.union(last.slots)  # a program determines the state that it left
        others = [x for slot, x in given.items() if slot not in skipped]
        if not self._returns_state or (not last.slots and any(map(is_nnx, others))):
            return Known(self._signature(given))
        leaves, tree = jax.tree_util.tree_flatten(others)
        key = (*given, last, tree, *map(_kind, leaves))
        try:
            found = self._found.get(key)
        except TypeError:  # an argument is not hashable
            return Known(self._signature(given))
        if found is None:
            found = self._found[key] = Known(self._signature(given))
        return found

    def _signature(self, given: dict[Slot, PyTree]) -> Signature:
        """Finds what each argument of a call is."""
        # The first argument with rows is the batch: the first of the definition, not of the call.
        given = self._in_order(given)
        positions = sum(isinstance(slot, int) for slot in given)
        free = [slot for slot in given if slot not in self._static | self._frozen]
        if modules := [slot for slot in given if slot in self._frozen and is_nnx(given[slot])]:
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
        if wrong := [slot for slot in given if slot in self._donated and slot not in objects]:
            raise ValueError(
                f"the jit of {self.name} donates {self._text(wrong)}. Remove donate_argnums and "
                "donate_argnames: zerojax donates the state, and nothing else."
            )
        several = self._several or not batch
        further = tuple(slot for slot in given if slot not in {*objects, *batch})
        return Signature(tuple(objects), tuple(batch), several, further, positions, self.batch_axis)

    def bound(self, instance: object) -> Arguments:
        """Returns the arguments of the function as a bound method of ``instance``."""
        arguments = copy.copy(self)
        arguments.function = types.MethodType(self.function, instance)
        first, arguments._parameters = self._parameters[:1], self._parameters[1:]
        removed = {p.name for p in first}
        arguments._static = frozenset(without_self(self._static - removed))
        arguments._donated = frozenset(without_self(self._donated - removed))
        arguments._frozen = frozenset(without_self(self._frozen - removed))
        arguments._batch = without_self(self._batch)
        arguments._state = without_self(self._state)
        # Slots count without self now, so that what is known of calls does not hold.
        arguments._found = {}
        return arguments

    def rearranged(self, signature: Signature) -> RearrangedFunction:
        """Returns the function, called in the order of :class:`Call`."""
        return RearrangedFunction(self.function, self.name, signature)

    def _objects(self, given: dict[Slot, PyTree], free: list[Slot]) -> list[Slot]:
        """Returns the arguments that are the state."""
        if objects := [slot for slot in free if is_nnx(given[slot])]:
            return objects
        if self._state:
            slots = self._named(self._state, given)
            if missing := [slot for slot in slots if slot not in free]:
                raise TypeError(
                    f"{self.name}: state_argnums names {self._text(missing)}, which this call does "
                    "not have, or which is static."
                )
            return slots
        states = [slot for slot in free if is_train_state(given[slot])]
        if len(states) == 1 or not self._returns_state:
            return states[:1] or free[:1]
        batch = self._named(self._batch, given)
        return find_state(self.function, self.name, given, free, batch, self._text)

    def _slots_of_batch(
        self, given: dict[Slot, PyTree], left: list[Slot], objects: list[PyTree]
    ) -> list[Slot]:
        """Returns the arguments that are the batch; none for a step of which all other arguments
        are random keys and numbers."""
        if not self._batch:
            # An argument with the form of the state, such as a target network, is read; where
            # nothing else has rows, it is data.
            others = [slot for slot in left if not is_part(given[slot], objects)]
            left = others if self._state else [*others, *(x for x in left if x not in others)]
            rows = [slot for slot in left if may_be_batch(given[slot]) and not is_key(given[slot])]
            if self._returns_state:  # a container without rows is refused as an empty batch
                left = [x for x in left if not (is_key(given[x]) or _is_number(given[x]))]
            return rows[:1] or left[:1]
        slots = self._named(self._batch, given)
        if missing := [slot for slot in slots if slot not in left]:
            option = "batch_argnames" if isinstance(self._batch[-1], str) else "batch_argnums"
            raise TypeError(
                f"{self.name}: {option} names {self._text(missing)}, which this call does not "
                "have, or which is part of the state."
            )
        return slots

    def _named(self, slots: Sequence[Slot], given: Mapping[Slot, PyTree]) -> list[Slot]:
        """Returns the slots of a call for these slots of the signature."""
        same: dict[Slot, Slot] = {n: name for n, name in enumerate(self._positional())}
        same.update({name: n for n, name in same.items()})
        return [slot if slot in given else same.get(slot, slot) for slot in slots]

    def _further(self, slot: Slot, value: PyTree) -> PyTree:
        """Returns an argument beside the state and the batch in the form of :data:`Further`."""
        if slot in self._static:
            name, remedy = f"the static argument {self._text([slot])}", "do not make it static"
            return self._constant(name, value, remedy)

        def traced(path: jax.tree_util.KeyPath, x: PyTree) -> PyTree:
            if is_array(x):
                return x
            name = f"the argument {self._text([slot])}{jax.tree_util.keystr(path)}"
            return self._constant(name, x, "bind it with functools.partial")

        if not all(map(is_array, jax.tree.leaves(value))):
            value = jax.tree_util.tree_map_with_path(traced, value)
        return Frozen(value) if slot in self._frozen else value

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
        """Sorts keywords in the order of the function's parameters, unknown ones last."""
        known: list[Slot] = [slot for slot in given if isinstance(slot, int)]
        known += [p.name for p in self._parameters if p.name in given]
        return {slot: given[slot] for slot in known} | given

    def _positional(self) -> list[str]:
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        return [p.name for p in self._parameters if p.kind in kinds]

    def _has(self, kind: object) -> bool:
        return not self._parameters or any(p.kind is kind for p in self._parameters)

    def _slots(self, option: str, given: Slots) -> tuple[Slot, ...]:
        """Converts the arguments that an option names: positions, counted from 0, and names."""
        if given is None:
            return ()
        several = given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
        return tuple(self._slot(option, slot) for slot in several)

    def _slot(self, option: str, given: Slot) -> Slot:
        names, positional = [p.name for p in self._parameters], self._positional()
        if isinstance(given, str):
            if given in names or self._has(inspect.Parameter.VAR_KEYWORD):
                return given
            taken = ", ".join(names)
            raise ValueError(f"{option}_argnames has {given!r}, but {self.name} takes {taken}.")
        try:
            position = operator.index(given)
        except TypeError:
            raise TypeError(
                f"{option}_argnums: expected positions or names, got {given!r}."
            ) from None
        n = len(positional)
        beyond = position >= n and self._has(inspect.Parameter.VAR_POSITIONAL)
        if not beyond and not -n <= position < n:
            raise ValueError(
                f"{option}_argnums has {position}, but {self.name} takes {n} positional arguments: "
                f"{', '.join(positional)}."
            )
        return position + n if position < 0 else position

    def _both(self, slots: Collection[Slot]) -> frozenset[Slot]:
        """Returns the slots by position and by name, as far as the signature shows both."""
        names = self._positional()
        by_name = {names[s] for s in slots if isinstance(s, int) and s < len(names)}
        by_position = {names.index(str(s)) for s in slots if s in names}
        return frozenset({*slots, *by_name, *by_position})

    def _text(self, slots: Sequence[Slot]) -> str:
        names = self._positional()
        return ", ".join(
            f"{slot} ({names[slot]})" if isinstance(slot, int) and slot < len(names) else f"{slot}"
            for slot in slots
        )


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
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(f"batch_axis: expected an int, got {axis!r}.")
    if axis < 0:
        raise ValueError(
            f"batch_axis={axis} is negative. Count from the first dimension: 0 for [rows, ...], 1 "
            "for [steps, rows, ...]."
        )
    return operator.index(axis)
