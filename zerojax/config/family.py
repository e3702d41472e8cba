"""What an optimizer or a schedule of the JSON is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerojax.config.kinds import Kind

REQUIRED = object()
"""The default of a parameter that has none."""


@dataclass(frozen=True)
class Param:
    """A parameter of an optimizer or a schedule.

    Attributes:
      kind: what the value may be.
      default: DeepSpeed's, or `REQUIRED`.
      only: the values that are supported, where not all of the kind are.
      why: why the others are not, with the remedy; for `REQUIRED`, why "auto" cannot be resolved.
      loud: its default is reported when a JSON omits it.
      auto: what null stands for, where "auto" means null; elsewhere "auto" is the default.
    """

    kind: Kind
    default: Any
    only: tuple[Any, ...] = ()
    why: str = ""
    loud: bool = False
    auto: str = ""


@dataclass(frozen=True)
class Family:
    """One optimizer or schedule: its parameters, or the reason it is refused."""

    params: Mapping[str, Param] = field(default_factory=dict)
    refused: str = ""
