"""The forecast of `zerojax plan`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path

import typer

from zerojax.api import Zero
from zerojax.cli import plan_picture, terminal
from zerojax.cli.options import StepOptions
from zerojax.cli.plan_table import show
from zerojax.cli.planned import Planned, values
from zerojax.cli.planning import function_of, mesh_of
from zerojax.cli.problem import wrong_inputs
from zerojax.config import ZeroConfig
from zerojax.foresight.choice import LIVE, Remat
from zerojax.foresight.gathered import with_room_filled
from zerojax.foresight.remedies import PRODUCTS, remedies
from zerojax.models.attention import choose_attention
from zerojax.models.registry import takes, takes_policy
from zerojax.offload.activations import remat_policy
from zerojax.plan.table import size
from zerojax.step.collectives_table import HEADS, RIGHT
from zerojax.tuning.study import Study


def run(
    config: ZeroConfig,
    asked: StepOptions,
    source: str,
    *,
    remat: Remat,
    look: bool,
    picture: Path | None,
) -> bool:
    """Prints the forecast of a step; exits with 2 for bad input.

    Args:
      config: The config, read from ``source``.
      look: Whether to look for settings that fit, if the step does not.
      asked, remat, picture: The options of the command.

    Returns:
      Whether the step fits.
    """
    with _study(config, asked, remat) as (study, function):
        selected, forecast = study.given, study.forecast(study.given)
        is_auto = any(note.key.endswith(LIVE) and note.value == "auto" for note in config.notes)
        filled = with_room_filled(study, selected) if is_auto else None
        if filled is not None and filled.seconds < forecast.seconds:
            selected, forecast = filled.choice, filled.forecast
        policies = [PRODUCTS] if takes_policy(function) else []
        look = look and not forecast.fits
        alternatives = tuple(remedies(study, policies=policies)) if look else None
        stages, refused = (
            ({}, []) if picture is None else plan_picture.forecasts(study.given, study.forecast)
        )
    implementation = None
    if takes(function, "attention"):
        decorated = Zero(config, forecast.plan.mesh)
        implementation = choose_attention(decorated, asked.attention or "auto")
    planned = Planned(asked, source, selected, forecast, alternatives, stages, implementation)
    if picture is not None:
        title = f"{asked.model}, batch {planned.rows} of {asked.seq} tokens on {asked.devices}"
        plan_picture.draw(picture, title, planned.stages)
        for sentence in refused:
            typer.echo(sentence, err=True)
    if asked.as_json:
        terminal.print_json(values(planned))
    else:
        show(planned)
    return planned.forecast.fits


def show_decided(config: ZeroConfig, asked: StepOptions, *, remat: Remat) -> bool:
    """Prints the collectives of a step, without a compile; returns True."""
    with _study(config, asked, remat) as (study, _):
        table = study.collectives(study.given)
    if asked.as_json:
        terminal.print_json({"collectives": table.rows, "bytes_a_step": table.bytes_by_kind()})
        return True
    columns = {f">{x}" if i in RIGHT else x: itemgetter(i) for i, x in enumerate(HEADS)}
    terminal.console().print(terminal.table(columns, table.cells()[1:]))
    for kind, n in table.bytes_by_kind().items():
        typer.echo(f"{kind}: each device sends {size(n)} a step")
    return True


@contextlib.contextmanager
def _study(
    config: ZeroConfig, asked: StepOptions, remat: Remat
) -> Iterator[tuple[Study, Callable[..., object]]]:
    """Opens the study of a step and the model's function, with a progress line; exits with 2 for
    bad input."""
    with terminal.progress_bar("reading") as update:
        with wrong_inputs():
            mesh, rates = mesh_of(asked)
            function = function_of(asked)
            kept = _kept(function, asked.model, remat)
            study = Study(
                function,
                config,
                mesh,
                rates,
                rows=asked.batch,
                seq=asked.seq,
                remat=kept,
                note=lambda text: update(description=f"compiling {text}"),
            )
        with wrong_inputs(f"model {asked.model!r} cannot be planned"):
            yield study, function


def _kept(function: Callable[..., object], model: str, remat: Remat) -> bool | str:
    """Returns what blocks keep by ``--remat`` or ``--remat-policy``, for a :class:`Study`.

    Raises:
      ValueError: The model does not take the option, or the policy is wrong.
    """
    if isinstance(remat, str):
        if not takes_policy(function):
            raise ValueError(f"--remat-policy: model {model!r} takes no `remat` and `remat_policy`")
        remat_policy(remat)
    elif remat is not None and not takes(function, "remat"):
        raise ValueError(f"--{'' if remat else 'no-'}remat: model {model!r} takes no `remat`")
    return True if remat is None else remat
