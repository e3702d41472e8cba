"""`zerojax plan`: memory, traffic and time of a step, without its devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zerojax.api import Zero
from zerojax.cli import plan_picture
from zerojax.cli.explain import stand_ins
from zerojax.cli.plan_collectives import show_collectives
from zerojax.cli.plan_table import show
from zerojax.cli.planned import Planned, to_json
from zerojax.cli.planning import (
    Attention,
    Auto,
    Devices,
    MeshAxes,
    Model,
    Network,
    Seq,
    compile_only,
    with_attention,
)
from zerojax.cli.problem import explain_error
from zerojax.cli.terminal import spinner
from zerojax.config import load
from zerojax.devices.mesh import laid_out
from zerojax.foresight.choice import LIVE
from zerojax.foresight.devices import parse_devices
from zerojax.foresight.gathered import weighed
from zerojax.foresight.remedies import remedies
from zerojax.models.attention import choose_attention
from zerojax.models.registry import find, takes
from zerojax.tuning.study import Study


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
) -> None:
    """Shows the needs of a training step on each device: memory by kind, traffic, predicted time.

    The step is compiled for devices that need not exist; nothing runs. If the step does not fit,
    other settings are compiled, until three are found that fit.

    Exits with 0 if the step fits, with 3 if it does not, and with 2 for bad input.
    """
    compile_only(devices)
    with spinner() as progress:
        task = progress.add_task("reading", total=None)

        def note(text: str) -> None:
            progress.update(task, description=f"compiling {text}")

        try:
            if picture is not None and collectives:
                raise ValueError(
                    "--picture draws memory, which --collectives leaves out: pass one of them"
                )
            if picture is not None:
                plan_picture.check(picture)
            zero_config, function = load(config, auto=stand_ins(auto or [])), find(model)
            if remat is not None and not takes(function, "remat"):
                raise ValueError(
                    f"--{'' if remat else 'no-'}remat: model {model!r} takes no `remat`"
                )
            mesh, rates = parse_devices(devices, network)
            mesh = laid_out(mesh, mesh_axes) if mesh_axes else mesh
            function = with_attention(function, model, attention)
            use_remat = remat is not False
            study = Study(
                function, zero_config, mesh, rates, rows=batch, seq=seq, remat=use_remat, note=note
            )
        except (ValueError, ImportError, RuntimeError) as error:
            raise _input_error(explain_error(error) or str(error)) from None
        try:
            if collectives:
                return show_collectives(study.collectives(study.given), as_json=as_json)
            selected, forecast = study.given, study.forecast(study.given)
            is_auto = any(
                note.key.endswith(LIVE) and note.value == "auto" for note in zero_config.notes
            )
            gathered = weighed(study, selected) if is_auto else ()
            if gathered:
                selected, forecast = gathered[0].choice, gathered[0].forecast
            alternatives = tuple(remedies(study)) if look and not forecast.fits else None
            choices = plan_picture.by_stage(study.given) if picture is not None else ()
            stages = {name: study.forecast(choice) for name, choice in choices}
        except Exception as error:
            if (message := explain_error(error, f"model {model!r} cannot be planned")) is None:
                raise
            raise _input_error(message) from None
    implementation = (
        choose_attention(Zero(zero_config, mesh), attention or "auto")
        if takes(function, "attention")
        else None
    )
    planned = Planned(
        model, str(config), seq, selected, forecast, alternatives, stages, implementation, gathered
    )
    if picture is not None:
        title = f"{model}, batch {planned.rows} of {seq} tokens on {devices}"
        plan_picture.draw(picture, title, planned.stages)
    if as_json:
        print(json.dumps(to_json(planned), indent=2))
    else:
        show(planned)
    if not planned.forecast.fits:
        raise typer.Exit(3)


def _input_error(message: str) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(2)
