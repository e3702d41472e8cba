"""Where metrics are written, as the sections `tensorboard`, `csv_monitor` and `wandb` say it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zerojax.config.errors import ConfigError, shown
from zerojax.config.kinds import FLAG, TEXT, optional
from zerojax.config.unknown import closest, hint, judged, spelled


class _Texts:
    """A dataclass of strings, of which those with the default None may be None."""

    def __post_init__(self) -> None:
        problems = []
        for item in fields(self):  # type: ignore[arg-type]
            kind = optional(TEXT) if item.default is None else TEXT
            if not kind.accepts(value := getattr(self, item.name)):
                problems.append(f"{item.name}: expected {kind.says}, got {shown(value)}")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True)
class MonitorConfig(_Texts):
    """Files of metrics: `tensorboard` or `csv_monitor`, switched on by being there.

    Attributes:
      output_path: the folder; "" is DeepSpeed's own choice.
      job_name: a folder of this name within it.

    Example:
      >>> MonitorConfig(output_path="logs")
      MonitorConfig(output_path='logs', job_name='DeepSpeedJobName')
    """

    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass(frozen=True, kw_only=True)
class WandbConfig(_Texts):
    """A run on wandb: `wandb`, switched on by being there.

    Attributes:
      group: runs that belong together.
      team: wandb's entity; None is the user's own.
      project: the project's name.
    """

    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


MONITORS: dict[str, type[MonitorConfig] | type[WandbConfig]] = {
    "tensorboard": MonitorConfig,
    "csv_monitor": MonitorConfig,
    "wandb": WandbConfig,
}
"""The class of each section."""


def monitor(section: str, given: Any) -> MonitorConfig | WandbConfig | None:
    """The config of one section from keywords.

    Args:
      section: a name in `MONITORS`.
      given: the config, a mapping of its fields, or None. With `enabled` false in the mapping
        the section is off.

    Raises:
      ConfigError: an unknown name or a wrong value, with the section before it.

    Example:
      >>> monitor("wandb", {"team": "llm"})
      WandbConfig(group=None, team='llm', project='deepspeed')
      >>> monitor("wandb", {"enabled": False}) is None
      True
    """
    cls = MONITORS[section]
    if given is None or isinstance(given, cls):
        return given
    if not isinstance(given, Mapping):
        wanted = f"{cls.__name__}, a mapping of its fields, or None"
        raise ConfigError(f"{section}: expected {wanted}, got {shown(given)}")
    known = [item.name for item in fields(cls)]
    unknown = [str(name) for name in given if name not in (*known, "enabled")]
    problems = judged(unknown, lambda name: _unknown(section, name, known))
    if not FLAG.accepts(enabled := given.get("enabled", True)):
        problems.append(f"{section}.enabled: expected {FLAG.says}, got {shown(enabled)}")
    made = None
    try:
        made = cls(**{name: given[name] for name in known if name in given})
    except ConfigError as error:
        problems += [f"{section}.{problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return made if FLAG.check(enabled) else None


def _unknown(section: str, name: str, known: list[str]) -> str:
    likely = hint(name, closest(name, known), f"known: {', '.join(known)}")
    return f"{section}.{spelled(name)}: unknown key; {likely}"
