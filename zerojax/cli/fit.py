"""`zerojax fit`: the settings that are predicted to train fastest."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from zerojax.cli import terminal
from zerojax.cli.explain import stand_ins
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
from zerojax.cli.terminal import steps_bar
from zerojax.devices.mesh import laid_out
from zerojax.foresight.choice import Choice
from zerojax.foresight.devices import parse_devices
from zerojax.foresight.guard import OutOfMemoryError
from zerojax.foresight.trials import Trial
from zerojax.models.registry import find
from zerojax.plan.table import size
from zerojax.tuning.fit import fit as choose
from zerojax.tuning.search import COMPILES, listed


def fit(
    model: Model,
    config: Annotated[
        Path,
        typer.Option(
            help='A DeepSpeed config, or Accelerate\'s YAML; what it leaves out, or has as "auto", '
            "is open."
        ),
    ],
    devices: Devices,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of an update, over all devices; else open.")
    ] = None,
    seq: Seq = 1024,
    network: Network = None,
    mesh_axes: MeshAxes = None,
    attention: Attention = None,
    auto: Auto = None,
    out: Annotated[Path | None, typer.Option(help="Where the fastest config goes.")] = None,
    compiles: Annotated[int, typer.Option(min=1, help="At the most.")] = COMPILES,
    minutes: Annotated[float, typer.Option(min=0, help="At the most.")] = 20.0,
    xla: Annotated[
        bool, typer.Option("--xla", help="Then search options of XLA for the fastest, for GPUs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no table.")] = False,
) -> None:
    """Searches stage, micro-batch, accumulation, remat, offload and parameters that stay gathered.

    The fastest choice has the most tokens a second. DeepSpeed's section "autotuning" of the config,
    if enabled, bounds the search and may ask for the shortest step instead.

    Every choice in the ranking was compiled and fits. ~/.cache/zerojax keeps results of earlier
    compiles for the same step and devices. "--devices here" means the devices of this machine; with
    --xla the fastest choice is run on them.

    Exits with 0, with 3 if nothing fits, and with 2 for bad input.
    """
    if out is not None and (out.is_dir() or not os.access(out.resolve().parent, os.W_OK)):
        typer.echo(f"--out {out}: no file can be written there", err=True)
        raise typer.Exit(2)
    compile_only(devices)
    with steps_bar() as progress:
        task = progress.add_task("reading", total=None)

        def note(text: str) -> None:
            progress.update(task, description=f"compiling {text}")

        def done(modes: int, total: int) -> None:
            progress.update(task, completed=modes, total=total)

        try:
            mesh, rates = parse_devices(devices, network)
            mesh = laid_out(mesh, mesh_axes) if mesh_axes else mesh
            fitted = choose(
                config,
                with_attention(find(model), model, attention),
                train_batch_size=batch,
                seq=seq,
                mesh=mesh,
                rates=rates,
                auto=stand_ins(auto or []),
                compiles=compiles,
                seconds=60 * minutes,
                xla=xla,
                note=note,
                done=done,
            )
        except OutOfMemoryError as error:
            typer.echo(f"{error} (--compiles {compiles}, --minutes {minutes:g})", err=True)
            raise typer.Exit(3) from None
        except Exception as error:
            if (message := explain_error(error, f"model {model!r} cannot be planned")) is None:
                raise
            typer.echo(message, err=True)
            raise typer.Exit(2) from None
    if fitted.unseen:
        typer.echo(
            f"The search ended at its limit (--compiles {compiles}, --minutes {minutes:g}). Not "
            f"tried: {listed(fitted.unseen)}.",
            err=True,
        )
    if as_json:
        ranking = [_row(each) for each in fitted.ranking]
        print(json.dumps({"ranking": ranking, "config": fitted.config}, indent=2))
    else:
        _show(_best(fitted.ranking), f"{model} on {devices}, {seq} tokens in a row")
        summary = f"{fitted.compiled} programs compiled, {fitted.remembered} remembered"
        typer.echo(f"{summary}. Fastest: {fitted.choice}" + (f", in {out}" if out else ""))
        if fitted.choice.remat:
            typer.echo("remat is an option of the model, not of the JSON: turn it on there.")
    if out is not None:
        out.write_text(json.dumps(fitted.config, indent=2) + "\n")


def _best(ranking: Sequence[Trial]) -> list[Trial]:
    """Returns the first trial of each mode, whatever its micro-batch."""
    first: dict[Choice, Trial] = {}
    for trial in ranking:
        mode = dataclasses.replace(trial.choice, micro=1, accumulation=1)
        first.setdefault(mode, trial)
    return list(first.values())


def _row(trial: Trial) -> dict[str, object]:
    forecast = trial.forecast
    return {
        "choice": dataclasses.asdict(trial.choice),
        "stay_gathered": forecast.plan.live.bytes,
        "tokens_per_second": trial.tokens_per_second,
        "mfu": forecast.mfu,
        "peak": forecast.peak.bytes,
        "headroom": forecast.headroom,
        "host": forecast.host_bytes,
        "seconds": forecast.seconds,
        "measured": trial.measured,
    }


def _show(trials: Sequence[Trial], title: str) -> None:
    settings = ["stage", "micro-batch", "accumulation", "remat", "offloaded", ">stay gathered"]
    has_xla = any(trial.choice.xla for trial in trials)
    settings += ["XLA"] if has_xla else []
    table = terminal.table(*settings, ">tokens/s", ">MFU", ">device memory", ">host memory")
    table.title, table.title_justify = title, "left"
    for trial in trials:
        choice, forecast = trial.choice, trial.forecast
        table.add_row(
            str(choice.stage),
            str(choice.micro),
            str(choice.accumulation),
            {None: "", False: "no", True: "yes"}[choice.remat],
            choice.offload,
            size(forecast.plan.live.bytes) if forecast.plan.live else "",
            *(["\n".join(_short(name, x) for name, x in choice.xla)] if has_xla else ()),
            f"{trial.tokens_per_second:,.0f}",
            f"{forecast.mfu * forecast.seconds / trial.seconds:.1%}",
            size(forecast.peak.bytes),
            size(forecast.host_bytes),
        )
    terminal.console().print(table)


def _short(name: str, value: bool | int | str) -> str:
    """Shortens an option of XLA for a narrow column."""
    shown = str(value).removeprefix("WHILE_LOOP_UNROLLING_")
    return f"{name.removeprefix('xla_gpu_').removeprefix('enable_')} {shown}"
