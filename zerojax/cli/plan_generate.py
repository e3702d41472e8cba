"""The forecast of `zerojax plan --generate`."""

from __future__ import annotations

import dataclasses

import typer
from flax import nnx

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
from zerojax.plan.table import size
from zerojax.quantize import quantize_weights
from zerojax.tuning.study import abstract_workload

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
        terminal.progress_bar("compiling the programs of a generation"),
        wrong_inputs(f"model {asked.model!r} cannot be planned"),
    ):
        mesh, rates = mesh_of(asked)
        function = function_of(asked)
        mesh = arranged(mesh, config)
        rows = asked.batch or batch_devices(mesh)
        _, work, objects = abstract_workload(
            function, quiet(config), mesh, rows, asked.seq + new, remat=False
        )
        state = objects[0]
        is_nnx = isinstance(state, nnx.Module)
        module, params = (state, None) if is_nnx else (work.model, state.params)
        if module is None:
            raise TypeError("--generate needs zerojax.Workload(..., model=model), a flax model")
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
