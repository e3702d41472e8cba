"""`zerojax report`: this machine, and the features that work on it.

`--json` prints an object with these keys:

- `python`: The version of Python.
- `devices`: One object a kind of device.
- `packages`: name, version, wanted and remedy of each package.
- `settings`: name, value and says of each environment variable.
- `extras`: name, installed, missing and remedy of each extra.
- `works`: name, works, seconds and says of each check.
- `problem`: The reason for which JAX finds no devices; null if it finds some.
"""

from __future__ import annotations

import json

import typer

from zerojax.cli.options import AsJson


def report(
    context: typer.Context,
    as_json: AsJson = False,
) -> None:
    """Shows devices, versions and extras, and the features of zerojax that work with them.

    The report tries a step of a tiny model at each stage and with each offload, and a compile for
    absent devices. This takes seconds, and leaves a GPU's memory to other programs.

    If started as one of several processes, the report joins the others, and process 0 prints.

    Exits with 0, or with 1 if JAX finds no devices.
    """
    import jax

    from zerojax.cli.report_table import show, to_json
    from zerojax.distributed.join import init_distributed
    from zerojax.doctor.report import report as reported  # imports the kernels

    init_distributed()
    found = reported(context.obj)  # the environment before `main` set its own variables
    if jax.distributed.is_initialized() and jax.process_index():
        return
    if as_json:
        print(json.dumps(to_json(found), indent=2))
    else:
        show(found)
    if found.problem is not None:
        raise typer.Exit(1)
