"""The sending of gradients to their places, in the program that computes them."""

from __future__ import annotations

from typing import Any

import jax

from zerojax.collectives.gathering import plain
from zerojax.collectives.host import Host, fetch_to_device, on_host, send_to_host, unpadded
from zerojax.collectives.shard import Gathering, HostGradient
from zerojax.optim.norm import square_sums
from zerojax.optim.wrap import ZeroOptState, unscaled
from zerojax.plan import layout
from zerojax.plan.places import DEVICE
from zerojax.plan.stored import pad
from zerojax.step.program import StepSetting


class GradientSender:
    """Sends each gradient to its place as soon as the body has computed it.

    Args:
      setting: The step.
      opt: The optimizer state, for its loss scale.

    Attributes:
      square_sums: Square sums of the gradients sent so far, in the order of the parameters.
    """

    def __init__(self, setting: StepSetting, opt: ZeroOptState) -> None:
        self._setting, self._opt = setting, opt
        self.square_sums: list[jax.Array] = []

    def sums(self, gradient: jax.Array) -> jax.Array:
        """Returns the square sums of a gradient without its loss scale."""
        return square_sums(unscaled(gradient, self._opt.loss_scale))

    def host(self) -> Host | None:
        """Returns how loops send gradients to the host; None if no parameter is offloaded."""
        config = self._setting.config
        if config.offload_param is None:
            return None
        return Host(config.stage3_param_persistence_threshold, self.sums)

    def __call__(self, gradient: Any) -> jax.Array | HostGradient:
        """Replaces the mark of the next gradient, in the order of the parameters: constrains the
        gradient to its shard, and sends it to host memory if its parameter is offloaded."""
        leaf = self._setting.plan.compute[len(self.square_sums)]
        if on_host(gradient) and leaf.place == DEVICE:
            gradient = fetch_to_device(gradient.value)
        if on_host(gradient):
            self.square_sums.append(gradient.sums)
            return gradient
        gradient = plain(gradient)  # it may be computed elementwise from its parameter
        spec = layout.full(leaf.spec, gradient.ndim)
        gradient = self._setting.inserter.constrain(gradient, spec)
        self.square_sums.append(self.sums(gradient))
        if leaf.place == DEVICE:
            return gradient
        value = unpadded(send_to_host(pad(gradient, leaf.padded)), leaf.shape)
        return HostGradient(value, spec, gathering=Gathering(host=True), sums=self.square_sums[-1])
