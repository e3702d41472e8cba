"""What the configs of models refuse, each with the field's name."""

from typing import Any


def positive_sizes(config: Any, *names: str) -> None:
    """Refuse a config whose named fields are no positive ints."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{type(config).__name__}.{name} must be a positive int, not {value!r}"
            )


def dropout_rates(config: Any, *names: str) -> None:
    """Refuse a config whose named fields are no rates of dropout."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"{type(config).__name__}.{name} must lie in [0, 1), not {value!r}")


def even_heads(config: Any, width: str, heads: str) -> None:
    """Refuse a config whose width does not divide into its heads."""
    if getattr(config, width) % getattr(config, heads):
        raise ValueError(
            f"{type(config).__name__}.{width} = {getattr(config, width)} does not divide into "
            f"{heads} = {getattr(config, heads)}: choose a multiple"
        )


def one_of(config: Any, name: str, *known: Any) -> None:
    """Refuse a config whose named field is another value."""
    if getattr(config, name) not in known:
        raise ValueError(
            f"{type(config).__name__}.{name} must be {' or '.join(map(repr, known))}, not "
            f"{getattr(config, name)!r}"
        )
