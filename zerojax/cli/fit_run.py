"""The search of `zerojax fit`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import typer

from zerojax.cli import terminal
from zerojax.cli.options import StepOptions
from zerojax.cli.plan_table import duration
from zerojax.cli.planned import figures
from zerojax.cli.planning import function_of, mesh_of
from zerojax.cli.problem import wrong_inputs
from zerojax.foresight.choice import Choice, Remat
from zerojax.foresight.guard import OutOfMemoryError
from zerojax.foresight.trials import Trial
from zerojax.models.registry import takes, takes_policy
from zerojax.plan.table import size
from zerojax.tuning.fit import fit as choose
from zerojax.tuning.search import listed

REMAT: dict[Remat, str] = {None: "", False: "no", True: "yes"}
"""Words of the table for what blocks keep, other than the names of policies."""


def run(
    config: Path,
    asked: StepOptions,
    *,
    auto: Mapping[str, object] | None,
    out: Path | None,
    compiles: int,
    minutes: float,
) -> None:
    """Searches, prints the ranking and writes the config; exits with 3 if nothing fits and with 2
    for bad input. The arguments are the options of the command."""
    doing = f"model {asked.model!r} cannot be planned"
    with terminal.progress_bar("reading") as update, wrong_inputs(doing):
        mesh, rates = mesh_of(asked)
        try:
            fitted = choose(
                config,
                function := function_of(asked),
                train_batch_size=asked.batch,
                seq=asked.seq,
                mesh=mesh,
                rates=rates,
                auto=auto,
                compiles=compiles,
                seconds=60 * minutes,
                note=lambda text: update(description=f"compiling {text}"),
                done=lambda modes, total: update(completed=modes, total=total),
            )
        except OutOfMemoryError as error:
            typer.echo(f"{error} (--compiles {compiles}, --minutes {minutes:g})", err=True)
            raise typer.Exit(3) from None
    if fitted.unseen:
        typer.echo(
            f"The search ended at its limit (--compiles {compiles}, --minutes {minutes:g}), "
            f"before it tried {listed(fitted.unseen)}.",
            err=True,
        )
    if asked.as_json:
        ranking = [*map(figures, fitted.ranking)]
        terminal.print_json({"ranking": ranking, "config": fitted.config})
    else:
        _show(
            _best(fitted.ranking), f"{asked.model} on {asked.devices}, {asked.seq} tokens in a row"
        )
        summary = f"{fitted.compiled} programs compiled, {fitted.remembered} remembered"
        typer.echo(f"{summary}. Fastest: {fitted.choice}" + (f", in {out}" if out else ""))
        if fitted.choice.remat:
            option = "remat" if fitted.choice.remat is True else "remat_policy"
            typer.echo(
                f"{option} is an option of the model, not of the JSON: set "
                f"{fitted.choice.remat!r} there."
            )
        for sentence in about_stages(fitted.ranking):
            typer.echo(sentence)
        if takes(function, "remat") and not takes_policy(function):
            typer.echo(
                f"Blocks that keep more than their input were not tried: {asked.model!r} takes no "
                "`remat_policy`, a name for nn.remat(Block, policy=zerojax.remat_policy(name))."
            )
    if out is not None:
        out.write_text(json.dumps(fitted.config, indent=2) + "\n")


def about_stages(ranking: Sequence[Trial]) -> Iterator[str]:
    """Yields whether pipeline stages pay, if they were tried, and the mesh of those that do."""
    first = {trial.choice.pipeline > 1: trial for trial in reversed(ranking)}
    if len(first) < 2:
        return
    plain, staged = first[False], first[True]
    ratio, pay = staged.tokens_per_second / plain.tokens_per_second, ranking[0] is staged
    yield (
        f"{staged.choice.pipeline} pipeline stages {'pay' if pay else 'do not pay'}: {ratio:.2f} "
        f"times the tokens/s of the fastest choice without, {plain.forecast.network_share:.0%} of "
        "whose step waits for the network between hosts."
    )
    if pay:
        axes = dict(staged.forecast.plan.mesh.shape)
        yield f"Stages are an axis of the mesh, not of the JSON: mesh=zerojax.mesh(axes={axes})."


def _best(ranking: Sequence[Trial]) -> list[Trial]:
    """Returns the first trial of each mode, whatever its micro-batch."""
    first: dict[Choice, Trial] = {}
    for trial in ranking:
        mode = dataclasses.replace(trial.choice, micro=1, accumulation=1)
        first.setdefault(mode, trial)
    return list(first.values())


def _show(trials: Sequence[Trial], title: str) -> None:
    columns: dict[str, Callable[[Trial], str]] = {
        "stage": lambda each: str(each.choice.stage),
        "micro-batch": lambda each: str(each.choice.micro),
        "accumulation": lambda each: str(each.choice.accumulation),
        "remat": lambda each: REMAT.get(each.choice.remat, str(each.choice.remat)),
        "offloaded": lambda each: each.choice.offload,
        ">stay gathered": lambda each: size(n) if (n := each.forecast.plan.live.bytes) else "",
        "pipeline": lambda each: (
            f"{each.choice.pipeline} stages" if each.choice.pipeline > 1 else ""
        ),
        ">tokens/s": lambda each: f"{each.tokens_per_second:,.0f}",
        ">MFU": lambda each: f"{each.forecast.mfu:.1%}",
        ">device memory": lambda each: size(each.forecast.peak.bytes),
        ">host memory": lambda each: size(each.forecast.host_bytes),
        ">XLA repeats": lambda each: (
            f"{size(each.forecast.bytes_again)}, {duration(each.forecast.seconds_again)}"
            if each.forecast.bytes_again
            else ""
        ),
    }
    table = terminal.table(columns, trials)
    table.title, table.title_justify = title, "left"
    terminal.console().print(table)
