"""One model on some devices, forecast under different settings.

study = Study(function, config, mesh, rates("h100"), rows=64, seq=1024)
study.forecast(study.given).fits
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.api import Zero, zero
from zerojax.config import ZeroConfig
from zerojax.foresight.attribution import ACTIVATIONS
from zerojax.foresight.choice import Choice
from zerojax.foresight.costs import forecast
from zerojax.foresight.forecast import RESERVE, Cost, Forecast
from zerojax.foresight.models import bound, takes
from zerojax.foresight.rates import Rates
from zerojax.foresight.workload import Workload, workload
from zerojax.mesh import shard_axis


class Study:
    """A model's step on a mesh, compiled once for each choice.

    Args:
      function: gives a flax model or a workload, see :mod:`zerojax.foresight.models`.
      config: what the choices leave as it is.
      mesh: of devices that need not be there.
      rates: of those devices.
      rows: of a batch of all devices; None for what the config says, else one a device.
      seq: tokens in a row.
      remat: for functions that take it.
      note: told what is being compiled.

    Attributes:
      given: the config's own choice.

    Raises:
      ConfigError: the rows do not divide among the devices as the config wants.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        config: ZeroConfig,
        mesh: Mesh,
        rates: Rates,
        *,
        rows: int | None,
        seq: int,
        remat: bool | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config, self.mesh, self.rates, self.seq = config, mesh, rates, seq
        self.world = mesh.shape[shard_axis(mesh)]
        self.remats = takes(function, "remat")
        sizes = config.batch(self.world)
        rows = rows or sizes.train or (sizes.micro or 1) * sizes.accumulation * self.world
        self.given = Choice.of(config, rows, self.world, bool(remat) if self.remats else None)
        self._function, self._note = function, note
        self._known: dict[Choice, Forecast] = {}

    def forecast(self, choice: Choice) -> Forecast:
        """What a choice costs; where a program does not fit, those after it are left out."""
        if choice not in self._known:
            made, decorated = self._workload(choice)
            state = decorated.abstract_state(made.create_state, jax.random.key(0))
            objects = state if isinstance(state, tuple) else (state,)
            self._known[choice] = forecast(
                decorated(made.train_step).programs(*objects, made.batch),
                decorated.plan(*objects),
                self.rates,
                tokens=made.tokens,
                note=lambda name: self._note(f"{choice}: {name}"),
                enough=self._too_much,
            )
        return self._known[choice]

    def least(self, choice: Choice) -> int:
        """Bytes that a choice takes at the least, without compiling it.

        The state at rest, and the activations of what was compiled with as many rows in a
        micro-batch, or fewer, and as much or more remat.
        """
        made, decorated = self._workload(choice)
        state = decorated.abstract_state(made.create_state, jax.random.key(0))
        plan = decorated.plan(*state if isinstance(state, tuple) else (state,))
        activations = (
            each.peak.memory.get(ACTIVATIONS, 0)
            for known, each in self._known.items()
            if known.micro <= choice.micro and bool(known.remat) >= bool(choice.remat)
        )
        return plan.bytes_per_device + max(activations, default=0)

    def _workload(self, choice: Choice) -> tuple[Workload, Zero]:
        decorated = zero(choice.config(self.config, self.world), mesh=self.mesh)
        rows = choice.micro * choice.accumulation * self.world
        options = {"zero": decorated, "rows": rows, "seq": self.seq, "remat": choice.remat}
        return workload(bound(self._function, options), decorated, rows, self.seq), decorated

    def _too_much(self, cost: Cost) -> bool:
        return cost.bytes > self.rates.memory - RESERVE
