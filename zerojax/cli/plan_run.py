"""The forecast of `zerojax plan`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import typer

from zerojax.api import Zero
from zerojax.cli import plan_picture
from zerojax.cli.options import wrong_input
from zerojax.cli.plan_collectives import show_collectives
from zerojax.cli.plan_table import show
from zerojax.cli.planned import Planned, to_json
from zerojax.cli.planning import compile_only, with_attention
from zerojax.cli.problem import explain_error
from zerojax.cli.terminal import spinner
from zerojax.config import ZeroConfig
from zerojax.devices.arranged import arranged
from zerojax.devices.mesh import laid_out
from zerojax.foresight.choice import LIVE
from zerojax.foresight.devices import parse_devices
from zerojax.foresight.gathered import weighed
from zerojax.foresight.remedies import remedies
from zerojax.models.attention import choose_attention
from zerojax.models.registry import find, takes, takes_policy
from zerojax.offload.activations import remat_policy
from zerojax.tuning.study import Study


def run(
    zero_config: ZeroConfig,
    *,
    model: str,
    source: str,
    devices: str,
    batch: int | None,
    seq: int,
    network: str | None,
    mesh_axes: str | None,
    remat: bool | None,
    policy: str | None,
    attention: str | None,
    look: bool,
    picture: Path | None,
    collectives: bool,
    as_json: bool,
) -> bool:
    """Prints the forecast, or the collectives; exits with 2 for bad input.

    Args:
      zero_config: The config, read from ``source``.
      look: Whether to look for settings that fit, if the step does not.
      model, devices, batch, seq, network, mesh_axes, remat, policy, attention, picture,
        collectives, as_json: The options of the command.

    Returns:
      Whether the step fits.
    """
    compile_only(devices)
    with spinner() as progress:
        task = progress.add_task("reading", total=None)

        def note(text: str) -> None:
            progress.update(task, description=f"compiling {text}")

        try:
            function = find(model)
            kept = _kept(function, model, remat, policy)
            mesh, rates = parse_devices(devices, network)
            mesh = laid_out(mesh, mesh_axes) if mesh_axes else mesh
            function = with_attention(function, model, attention)
            study = Study(
                function, zero_config, mesh, rates, rows=batch, seq=seq, remat=kept, note=note
            )
        except (ValueError, ImportError, RuntimeError) as error:
            wrong_input(explain_error(error) or str(error))
        try:
            if collectives:
                show_collectives(study.collectives(study.given), as_json=as_json)
                return True
            selected, forecast = study.given, study.forecast(study.given)
            is_auto = any(
                note.key.endswith(LIVE) and note.value == "auto" for note in zero_config.notes
            )
            gathered = weighed(study, selected) if is_auto else ()
            if gathered:
                selected, forecast = gathered[0].choice, gathered[0].forecast
            alternatives = tuple(remedies(study)) if look and not forecast.fits else None
            stages, refused = (
                ({}, []) if picture is None else plan_picture.forecasts(study.given, study.forecast)
            )
        except Exception as error:
            if (message := explain_error(error, f"model {model!r} cannot be planned")) is None:
                raise
            wrong_input(message)
    implementation = (
        choose_attention(Zero(zero_config, arranged(mesh, zero_config)), attention or "auto")
        if takes(function, "attention")
        else None
    )
    planned = Planned(
        model, source, seq, selected, forecast, alternatives, stages, implementation, gathered
    )
    if picture is not None:
        title = f"{model}, batch {planned.rows} of {seq} tokens on {devices}"
        plan_picture.draw(picture, title, planned.stages)
        for sentence in refused:
            typer.echo(sentence, err=True)
    if as_json:
        print(json.dumps(to_json(planned), indent=2))
    else:
        show(planned)
    return planned.forecast.fits


def _kept(
    function: Callable[..., object], model: str, remat: bool | None, policy: str | None
) -> bool | str:
    """Returns what blocks keep by ``--remat`` and ``--remat-policy``, for a :class:`Study`.

    Raises:
      ValueError: The model does not take an option, or the options or the policy are wrong.
    """
    if remat is not None and not takes(function, "remat"):
        raise ValueError(f"--{'' if remat else 'no-'}remat: model {model!r} takes no `remat`")
    if policy is None:
        return remat is not False
    if not takes_policy(function):
        raise ValueError(f"--remat-policy: model {model!r} takes no `remat` and `remat_policy`")
    if remat is False:
        raise ValueError("--remat-policy: what blocks keep with remat; leave out --no-remat")
    remat_policy(policy)
    return policy
