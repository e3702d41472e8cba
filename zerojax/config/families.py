"""Optimizers and schedules by name: which there are, and whether their parameters will do."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from zerojax.config.errors import shown
from zerojax.config.family import REQUIRED as REQUIRED
from zerojax.config.family import Family as Family
from zerojax.config.family import Param as Param
from zerojax.config.optimizers import OPTIMIZERS as OPTIMIZERS
from zerojax.config.schedulers import SCHEDULERS as SCHEDULERS
from zerojax.config.unknown import closest, foreign, hint, judged, spelled

FAMILIES = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}


def known_types(section: str) -> str:
    """The names that are supported, for a message."""
    return ", ".join(name for name, family in FAMILIES[section].items() if not family.refused)


def resolve_type(section: str, given: str) -> tuple[str | None, list[str]]:
    """The name as the table has it, in any case, and what is wrong with it."""
    families = FAMILIES[section]
    name = {known.lower(): known for known in families}.get(given.lower())
    if name is None:
        guess = closest(given, families)
        likely = f"did you mean {shown(guess)}?" if guess else f"known: {known_types(section)}"
        strange = f" ({foreign(given)})" if foreign(given) else ""
        return None, [f"{section}.type: unknown {section} {shown(given)}; {likely}{strange}"]
    if families[name].refused:
        return None, [f"{section}.type = {shown(name)} is not supported: {families[name].refused}"]
    return name, []


class Checked(NamedTuple):
    """What `check_params` found.

    Attributes:
      values: the parameters given, as their kinds; a list has become a tuple.
      autos: the names given as "auto", which their defaults (or null) resolve.
      problems: one sentence for each that is wrong.
    """

    values: dict[str, Any]
    autos: list[str]
    problems: list[str]


def check_params(
    section: str, name: str, given: Mapping[str, Any], *, json: bool = False
) -> Checked:
    """Judges the parameters of an optimizer or a schedule.

    Args:
      section: "optimizer" or "scheduler".
      name: as `resolve_type` gives it.
      given: the parameters.
      json: resolve "auto", and judge the defaults of those left out, which hold in a JSON.
    """
    table = FAMILIES[section][name].params
    unknown = [str(key) for key in given if key not in table]
    problems = judged(unknown, lambda key: _unknown(section, key, name, table))
    found = Checked({}, [], problems)
    for key, value in given.items():
        path = f"{section}.params.{key}"
        if key not in table:
            continue
        if json and value == "auto":
            if table[key].default is REQUIRED:
                found.problems.append(f'{path}: "auto" cannot be resolved: {table[key].why}')
            else:
                found.autos.append(key)
                if table[key].auto:
                    found.values[key] = None
        elif not table[key].kind.accepts(value):
            found.problems.append(f"{path}: expected {table[key].kind.says}, got {shown(value)}")
        else:
            found.values[key] = table[key].kind.check(value)
    for key, param in table.items():
        path = f"{section}.params.{key}"
        if key not in given and param.default is REQUIRED:
            problem = f"{path}: {name} needs it, as {param.kind.says}"
        elif key in found.values and param.only and found.values[key] not in param.only:
            problem = f"{path} = {shown(found.values[key])} is not supported: {param.why}"
        elif json and key not in found.values and param.only and param.default not in param.only:
            told = f"{shown(param.default)}, DeepSpeed's default,"
            problem = f"{path} = {told} is not supported: {param.why}"
        else:
            continue
        found.problems.append(problem)
    return found


def _unknown(section: str, key: str, name: str, table: Mapping[str, Param]) -> str:
    path = f"{section}.params.{spelled(key)}"
    if section == "optimizer" and key == "max_grad_norm":
        return f"{path}: not a parameter of the optimizer; use `gradient_clipping` at the top level"
    likely = hint(key, closest(key, table), "known: " + ", ".join(table))
    return f"{path}: unknown parameter of {name}; {likely}"
