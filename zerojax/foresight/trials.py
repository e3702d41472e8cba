"""Trials of one step under different settings, each compiled but not run."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from zerojax.devices.rates import Rates
from zerojax.foresight.attribution import ACTIVATIONS
from zerojax.foresight.choice import Choice
from zerojax.foresight.costs import Measure, forecast, measure
from zerojax.foresight.forecast import Forecast
from zerojax.plan.state_sharding import Plan
from zerojax.xla.lowered import LoweredProgram


class BuiltStep(NamedTuple):
    """A step under one choice, not compiled yet.

    Attributes:
      plan: The plan of its state.
      programs: Yields its programs, as ``train_step.programs`` does; they are traced on demand.
      tokens: Tokens in the global batch.
      names: Returns the names of values that rematerialised blocks compute again; traces the step.
    """

    plan: Plan
    programs: Callable[[], Iterable[LoweredProgram]]
    tokens: int
    names: Callable[[], Sequence[str]] = list


@dataclasses.dataclass(frozen=True)
class Trial:
    """A choice that was compiled, and its forecast."""

    choice: Choice
    forecast: Forecast

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.forecast.seconds

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second over all devices."""
        return self.forecast.tokens / self.seconds


class Trials:
    """The forecasts of a step under different choices, each compiled once.

    A search asks with :meth:`fitting`, within the limits that it sets with :meth:`limit`.

    Args:
      build: Returns the step under a choice.
      given: The choice that the user asks about.
      rates: The speeds and the memory of the devices.
      note: Called with messages, such as the choice and the program that is compiled next.
      measured: Measures a program, as :func:`zerojax.foresight.costs.measure` does.

    Attributes:
      asked: The choices that a search compiled.
      fitted: Those of them that fit, in the same order.
      compiles: The number of choices that a search may still compile.
    """

    given: Choice
    rates: Rates
    compiles: float

    def __init__(
        self,
        build: Callable[[Choice], BuiltStep],
        given: Choice,
        rates: Rates,
        note: Callable[[str], None] = lambda text: None,
        measured: Measure = measure,
    ) -> None:
        self.given, self.rates = given, rates
        # Of each choice only the state is traced, and only once.
        self._built = functools.cache(build)
        self._note, self._measured = note, measured
        self._known: dict[Choice, Forecast] = {}
        self._failed: Exception | None = None
        self.asked: list[Choice] = []
        self.fitted: dict[Choice, Trial] = {}
        self.limit(math.inf)

    def plan(self, choice: Choice) -> Plan:
        """Returns the plan of the state under a choice, without a compile."""
        return self._built(choice).plan

    def names(self, choice: Choice) -> Sequence[str]:
        """Returns the names of values that rematerialised blocks compute again under a choice."""
        return self._built(choice).names()

    def forecast(self, choice: Choice) -> Forecast:
        """Returns the forecast of a choice; programs after one that does not fit are skipped."""
        if choice not in self._known:
            built = self._built(choice)
            self._known[choice] = forecast(
                built.programs(),
                built.plan,
                self.rates,
                tokens=built.tokens,
                note=lambda name: self._note(f"{choice}: {name}"),
                enough=lambda cost: cost.bytes > self.rates.room,
                measured=self._measured,
            )
        return self._known[choice]

    def tried(self, choice: Choice) -> Forecast | None:
        """Returns the forecast of a choice; None if XLA's limits or the step raise an error."""
        try:
            return self.forecast(choice)
        except Exception as error:
            self._failed = error
            self._note(f"{choice}: {type(error).__name__}: {error}")
            return None

    def limit(self, compiles: float, seconds: float = math.inf) -> None:
        """Limits the choices that :meth:`fitting` may compile from now on, and its time."""
        self.compiles, self._until = compiles, time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """True if a search has reached its limits."""
        return self.compiles <= 0 or time.monotonic() >= self._until

    def fitting(self, choice: Choice) -> Forecast | None:
        """Returns a choice's forecast, or None if an estimate or a compile shows it does not fit.

        Raises:
          TimeoutError: The choice must be compiled, and the limits do not allow another compile.
        """
        if choice not in self.asked and not self.hopeless(choice):
            if self.over:
                raise TimeoutError
            forecast = self.tried(choice)
            self.compiles -= forecast is None or forecast.compile_seconds > 0
            self.asked.append(choice)
            if forecast and forecast.fits:
                self.fitted[choice] = Trial(choice, forecast)
        return self.fitted[choice].forecast if choice in self.fitted else None

    @property
    def failed(self) -> Exception | None:
        """The error of the last choice if no choice could be forecast, else None."""
        return None if self._known else self._failed

    def hopeless(self, choice: Choice) -> bool:
        """Returns whether a choice cannot fit, by :meth:`least`, or cannot be built."""
        try:
            return self.least(choice) > self.rates.room
        except Exception as error:
            self._failed = error
            return True

    def least(self, choice: Choice) -> int:
        """Returns a lower bound of the device memory of a choice, in bytes, without a compile.

        The bound is the state at rest, plus the most activations of any compiled choice of the same
        stage, offload and pipeline that has no more rows in a micro-batch and no less remat.
        Choices of other stages do not count, since an unsharded gradient there may have been taken
        for an activation by its shape.
        """
        mode = choice.stage, choice.offload, choice.pipeline
        activations = (
            each.peak.memory.get(ACTIVATIONS, 0)
            for known, each in self._known.items()
            if (known.stage, known.offload, known.pipeline) == mode
            and known.micro <= choice.micro
            and known.keeps_no_more(choice)
        )
        return self._built(choice).plan.bytes_per_device + max(activations, default=0)
