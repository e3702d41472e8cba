"""`zerojax plan`: memory, traffic and time of a step, without its devices.

`--json` prints an object with these keys:

- `model`: As given.
- `config`: The path.
- `devices`: Their number; their kind is in rates.
- `mesh`: The size of each axis.
- `rows`: Rows of an update, over all devices.
- `seq`: Tokens in a row.
- `attention`: The implementation; null for a model that has its own.
- `pipeline`: stages, micro_batches, ticks, bubble; null without stages.
- `parameters`: Their number.
- `choice`: The settings of the config that decide memory: stage, micro, accumulation, remat,
  offload, live; pipeline is for `fit`.
- `fits`: Whether the step fits.
- `is_complete`: Whether every program was compiled; without them no figure of time is there.
- `memory`: Bytes of a device at the peak, by kind.
- `peak`: Their sum.
- `program`: The program that has the peak.
- `headroom`: Bytes of a device that are left at the peak.
- `recomputes_above`: Bytes above which XLA computes values again.
- `host_bytes`: Host memory for each device.
- `disk_bytes`: Disk space for each device.
- `stay_gathered`: elements, bytes and saved, of the parameters that stay gathered at stage 3.
- `seconds`: Predicted time of a step.
- `tokens`: Tokens in a step.
- `tokens_per_second`: Over all devices.
- `mfu`: Model FLOPs utilization.
- `bytes_again`: Bytes of the values that XLA computes again to save memory.
- `seconds_again`: The part of the time that these take.
- `boundary`: Bytes of the largest array that pipeline stages send.
- `reserve`: Bytes of a device that no step can use.
- `mem_fraction`: XLA_PYTHON_CLIENT_MEM_FRACTION for the step; null if JAX's default suffices.
- `programs`: The fields of zerojax.foresight.forecast.ProgramCost, for each program.
- `traffic`: The fields of zerojax.foresight.forecast.Traffic, for each kind of collective or copy.
- `rates`: The fields of zerojax.devices.rates.Rates.
- `remedies`: set and the figures of each choice that fits; null if none were searched for.
- `stages`: Memory by kind for each stage, with --picture.
- `compile_seconds`: Seconds of all compiles.
- `collectives`: With --collectives, one object a collective.
- `bytes_a_step`: With --collectives, bytes that each device sends, by kind; there is no other key.
- `generation`: With --generate, the only key: rows, prompt, new, fits, peak, on_host,
  tokens_per_second, least_seconds, and the fields of
  zerojax.generation.forecast.GenerationForecast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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
    StepOptions,
    check_picture,
    wrong_input,
)
from zerojax.config import load


def plan(
    model: Model,
    config: Annotated[Path, typer.Option(help="A DeepSpeed config in JSON, or Accelerate's YAML.")],
    devices: Devices,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of an update, over all devices; default: the config's."),
    ] = None,
    seq: Seq = 1024,
    network: Network = None,
    mesh_axes: MeshAxes = None,
    remat: Annotated[
        bool | None,
        typer.Option(
            "--remat/--no-remat",
            help="Blocks save only their input, if the model takes `remat`; on by default.",
        ),
    ] = None,
    remat_policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What blocks save besides their input, if the model takes it: a name for "
            "zerojax.remat_policy, such as dots_no_batch or names:a,b.",
        ),
    ] = None,
    attention: Attention = None,
    auto: Auto = None,
    look: Annotated[
        bool,
        typer.Option("--remedies/--no-remedies", help="If it does not fit, search what does."),
    ] = True,
    picture: Annotated[
        Path | None,
        typer.Option(help="A .png or .svg of the memory at each stage; compiles every stage."),
    ] = None,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives",
            help="The all-gathers and reductions that zerojax decides on, with the model's lines, "
            "instead of the forecast; compiles nothing.",
        ),
    ] = False,
    generate: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Forecasts zerojax.generate instead of the step: N new tokens of each of --batch "
            "rows (one per data device by default), after prompts of --seq tokens.",
        ),
    ] = None,
    weights: Annotated[
        Literal["gathered", "by_layer"] | None,
        typer.Option(help="With --generate, as there; default: gathered if they fit."),
    ] = None,
    quantize: Annotated[
        Literal["int8", "int4"] | None,
        typer.Option(help="With --generate, of the parameters; default: bfloat16."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows the needs of a training step on each device: memory by kind, traffic, predicted time.

    The step is compiled for devices that need not exist; nothing runs. If the step does not fit,
    other settings are compiled, until three are found that fit. With --generate the programs of
    zerojax.generate are compiled instead of the step.

    Exits with 0 if the step fits, with 3 if it does not, and with 2 for bad input.
    """
    options = {
        "--remat" if remat else "--no-remat": remat is not None,
        "--remat-policy": remat_policy is not None,
        "--no-remedies": not look,
        "--picture": picture is not None,
        "--collectives": collectives,
    }
    extra = {"--weights": weights is not None, "--quantize": quantize is not None}
    for option, is_given in (extra if generate is None else options).items():
        if is_given:
            where = "without" if generate is None else "beside"
            remedy = ", or add --generate N" if generate is None else ""
            wrong_input(f"{option} has no effect {where} --generate: remove it{remedy}")
    if picture is not None and collectives:
        wrong_input("--picture draws memory, which --collectives does not compute: remove one")
    if remat_policy is not None and remat is False:
        wrong_input("--remat-policy and --no-remat exclude each other: remove one")
    try:
        if picture is not None:
            check_picture(picture)
        zero_config = load(config, auto=stand_ins(auto or []))
    except (ValueError, ImportError) as error:
        wrong_input(error)
    from zerojax.cli import plan_generate, plan_run  # import JAX

    asked = StepOptions(model, devices, batch, seq, network, mesh_axes, attention, as_json)
    kept = remat_policy or remat
    if generate is not None:
        bits = None if quantize is None else int(quantize.removeprefix("int"))
        fits = plan_generate.run(zero_config, asked, new=generate, weights=weights, bits=bits)
    elif collectives:
        fits = plan_run.show_decided(zero_config, asked, remat=kept)
    else:
        fits = plan_run.run(zero_config, asked, str(config), remat=kept, look=look, picture=picture)
    if not fits:
        raise typer.Exit(3)
