"""`zerojax fit`: the settings that are predicted to train fastest.

`--json` prints an object with these keys:

- `ranking`: The choices that fit, the fastest first: choice, and its figures as in `plan --json`.
- `config`: The fastest choice as a DeepSpeed config.
"""

from __future__ import annotations

import os
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
    StepOptions,
    wrong_input,
)
from zerojax.config import ConfigError
from zerojax.config.files import text_of


def fit(
    model: Model,
    config: Annotated[
        Path,
        typer.Option(
            help="A DeepSpeed config, or Accelerate's YAML; keys that it "
            'leaves out, or sets to "auto", are searched.'
        ),
    ],
    devices: Devices,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of an update; searched by default.")
    ] = None,
    seq: Seq = 1024,
    network: Network = None,
    mesh_axes: MeshAxes = None,
    attention: Attention = None,
    auto: Auto = None,
    out: Annotated[Path | None, typer.Option(help="File for the fastest config.")] = None,
    compiles: Annotated[int, typer.Option(min=1, help="At the most.")] = 40,
    minutes: Annotated[float, typer.Option(min=0, help="At the most.")] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Searches stage, micro-batch, accumulation, remat, offload and parameters that stay gathered.

    For a model that takes `remat_policy`, remat includes what blocks keep: results of products, on
    the device or in host memory, and the named values that save the most time for their memory.
    The fastest choice has the most tokens a second. DeepSpeed's section "autotuning" of the config,
    if enabled, bounds the search and may ask for the shortest step instead.

    Every choice in the ranking was compiled and fits. ~/.cache/zerojax keeps results of earlier
    compiles for the same step and devices. "--devices here" means the devices of this machine.

    Exits with 0, with 3 if nothing fits, and with 2 for bad input.
    """
    if out is not None and (out.is_dir() or not os.access(out.resolve().parent, os.W_OK)):
        wrong_input(f"--out {out} cannot be written: create its folder first")
    stood_in = stand_ins(auto or [])
    try:
        text_of(config)
    except ConfigError as error:
        wrong_input(error)
    from zerojax.cli.fit_run import run  # imports JAX

    asked = StepOptions(model, devices, batch, seq, network, mesh_axes, attention, as_json)
    run(config, asked, auto=stood_in, out=out, compiles=compiles, minutes=minutes)
