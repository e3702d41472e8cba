"""The destinations of metrics: the sections `tensorboard`, `csv_monitor` and `wandb`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zerojax.config.errors import ConfigError, problems_of, shown, spelled, suggestion
from zerojax.config.keys.value_kinds import FLAG, TEXT, TEXT_OR_NULL


class _Texts:
    """A dataclass of strings, of which those with the default None may be None."""

    def __post_init__(self) -> None:
        problems = []
        for item in fields(self):  # type: ignore[arg-type]
            kind = TEXT_OR_NULL[0] if item.default is None else TEXT
            try:
                kind.check(getattr(self, item.name))
            except ConfigError as error:
                problems.append(f"{item.name}: {error}")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True)
class MonitorConfig(_Texts):
    """Files of metrics: `tensorboard` or `csv_monitor`, on where it is given.

    Attributes:
      output_path: The folder; "" is DeepSpeed's own choice.
      job_name: A folder within it.

    Example:
      >>> MonitorConfig(output_path="logs")
      MonitorConfig(output_path='logs', job_name='DeepSpeedJobName')
    """

    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass(frozen=True, kw_only=True)
class WandbConfig(_Texts):
    """A run on wandb: `wandb`, on where it is given.

    Attributes:
      group: The name that runs of one group share.
      team: wandb's entity; None is the user's own.
      project: The project's name.
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
      section: A name in `MONITORS`.
      given: The config, a mapping of its fields, or None. With `enabled` false in the mapping
        the section is off.

    Raises:
      ConfigError: An unknown name or a wrong value, with the section before it.

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
    problems = problems_of(
        unknown, lambda name: f"{section}.{spelled(name)}: unknown key; {suggestion(name, known)}"
    )
    enabled, config = False, None
    try:
        enabled = FLAG.check(given.get("enabled", True))
    except ConfigError as error:
        problems.append(f"{section}.enabled: {error}")
    try:
        config = cls(**{name: given[name] for name in known if name in given})
    except ConfigError as error:
        problems += [f"{section}.{problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return config if enabled else None
