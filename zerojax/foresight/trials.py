"""One step on some devices, forecast under different settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

from zerojax.devices.rates import Rates
from zerojax.foresight.attribution import ACTIVATIONS
from zerojax.foresight.choice import Choice
from zerojax.foresight.costs import Measure, forecast, measure
from zerojax.foresight.forecast import Forecast, ProgramCost
from zerojax.plan.plan import Plan
from zerojax.xla.lowered import LoweredProgram


class BuiltStep(NamedTuple):
    """A step under one choice, not compiled yet.

    Attributes:
      plan: of its state.
      programs: as ``train_step.programs`` yields them; traced only when they are asked for.
      tokens: in a batch of all devices.
    """

    plan: Plan
    programs: Callable[[], Iterable[LoweredProgram]]
    tokens: int


@dataclasses.dataclass(frozen=True)
class Trial:
    """A choice that fits, and what it costs."""

    choice: Choice
    forecast: Forecast


class Trials:
    """The forecasts of a step, each compiled once.

    Args:
      build: the step under a choice.
      given: the choice that is asked about.
      rates: of the devices.
      note: told what is being compiled.
      measured: what compiles and measures a program, as :func:`zerojax.foresight.costs.measure`.
    """

    def __init__(
        self,
        build: Callable[[Choice], BuiltStep],
        given: Choice,
        rates: Rates,
        note: Callable[[str], None] = lambda text: None,
        measured: Measure = measure,
    ) -> None:
        self.given, self.rates = given, rates
        self._build, self._note, self._measured = build, note, measured
        self._known: dict[Choice, Forecast] = {}
        self._steps: dict[Choice, BuiltStep] = {}
        self._failed: Exception | None = None

    def _built(self, choice: Choice) -> BuiltStep:
        """The step under a choice, traced no further than its state, once."""
        if choice not in self._steps:
            self._steps[choice] = self._build(choice)
        return self._steps[choice]

    def forecast(self, choice: Choice) -> Forecast:
        """What a choice costs; where a program does not fit, those after it are left out."""
        if choice not in self._known:
            built = self._built(choice)
            self._known[choice] = forecast(
                built.programs(),
                built.plan,
                self.rates,
                tokens=built.tokens,
                note=lambda name: self._note(f"{choice}: {name}"),
                enough=self._too_much,
                measured=self._measured,
            )
        return self._known[choice]

    def tried(self, choice: Choice) -> Forecast | None:
        """The same, or None where that fails: XLA's own limits, or a step that does not take
        such settings."""
        try:
            return self.forecast(choice)
        except Exception as error:
            self._failed = error
            self._note(f"{choice}: {type(error).__name__}: {error}")
            return None

    @property
    def failed(self) -> Exception | None:
        """The last choice's error, where no choice could be forecast."""
        return None if self._known else self._failed

    def hopeless(self, choice: Choice) -> bool:
        """Whether a choice cannot fit, by :meth:`least`, or is none for this step."""
        try:
            return self.least(choice) > self.rates.room
        except Exception as error:
            self._failed = error
            return True

    def least(self, choice: Choice) -> int:
        """Bytes that a choice takes at the least, without compiling it.

        The state at rest, and the activations of what was compiled with as many rows in a
        micro-batch, or fewer, and as much or more remat.
        """
        activations = (
            each.peak.memory.get(ACTIVATIONS, 0)
            for known, each in self._known.items()
            if known.micro <= choice.micro and bool(known.remat) >= bool(choice.remat)
        )
        return self._built(choice).plan.bytes_per_device + max(activations, default=0)

    def _too_much(self, cost: ProgramCost) -> bool:
        return cost.bytes > self.rates.room
