"""Types that annotations share: pytrees, and jaxprs with their contents.

``jax.extend.core`` exports the classes of jaxprs, but types the abstract value of a variable as one
without shape and dtype. The protocols here declare what all values of zerojax's programs have, as
they are arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set
from types import CodeType
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
from jax.extend import core
from jax.extend.source_info_util import SourceInfo

PyTree: TypeAlias = Any
"""A pytree of any structure: the state, its parameters, a batch. Its type is known to the user."""

Value: TypeAlias = Any
"""A parameter of an equation, a literal, or an array that a program closes over."""

MaybeNone: TypeAlias = Any
"""None, in a result that is not None for most callers: ``X | MaybeNone`` asks for no check."""


class Shaped(Protocol):
    """An array, or a description of one: a ``jax.ShapeDtypeStruct``, an abstract value."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


class Aval(Shaped, Protocol):
    """The abstract value of an array."""

    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...


class Atom(Protocol):
    """A variable or a literal of a jaxpr."""

    @property
    def aval(self) -> Aval: ...


class Context(Protocol):
    """The context in which an equation was traced: its mesh, compute type and metadata."""

    @property
    def manager(self) -> contextlib.AbstractContextManager[object]: ...


class Traceback(Protocol):
    """The frames in which an equation was traced, the innermost first."""

    def raw_frames(self) -> tuple[Sequence[CodeType], Sequence[int]]: ...


class Equation(Protocol):
    """An equation of a jaxpr."""

    @property
    def primitive(self) -> core.Primitive: ...
    @property
    def invars(self) -> Sequence[Atom]: ...
    @property
    def outvars(self) -> Sequence[Atom]: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def effects(self) -> Set[object]: ...
    @property
    def ctx(self) -> Context: ...
    @property
    def source_info(self) -> SourceInfo: ...
    @property
    def replace(self) -> Callable[..., Self]: ...


class HasEquations(Protocol):
    """A program of equations, with its arguments and results."""

    @property
    def constvars(self) -> Sequence[Atom]: ...
    @property
    def invars(self) -> Sequence[Atom]: ...
    @property
    def outvars(self) -> Sequence[Atom]: ...
    @property
    def eqns(self) -> Sequence[Equation]: ...


class Jaxpr(HasEquations, Protocol):
    """An open jaxpr."""

    @property
    def effects(self) -> Set[object]: ...
    @property
    def replace(self) -> Callable[..., Self]: ...


class AnyJaxpr(Protocol):
    """A jaxpr, open or closed."""

    @property
    def eqns(self) -> Sequence[object]: ...
