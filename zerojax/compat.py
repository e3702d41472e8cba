"""Where jax 0.10 and 0.11 differ, and nowhere else."""

from __future__ import annotations

from typing import Any


def open_jaxpr(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jaxpr and its constants: 0.10 knows closed and open ones, 0.11 has one class."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants and carried values a scan equation has."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))
