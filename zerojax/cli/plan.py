"""`zerojax plan`: memory, traffic and time of a step, without its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerojax.cli.explain import stand_ins
from zerojax.cli.options import (
    AsJson,
    Attention,
    Auto,
    Devices,
    MeshAxes,
    Model,
    Network,
    Seq,
    check_picture,
    wrong_input,
)
from zerojax.config import load

JSON = {
    "model": "As given.",
    "parameters": "Their number.",
    "config": "The path.",
    "devices": "kind and count.",
    "mesh": "The size of each axis.",
    "rows": "Rows of an update, over all devices.",
    "seq": "Tokens in a row.",
    "attention": "The implementation; null for a model that has its own.",
    "choice": (
        "The settings of the config that decide memory: stage, micro, accumulation, remat, "
        "offload, live, xla; pipeline is for `fit`."
    ),
    "pipeline": (
        "schedule, stages, micro_batches, kept (those of which a stage keeps activations at a "
        "time), ticks, bubble, boundary; null without stages."
    ),
    "fits": "Whether the step fits.",
    "memory": (
        "Of a device: kinds, peak, headroom, device, reserve, host and disk in bytes, "
        "program, mem_fraction, recomputes_above."
    ),
    "stay_gathered": "Parameters that stay gathered at stage 3, and the weighed options.",
    "programs": (
        "One object a program: name, memory, bytes, host, times, seconds, computed_again, "
        "bytes_again, seconds_again, compile_seconds."
    ),
    "links": "Bytes a second inside a node and between nodes.",
    "traffic": (
        "One object a kind of collective: kind, dtypes, times, bytes, between_nodes, seconds,"
        " hidden."
    ),
    "step": "seconds, tokens, tokens_per_second and mfu; null if a program does not fit.",
    "assumed": "The shares of the peak rates that are assumed.",
    "compile_seconds": "Seconds of all compiles.",
    "remedies": "Settings that fit; null if none were searched for.",
    "stages": "Memory by stage, with --picture.",
}
"""The keys that `--json` prints."""


def plan(
    model: Model,
    config: Annotated[Path, typer.Option(help="A DeepSpeed config in JSON, or Accelerate's YAML.")],
    devices: Devices,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of an update, over all devices; else the config's."),
    ] = None,
    seq: Seq = 1024,
    network: Network = None,
    mesh_axes: MeshAxes = None,
    remat: Annotated[
        bool | None,
        typer.Option(
            "--remat/--no-remat",
            help="Blocks keep their input only, where the model takes it; on by default.",
        ),
    ] = None,
    remat_policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What blocks keep beside their input, where the model takes it: a name for "
            "zerojax.remat_policy, as dots_no_batch or names:a,b.",
        ),
    ] = None,
    attention: Attention = None,
    auto: Auto = None,
    look: Annotated[
        bool,
        typer.Option("--remedies/--no-remedies", help="Where it does not fit, look for what does."),
    ] = True,
    picture: Annotated[
        Path | None,
        typer.Option(help="A .png or .svg of the memory at each stage; compiles those too."),
    ] = None,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives",
            help="The all-gathers and reductions that zerojax decides on, with the model's lines, "
            "in place of the forecast; compiles nothing.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Shows the needs of a training step on each device: memory by kind, traffic, predicted time.

    The step is compiled for devices that need not exist; nothing runs. If the step does not fit,
    other settings are compiled, until three are found that fit.

    Exits with 0 if the step fits, with 3 if it does not, and with 2 for bad input.
    """
    if picture is not None and collectives:
        wrong_input("--picture draws memory, which --collectives leaves out: pass one of them")
    try:
        if picture is not None:
            check_picture(picture)
        zero_config = load(config, auto=stand_ins(auto or []))
    except (ValueError, ImportError) as error:
        wrong_input(error)
    from zerojax.cli.plan_run import run  # imports JAX

    fits = run(
        zero_config,
        model=model,
        source=str(config),
        devices=devices,
        batch=batch,
        seq=seq,
        network=network,
        mesh_axes=mesh_axes,
        remat=remat,
        policy=remat_policy,
        attention=attention,
        look=look,
        picture=picture,
        collectives=collectives,
        as_json=as_json,
    )
    if not fits:
        raise typer.Exit(3)
