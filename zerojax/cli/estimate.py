"""`zerojax estimate`: DeepSpeed's rules of thumb for a model."""

from __future__ import annotations

from typing import Annotated

import jax
import typer

from zerojax.api import zero
from zerojax.cli.problem import explain_error
from zerojax.foresight.estimators import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_cold,
    parameters,
)
from zerojax.models.registry import bound, find
from zerojax.tuning.workload import workload


def estimate(
    params: Annotated[float | None, typer.Option(help="Parameters of the model, as 7e9.")] = None,
    largest_layer: Annotated[
        float | None, typer.Option(help="Parameters of its largest layer; without it no ZeRO-3.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="In place of both: a name, as llama-7b, or module:function for yours."),
    ] = None,
    seq: Annotated[
        int, typer.Option(min=1, help="Tokens in a row, where the model's size depends on it.")
    ] = 8,
    devices_per_node: Annotated[int, typer.Option(min=1)] = 8,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    buffer_factor: Annotated[
        float, typer.Option(help="What host memory is multiplied with for buffers.")
    ] = 1.5,
) -> None:
    """Prints the memory of parameters, gradients and optimizer state by DeepSpeed's formulas.

    The formulas do not count activations, logits and gathered parameters.
    """
    try:
        if (params is None) == (model is None) or (model and largest_layer is not None):
            raise ValueError("give either --params, with or without --largest-layer, or --model")
        if model is not None:
            params, largest_layer = counted(model, seq)
        assert params is not None
        estimate_zero2_model_states_mem_needs_all_cold(
            params, devices_per_node, nodes, buffer_factor
        )
        if largest_layer is not None:
            typer.echo()
            estimate_zero3_model_states_mem_needs_all_cold(
                params, largest_layer, devices_per_node, nodes, buffer_factor
            )
    except Exception as error:
        doing = "" if model is None else f"model {model!r} cannot be counted"
        if (message := explain_error(error, doing)) is None:
            raise
        typer.echo(message, err=True)
        raise typer.Exit(2) from None


def counted(model: str, seq: int) -> tuple[int, int]:
    """Counts a model's parameters and its largest layer's; blocks are unstacked where possible.

    Raises:
      ModelError: The model is unknown, or cannot be imported or called.
    """
    jax.config.update("jax_platforms", "cpu")  # nothing is computed
    decorated = zero()
    options = {"zero": decorated, "rows": 1, "seq": seq, "scan": False}
    work = workload(bound(find(model), options), decorated, 1, seq)
    state = jax.eval_shape(work.create_state, jax.random.key(0))
    return parameters(state[0] if isinstance(state, tuple) else state.params)
