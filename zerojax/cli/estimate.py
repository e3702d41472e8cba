"""`zerojax estimate`: DeepSpeed's rules of thumb for a model.

`--json` prints an object with these keys:

- `estimates`: One object for ZeRO-2 and one for ZeRO-3: stage, params, largest_layer,
  gpus_per_node, nodes, and needs (cpu and gpu in bytes, by options).
- `largest_layer_assumed`: Whether the largest layer was assumed.
"""

from __future__ import annotations

import contextlib
import io
from typing import Annotated

import typer

from zerojax.cli.options import AsJson, wrong_input
from zerojax.cli.terminal import print_json

TOKENS = 32_000
"""Tokens of the vocabulary of an assumed embedding."""


def estimate(
    params: Annotated[float | None, typer.Option(help="The model's parameters, say 7e9.")] = None,
    largest_layer: Annotated[
        float | None,
        typer.Option(
            help="Parameters of its largest layer; by default the embedding of a transformer."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Instead of both: a name, such as llama-7b, or module:function."),
    ] = None,
    seq: Annotated[
        int, typer.Option(min=1, help="Tokens in a row, where the model's size depends on it.")
    ] = 8,
    devices_per_node: Annotated[int, typer.Option(min=1)] = 8,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Prints the memory of parameters, gradients and optimizer state by DeepSpeed's formulas.

    The formulas do not count activations, logits and gathered parameters.
    """
    if (params is None) == (model is None) or (model and largest_layer is not None):
        wrong_input("pass either --params, with or without --largest-layer, or --model")
    from zerojax.cli.problem import wrong_inputs  # imports JAX
    from zerojax.foresight.estimators import (
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_cold,
    )

    doing = "" if model is None else f"model {model!r} cannot be counted"
    # The estimators print.
    with wrong_inputs(doing), contextlib.redirect_stdout(io.StringIO()):
        if model is not None:
            params, largest_layer = counted(model, seq)
        assert params is not None
        machines = devices_per_node, nodes
        # Before a layer is assumed, which needs parameters above 0.
        zero2 = estimate_zero2_model_states_mem_needs_all_cold(params, *machines)
        layer = assumed_layer(params) if largest_layer is None else largest_layer
        zero3 = estimate_zero3_model_states_mem_needs_all_cold(params, layer, *machines)
    is_assumed = largest_layer is None
    if as_json:
        print_json({"estimates": (zero2, zero3), "largest_layer_assumed": is_assumed})
        return
    typer.echo(f"{zero2}\n\n{zero3}")
    if is_assumed:
        typer.echo(
            f"assumed largest layer: {layer:,} parameters, a transformer's\n"
            f"embedding of {TOKENS:,} tokens; --largest-layer or --model\nreplaces it"
        )


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
    import jax

    from zerojax.api import zero
    from zerojax.foresight.estimators import parameters
    from zerojax.models.registry import bound, find
    from zerojax.tuning.workload import workload

    jax.config.update("jax_platforms", "cpu")  # nothing is computed
    decorated = zero()
    options = {"zero": decorated, "rows": 1, "seq": seq, "scan": False}
    work = workload(bound(find(model), options), decorated, 1, seq)
    state = jax.eval_shape(work.create_state, jax.random.key(0))
    return parameters(state[0] if isinstance(state, tuple) else state.params)
