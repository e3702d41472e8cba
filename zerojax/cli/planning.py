"""Functions of `plan` and `fit`, which compile for devices that need not exist."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.cli.options import StepOptions
from zerojax.devices.mesh import laid_out
from zerojax.devices.rates import Rates
from zerojax.foresight.devices import HERE, parse_devices
from zerojax.models.registry import find, takes


def mesh_of(asked: StepOptions) -> tuple[Mesh, Rates]:
    """Returns the devices that were asked for, and their rates; to be called before JAX has
    devices.

    For absent devices JAX searches no GPUs, and has no cache of compiled programs.
    """
    if asked.devices != HERE:
        jax.config.update("jax_platforms", "cpu")  # the compiler's plugin would search for GPUs
        jax.config.update(
            "jax_enable_compilation_cache", False
        )  # it cannot read such programs back
    mesh, rates = parse_devices(asked.devices, asked.network)
    return (laid_out(mesh, asked.mesh_axes) if asked.mesh_axes else mesh), rates


def function_of(asked: StepOptions) -> Callable[..., Any]:
    """Returns a model's function, with the attention that ``--attention`` asks for.

    Raises:
      ValueError: The model takes no ``attention``.
    """
    function = find(asked.model)
    if asked.attention is None:
        return function
    if not takes(function, "attention"):
        raise ValueError(f"--attention: model {asked.model!r} takes no `attention`")
    return functools.partial(function, attention=asked.attention)
