"""`zerojax report`: this machine's devices and versions.

`--json` prints an object with these keys:

- `python`: The version of Python.
- `devices`: One object a kind of device.
- `packages`: name, version, wanted and remedy of each package.
- `environment`: The variables of JAX, XLA, CUDA, NCCL and zerojax that are set, by name.
- `extras`: name, installed, missing and remedy of each extra.
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
    """Shows devices, versions, extras, and the environment variables that are set.

    If started as one of several processes, the report joins the others, and process 0 prints.

    Exits with 0, or with 1 if JAX finds no devices.
    """
    import jax

    from zerojax.cli.report_table import show, to_json
    from zerojax.distributed.join import init_distributed
    from zerojax.doctor.report import report as reported

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
