"""Resolution of each "auto" in a config: to the caller's value, to the default, or to a problem.

`stand_in` runs first, with the caller's values; `resolve_autos` resolves each "auto" that is left.
"""

from collections.abc import Mapping

from zerojax.config.errors import as_text, closest, hint
from zerojax.config.files import leaves
from zerojax.config.keys import renamed
from zerojax.config.row import REQUIRED, ZERO, Key, Note
from zerojax.config.sections import NULLABLE
from zerojax.config.settings import FIT


def stand_in(raw: dict[str, object], auto: Mapping[str, object]) -> tuple[set[str], list[str]]:
    """Replaces each "auto" in the config by the value that `auto` has for its key; returns the keys
    that were replaced, and one problem for each other key of `auto`.

    Args:
      raw: The config, in plain dicts; changed in place.
      auto: Values by dotted key, which only the program knows, such as the number of steps.

    Example:
      >>> raw = {"fp16": {"loss_scale": "auto"}}
      >>> stand_in(raw, {"fp16.loss_scale": 128})
      ({'fp16.loss_scale'}, [])
      >>> raw
      {'fp16': {'loss_scale': 128}}
    """
    if not isinstance(auto, Mapping):
        wanted = "expected a mapping of dotted keys to values"
        return set(), [f"auto: {wanted}, got {as_text(auto)}"]
    autos = _autos(raw)
    replaced: set[str] = set()
    problems = []
    listed = ", ".join([*autos][:20]) + ", ..." * (len(autos) > 20)
    fallback = f'"auto" is at: {listed}' if autos else 'nothing in it is "auto"'
    for key, value in auto.items():
        path = renamed(key) if isinstance(key, str) else ""
        if path in autos:
            autos[path][path.rpartition(".")[2]] = value
            replaced.add(path)
        else:
            likely = hint(closest(path, autos), fallback)
            problems.append(f'auto: {as_text(key)} is not "auto" in the config; {likely}')
    return replaced, problems


def _autos(raw: dict[str, object]) -> dict[str, dict[str, object]]:
    """Returns the section of each path whose value is "auto"."""
    each = leaves(raw)
    return {path: section for path, section in each if section[path.rpartition(".")[2]] == "auto"}


def resolve_autos(raw: dict[str, object], keys: Mapping[str, Key]) -> tuple[list[Note], list[str]]:
    """Removes each "auto" from a config, so that the defaults apply; returns a note for each of
    them, and a problem for each "auto" without a default.

    Args:
      raw: The config, in plain dicts; changed in place.
      keys: The known keys, by dotted path.

    Example:
      >>> from zerojax.config.keys import KEYS
      >>> raw = {"gradient_clipping": "auto"}
      >>> resolve_autos(raw, KEYS)[0][0].holds, raw
      (1.0, {})
    """
    notes: list[Note] = []
    problems: list[str] = []
    for path, section in _autos(raw).items():
        key, name = keys.get(path), path.rpartition(".")[2]
        or_pass = f'or pass it: auto={{"{path}": ...}}'
        if path in NULLABLE:
            problems.append(
                f'{path}: "auto" takes a search with the model: {FIT}; or write the object, '
                "or remove it"
            )
        elif key is None:  # unknown
            continue
        elif key.default is REQUIRED:
            problems.append(f'{path}: "auto" cannot be resolved: {key.why}, {or_pass}')
        elif key.auto is None:
            fit = f", or let {FIT} choose" * (path == f"{ZERO}.stage")
            problems.append(
                f'{path}: "auto" cannot be resolved; write {as_text(key.default)}{fit}, {or_pass}'
            )
        elif key.auto and key.kind.nullable:
            notes.append(Note(path, "auto", "resolved", key.resolution))
            section[name] = None
            continue
        else:
            holds = None if key.treatment in ("left to XLA", "no effect") else key.default
            notes.append(Note(path, "auto", "resolved", key.resolution, holds))
        del section[name]
    return notes, problems
