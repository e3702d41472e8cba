"""The shape of a config against the table of keys: values of the right kind, and unknown keys."""

from typing import Any, NamedTuple

from zerojax.config.errors import ConfigError, closest, hint, problems_of, shown, spelled
from zerojax.config.keys import KEYS, NULLABLE, sections
from zerojax.config.keys.named_types import NAMED_TYPES


class CheckedKeys(NamedTuple):
    """What `check_keys` says of a config.

    Attributes:
      values: The right values by dotted path, each converted by its `ValueKind`.
      problems: One sentence for each wrong value, then for each unknown key.
    """

    values: dict[str, Any]
    problems: list[str]


def check_keys(raw: dict[str, Any]) -> CheckedKeys:
    """Checks every key of a config, in one pass.

    Args:
      raw: The config, in plain dicts with string keys, free of "auto".

    Example:
      >>> check_keys({"bf16": {"enabled": True}, "zero_optimization": {"stage": 4}})
      CheckedKeys(values={'bf16.enabled': True}, \
problems=['zero_optimization.stage: expected 0, 1, 2 or 3, got 4'])
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    unknown: dict[str, tuple[str, str]] = {}

    def visit(section: str, given: dict[str, Any]) -> None:
        names = sections()[section]
        for name in (name for name in names if name in given):
            path, value = f"{section}.{name}" if section else name, given[name]
            if path in KEYS:
                try:
                    values[path] = KEYS[path].kind.check(value)
                except ConfigError as error:
                    problems.append(f"{path}: {error}")
            elif isinstance(value, dict):
                visit(path, value)
            elif value is not None or path not in NULLABLE:
                problems.append(f"{path}: expected an object, got {shown(value)}")
        for name in given:
            if name not in names:
                unknown[_dotted(section, name)] = section, name

    visit("", raw)
    return CheckedKeys(
        values, problems + problems_of(list(unknown), lambda path: _unknown_key(*unknown[path]))
    )


def _dotted(section: str, name: str) -> str:
    """The path of a key in a message; `section` "" is the top."""
    return f"{section}.{spelled(name)}" if section else spelled(name)


def _unknown_key(section: str, name: str) -> str:
    """The problem of an unknown key: the closest known one, or the place where it belongs."""
    path = _dotted(section, name)
    if not name.strip():
        return f"{path}: a key without a name; take it out, or give it its name"
    if name == "max_grad_norm":
        return f"{path}: unknown key; use `gradient_clipping` at the top level"
    full = f"{section}.{name}" if section else name
    if full in KEYS or full in sections():
        outer, _, inner = name.partition(".")
        return f'{path}: sections are objects; write {{"{outer}": {{"{inner}": ...}}}}'
    siblings = sections()[section]
    elsewhere = [p for p in [*KEYS, *sections()] if p.rpartition(".")[2] == name]
    elsewhere += [
        f"{outer}.params.{name}"
        for outer, types in NAMED_TYPES.items()
        if any(name in named.params for named in types.values())
    ]
    if elsewhere and len(elsewhere) <= 3:
        return f"{path}: unknown key here; it belongs at `{'` or `'.join(elsewhere)}`"
    here = f" (known here: {', '.join(siblings)})" if len(siblings) <= 8 else ""
    return f"{path}: unknown key; {hint(name, _guess(section, name), f'take it out{here}')}"


def _guess(section: str, name: str) -> str | None:
    """The closest path, of the same section or else of any."""
    if guess := closest(name, sections()[section]):
        return f"{section}.{guess}" if section else guess
    leaves = {path.rpartition(".")[2]: path for path in reversed(list(KEYS))}
    return leaves.get(closest(name, leaves) or "")
