"""Values that stand in for "auto": what only the program knows, such as the number of steps."""

from collections.abc import Mapping
from typing import Any

from zerojax.config.errors import shown
from zerojax.config.old_names import renamed
from zerojax.config.unknown import closest, hint, judged


def stand_in(raw: dict[str, Any], auto: Mapping[str, Any]) -> tuple[set[str], list[str]]:
    """Puts each value of `auto` where the config says "auto".

    Args:
      raw: the config, in plain dicts; changed in place.
      auto: by dotted key.

    Returns:
      The keys that were replaced, and what is wrong with the others.

    Example:
      >>> raw = {"fp16": {"loss_scale": "auto"}}
      >>> stand_in(raw, {"fp16.loss_scale": 128})
      ({'fp16.loss_scale'}, [])
      >>> raw
      {'fp16': {'loss_scale': 128}}
    """
    if not isinstance(auto, Mapping):
        return set(), [f"auto: expected a mapping of dotted keys to values, got {shown(auto)}"]
    autos = dict(_autos(raw, ""))
    replaced: set[str] = set()
    others: dict[str, Any] = {}
    for key, value in auto.items():
        path = renamed(key) if isinstance(key, str) else ""
        if path in autos:
            autos[path][path.rpartition(".")[2]] = value
            replaced.add(path)
        else:
            others[shown(key)] = path
    listed = ", ".join([*autos][:20]) + ", ..." * (len(autos) > 20)
    there = f'"auto" stands at: {listed}' if autos else 'nothing in it is "auto"'

    def judge(key: str) -> str:
        likely = hint(others[key], closest(others[key], autos), there)
        return f'auto: {key} is not "auto" in the config; {likely}'

    return replaced, judged([*others], judge)


def _autos(raw: dict[str, Any], section: str) -> list[tuple[str, dict[str, Any]]]:
    """Each path whose value is "auto", and the dict that it stands in."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name, value in raw.items():
        if isinstance(value, dict):
            found += _autos(value, f"{section}{name}.")
        elif isinstance(value, str) and value == "auto" and "." not in name:
            found.append((f"{section}{name}", raw))
    return found
