"""The forecast of `zerojax plan --generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import typer

from zerojax.api import zero
from zerojax.cli import terminal
from zerojax.cli.options import StepOptions
from zerojax.cli.planning import function_of, mesh_of
from zerojax.cli.problem import wrong_inputs
from zerojax.config import ZeroConfig
from zerojax.config.frozen import quiet
from zerojax.devices.arranged import arranged
from zerojax.devices.mesh import batch_devices
from zerojax.generation.forecast import Batch, forecast
from zerojax.generation.weights import Weights
from zerojax.models.registry import bound
from zerojax.plan.table import size
from zerojax.quantize import quantize_weights
from zerojax.tuning.study import check_axes
from zerojax.tuning.workload import Workload, workload

RESULTS = ("on_host", "fits", "peak", "tokens_per_second", "least_seconds")
"""The properties of a forecast that are figures."""


def run(
    config: ZeroConfig, asked: StepOptions, *, new: int, weights: Weights | None, bits: int | None
) -> bool:
    """Prints the forecast of a generation; exits with 2 for bad input.

    Args:
      config: The config, whose stage and offload decide where the parameters are at rest.
      asked: The options of the command. `batch` is None for one row per data device, `seq` the
        tokens of each prompt, or of each source of an encoder-decoder.
      new: New tokens of each row.
      weights: As for :func:`zerojax.generate`.
      bits: Bits of the quantized parameters; None for bfloat16.

    Returns:
      Whether the generation fits.
    """
    with (
        terminal.steps_bar("compiling the programs of a generation"),
        wrong_inputs(f"model {asked.model!r} cannot be planned"),
    ):
        mesh, rates = mesh_of(asked)
        function = function_of(asked)
        mesh = arranged(mesh, config)
        rows = asked.batch or batch_devices(mesh)
        module, params = _abstract(function, config, mesh, rows, asked.seq + new)
        if bits is not None:
            params = quantize_weights(params, bits)
        batch = Batch(rows, asked.seq, new)
        found = forecast(module, params, batch, mesh=mesh, rates=rates, weights=weights)
    if asked.as_json:
        results = {name: getattr(found, name) for name in RESULTS}
        terminal.print_json({"generation": dataclasses.asdict(batch) | vars(found) | results})
    else:
        over = found.peak - found.rates.room
        typer.echo(found)
        typer.echo("fits" if over <= 0 else f"does not fit by {size(over)}")
    return found.fits


def _abstract(
    function: Callable[..., Any], config: ZeroConfig, mesh: jax.sharding.Mesh, rows: int, seq: int
) -> tuple[Any, Any]:
    """Returns a model, and its abstract parameters at rest; an NNX model is abstract itself."""
    decorated = zero(quiet(config), mesh=mesh)
    options = {"zero": decorated, "rows": rows, "seq": seq, "remat": False, "remat_policy": None}
    build, models = bound(function, options), list[Any]()

    def make() -> Any:
        models.append(build())
        return models[-1]

    work = workload(make, decorated, rows, seq)
    model = models[0].model if isinstance(models[0], Workload) else models[0]
    if work.specs is not None:
        decorated = zero(quiet(config), mesh=mesh, specs=work.specs)
    state = decorated.abstract_state(work.create_state, jax.random.key(0))
    objects = state if isinstance(state, tuple) else (state,)
    check_axes(decorated.plan(*objects))
    if isinstance(state, tuple):
        return state[0], None
    if model is None:
        raise TypeError("--generate needs zerojax.Workload(..., model=model), a flax model")
    return model, state.params
