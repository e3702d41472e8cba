"""`python -m zerojax estimate`: DeepSpeed's rules of thumb for a number of parameters."""

from __future__ import annotations

from typing import Annotated

import typer

from zerojax.foresight.estimators import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_cold,
)


def estimate(
    params: Annotated[float, typer.Option(help="Parameters of the model, as 7e9.")],
    largest_layer: Annotated[
        float | None, typer.Option(help="Parameters of its largest layer; without it no ZeRO-3.")
    ] = None,
    devices_per_node: Annotated[int, typer.Option(min=1)] = 8,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    buffer_factor: Annotated[
        float, typer.Option(help="What host memory is multiplied with for buffers.")
    ] = 1.5,
) -> None:
    """Memory of parameters, gradients and optimizer state by DeepSpeed's formulas.

    Activations, logits and gathered parameters are not in them.
    """
    try:
        estimate_zero2_model_states_mem_needs_all_cold(
            params, devices_per_node, nodes, buffer_factor
        )
        if largest_layer is not None:
            typer.echo()
            estimate_zero3_model_states_mem_needs_all_cold(
                params, largest_layer, devices_per_node, nodes, buffer_factor
            )
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None
