"""The tables of `zerojax estimate`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Iterable

import jax
import typer

from zerojax.api import zero
from zerojax.cli.options import wrong_input
from zerojax.cli.problem import explain_error
from zerojax.foresight.estimators import (
    Estimate,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_cold,
    parameters,
)
from zerojax.models.registry import bound, find
from zerojax.tuning.workload import workload

TOKENS = 32_000
"""Tokens of the vocabulary of an assumed embedding."""


def run(
    params: float | None,
    largest_layer: float | None,
    *,
    model: str | None,
    seq: int,
    devices_per_node: int,
    nodes: int,
    as_json: bool,
) -> None:
    """Prints the estimates; exits with 2 for bad input. The arguments are the command's options."""
    try:
        if model is not None:
            params, largest_layer = counted(model, seq)
        assert params is not None
        machines = devices_per_node, nodes
        with contextlib.redirect_stdout(io.StringIO()):  # the functions print
            zero2 = estimate_zero2_model_states_mem_needs_all_cold(params, *machines)
            layer = assumed_layer(params) if largest_layer is None else largest_layer
            zero3 = estimate_zero3_model_states_mem_needs_all_cold(params, layer, *machines)
    except Exception as error:
        doing = "" if model is None else f"model {model!r} cannot be counted"
        if (message := explain_error(error, doing)) is None:
            raise
        wrong_input(message)
    is_assumed = largest_layer is None
    if as_json:
        print(json.dumps(to_json((zero2, zero3), is_assumed=is_assumed), indent=2))
        return
    typer.echo(f"{zero2}\n\n{zero3}")
    if is_assumed:
        typer.echo(
            f"assumed largest layer: {layer:,} parameters, a transformer's\n"
            f"embedding of {TOKENS:,} tokens; --largest-layer or --model\nreplaces it"
        )


def to_json(estimates: Iterable[Estimate], *, is_assumed: bool) -> dict[str, object]:
    """Returns the tables as JSON values, in bytes."""
    return {
        "estimates": [dataclasses.asdict(each) for each in estimates],
        "largest_layer_assumed": is_assumed,
    }


def assumed_layer(params: float) -> int:
    """Returns the parameters of the embedding of a transformer with ``params`` parameters: its
    width is 128 times the number of its layers, each of which has 12 width^2 parameters.

    Example:
      >>> round(assumed_layer(6.74e9) / (32000 * 4096), 1)  # Llama 7B
      1.0
    """
    width: float = (params * 128 / 12) ** (1 / 3)
    return round(min(params, TOKENS * width))


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
