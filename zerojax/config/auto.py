"""Resolution of each "auto" in a config: to the caller's value, to the default, or to a problem.

`stand_in` runs first, with the caller's values; `resolve_autos` resolves each "auto" that is left,
except those among `params`, which `zerojax.config.named.check_params` resolves.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zerojax.config.errors import as_text, closest, hint
from zerojax.config.keys import KEYS, renamed
from zerojax.config.named import or_pass
from zerojax.config.notes import Note
from zerojax.config.row import ZERO
from zerojax.config.sections import OFFLOAD
from zerojax.config.settings import FIT

_SEARCHED = tuple(f"{ZERO}.{section}" for section in OFFLOAD)


class StandIns(NamedTuple):
    """The keys that `stand_in` replaced, and one problem for each other key of `auto`."""

    replaced: set[str]
    problems: list[str]


def stand_in(raw: dict[str, object], auto: Mapping[str, object]) -> StandIns:
    """Replaces each "auto" in the config by the value that `auto` has for its key.

    Args:
      raw: The config, in plain dicts; changed in place.
      auto: Values by dotted key, which only the program knows, such as the number of steps.

    Example:
      >>> raw = {"fp16": {"loss_scale": "auto"}}
      >>> stand_in(raw, {"fp16.loss_scale": 128})
      StandIns(replaced={'fp16.loss_scale'}, problems=[])
      >>> raw
      {'fp16': {'loss_scale': 128}}
    """
    if not isinstance(auto, Mapping):
        wanted = "expected a mapping of dotted keys to values"
        return StandIns(set(), [f"auto: {wanted}, got {as_text(auto)}"])
    autos = dict(_autos(raw, ""))
    replaced: set[str] = set()
    problems = []
    listed = ", ".join([*autos][:20]) + ", ..." * (len(autos) > 20)
    fallback = f'"auto" stands at: {listed}' if autos else 'nothing in it is "auto"'
    for key, value in auto.items():
        path = renamed(key) if isinstance(key, str) else ""
        if path in autos:
            autos[path][path.rpartition(".")[2]] = value
            replaced.add(path)
        else:
            likely = hint(closest(path, autos), fallback)
            problems.append(f'auto: {as_text(key)} is not "auto" in the config; {likely}')
    return StandIns(replaced, problems)


def _autos(raw: dict[str, object], section: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields each path whose value is "auto", with the dict that contains the value."""
    for name, value in raw.items():
        if "." in name:  # an unknown key, even if its path looks like a known one
            continue
        if isinstance(value, dict):
            yield from _autos(value, f"{section}{name}.")
        elif isinstance(value, str) and value == "auto":
            yield f"{section}{name}", raw


class AutoResolution(NamedTuple):
    """A note for each "auto" that became the default, and a problem for each other "auto"."""

    notes: list[Note]
    problems: list[str]


def resolve_autos(raw: dict[str, object]) -> AutoResolution:
    """Removes each "auto" from a config, except among `params`, so that the defaults apply.

    Args:
      raw: The config, in plain dicts; changed in place.

    Example:
      >>> raw = {"gradient_clipping": "auto"}
      >>> resolve_autos(raw).notes[0].holds, raw
      (1.0, {})
    """
    resolved = AutoResolution([], [])
    for path, section in list(_autos(raw, "")):
        key = KEYS.get(path)
        if path in _SEARCHED:
            resolved.problems.append(
                f'{path}: "auto" takes a search with the model: {FIT}; or write the object, '
                "or take it out"
            )
        elif key is None:  # among `params`, or unknown
            continue
        elif key.auto is None:
            remedy = "write the value" if key.default is None else f"write {as_text(key.default)}"
            fit = f", or let {FIT} choose" * (path == f"{ZERO}.stage")
            resolved.problems.append(
                f'{path}: "auto" has nothing to resolve it; {remedy}{fit}, {or_pass(path)}'
            )
        else:
            holds = None if key.treatment in ("left to XLA", "no effect") else key.default
            resolved.notes.append(Note(path, "auto", "resolved", key.resolution, holds))
        del section[path.rpartition(".")[2]]
    return resolved
