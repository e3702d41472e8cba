"""The programs of a step, lowered."""

from __future__ import annotations

from typing import NamedTuple

import jax


class LoweredProgram(NamedTuple):
    """One compiled unit of a step.

    Attributes:
      name: "step" where a step is one program; under offload "gradients", then "update 1", ...;
        of zero.evaluate "evaluation"
      lowered: to be compiled for the devices of the step.
      times: how often it runs in a step.
    """

    name: str
    lowered: jax.stages.Lowered
    times: int = 1
