"""Checks of model configs, with the name of the field in the error."""

from typing import Any


def positive_sizes(config: Any, *names: str) -> None:
    """Rejects a config if a named field is not a positive int."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{type(config).__name__}.{name} must be a positive int, not {value!r}"
            )


def dropout_rates(config: Any, *names: str) -> None:
    """Rejects a config if a named field is not a dropout rate in [0, 1)."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"{type(config).__name__}.{name} must be in [0, 1), not {value!r}")


def even_heads(config: Any, width: str, heads: str) -> None:
    """Rejects a config if its width is not a multiple of its number of heads."""
    if getattr(config, width) % getattr(config, heads):
        raise ValueError(
            f"{type(config).__name__}.{width} = {getattr(config, width)} does not divide into "
            f"{heads} = {getattr(config, heads)}: choose a multiple"
        )


def one_of(config: Any, name: str, *known: Any) -> None:
    """Rejects a config if the named field is not a known value."""
    if getattr(config, name) not in known:
        raise ValueError(
            f"{type(config).__name__}.{name} must be {' or '.join(map(repr, known))}, not "
            f"{getattr(config, name)!r}"
        )
