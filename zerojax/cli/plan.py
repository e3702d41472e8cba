"""`zerojax plan`: memory, traffic and time of a step, before there are devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from zerojax.cli import plan_picture
from zerojax.cli.compiling import compile_only
from zerojax.cli.explain import stand_ins
from zerojax.cli.plan_table import show
from zerojax.cli.planned import Planned, to_json
from zerojax.cli.problem import explained
from zerojax.cli.terminal import spinner
from zerojax.config import load
from zerojax.foresight.devices import parse_devices
from zerojax.foresight.remedies import remedies
from zerojax.models.registry import find, takes
from zerojax.tuning.study import Study

Note = Callable[[str], None]


def plan(
    model: Annotated[
        str, typer.Option(help="A name, as llama-7b, or module:function for a model of yours.")
    ],
    config: Annotated[Path, typer.Option(help="A DeepSpeed config in JSON.")],
    devices: Annotated[
        str, typer.Option(metavar="KIND:N", help="As h100:8; they need not be there.")
    ],
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of an update, over all devices; else the config's."),
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens in a row.")] = 1024,
    remat: Annotated[
        bool | None,
        typer.Option(
            "--remat/--no-remat",
            help="Blocks keep their input only, where the model takes it; on by default.",
        ),
    ] = None,
    auto: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help='What stands in for an "auto", as for explain.'),
    ] = None,
    look: Annotated[
        bool,
        typer.Option("--remedies/--no-remedies", help="Where it does not fit, look for what does."),
    ] = True,
    picture: Annotated[
        Path | None,
        typer.Option(help="A .png or .svg of the memory at each stage; compiles those too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
) -> None:
    """Shows what a training step needs of each device: memory by kind, traffic, predicted time.

    The step is compiled for devices that need not exist; nothing runs. Where the step does not fit,
    other settings are compiled, until three are found that fit.

    Exits with 0 where the step fits, with 3 where it does not, and with 2 for bad input.
    """
    compile_only()
    with spinner() as progress:
        task = progress.add_task("reading", total=None)

        def note(text: str) -> None:
            progress.update(task, description=f"compiling {text}")

        study = _study(model, config, devices, batch, seq, remat, auto or [], picture, note)
        try:
            planned = _planned(study, model, str(config), seq, look, picture is not None)
        except Exception as error:
            if (said := explained(error, f"model {model!r} cannot be planned")) is None:
                raise
            raise _bad(said) from None
    if picture is not None:
        title = f"{model}, batch {planned.rows} of {seq} tokens on {devices}"
        plan_picture.draw(picture, title, planned.stages)
    if as_json:
        print(json.dumps(to_json(planned), indent=2))
    else:
        show(planned)
    if not planned.forecast.fits:
        raise typer.Exit(3)


def _study(
    model: str,
    config: Path,
    devices: str,
    batch: int | None,
    seq: int,
    remat: bool | None,
    auto: list[str],
    picture: Path | None,
    note: Note,
) -> Study:
    """The study that the options ask for; wrong options end the command before any compile."""
    try:
        if picture is not None:
            plan_picture.check(picture)
        read = load(config, auto=stand_ins(auto))
        function = find(model)
        if remat is not None and not takes(function, "remat"):
            raise ValueError(f"--{'' if remat else 'no-'}remat: model {model!r} takes no `remat`")
        mesh, rates = parse_devices(devices)
        on = remat is not False
        return Study(function, read, mesh, rates, rows=batch, seq=seq, remat=on, note=note)
    except (ValueError, ImportError, RuntimeError) as error:
        raise _bad(explained(error) or str(error)) from None


def _planned(
    study: Study, model: str, config: str, seq: int, look: bool, pictured: bool
) -> Planned:
    found = study.forecast(study.given)
    others = tuple(remedies(study)) if look and not found.fits else None
    choices: Any = plan_picture.by_stage(study.given) if pictured else ()
    stages = {name: study.forecast(choice) for name, choice in choices}
    return Planned(model, config, seq, study.given, found, others, stages)


def _bad(message: str) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(2)
