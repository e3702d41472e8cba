"""Rewrites jaxprs and the jaxprs in their equations."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

from zerojax.xla import jaxprs
from zerojax.xla.types import Equation, Jaxpr


class Rewriter(abc.ABC):
    """Rewrites jaxprs, open or closed. A jaxpr that several equations share stays shared."""

    def __init__(self) -> None:
        # By identity; holds both, as ids are reused.
        self._known: dict[int, tuple[Any, Any]] = {}

    @abc.abstractmethod
    def body(self, jaxpr: Jaxpr) -> Jaxpr:
        """Rewrites an open jaxpr; returns the jaxpr itself if nothing changes."""

    def __call__(self, jaxpr: Any) -> Any:
        """Rewrites a jaxpr, and keeps its constants."""
        if id(jaxpr) not in self._known:
            body, _ = jaxprs.open_jaxpr(jaxpr)
            new = self.body(body)
            self._known[id(jaxpr)] = jaxpr, jaxpr if new is body else jaxprs.with_body(jaxpr, new)
        return self._known[id(jaxpr)][1]

    def inside(self, eqn: Equation, names: Iterable[str]) -> Equation:
        """Rewrites the jaxprs in these parameters of an equation."""
        params = {name: self._value(jaxprs.param(eqn, name)) for name in names}
        is_new = any(new is not eqn.params[name] for name, new in params.items())
        return eqn.replace(params=eqn.params | params) if is_new else eqn

    def _value(self, value: object) -> object:
        if isinstance(value, tuple):
            new = tuple(map(self._value, value))
            is_new = any(a is not b for a, b in zip(new, value, strict=True))
            return new if is_new else value
        return self(value) if jaxprs.is_jaxpr(value) else value
