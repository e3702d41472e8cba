"""`zerojax estimate`: DeepSpeed's rules of thumb for a model.

`--json` prints an object with these keys:

- `estimates`: One object for ZeRO-2 and one for ZeRO-3: stage, params, largest_layer,
  gpus_per_node, nodes, and needs (cpu and gpu in bytes, by options).
- `largest_layer_assumed`: Whether the largest layer was assumed.
"""

from __future__ import annotations

from typing import Annotated

import typer

from zerojax.cli.options import AsJson, wrong_input


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
    from zerojax.cli.estimate_run import run  # imports JAX

    run(
        params,
        largest_layer,
        model=model,
        seq=seq,
        devices_per_node=devices_per_node,
        nodes=nodes,
        as_json=as_json,
    )
