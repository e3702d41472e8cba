"""`zerojax inspect CHECKPOINT`: the contents of a checkpoint, and a check for damage.

`--json` prints an object with these keys:

- `checkpoint`: The folder.
- `newest_intact`: The newest step without damage; null if there is none.
- `unfinished`: Folders of saves that have not ended.
- `deleted`: Folders of steps that are being deleted.
- `steps`: One object a step: step, folder, status, saved, form, arrays, bytes, bytes_by_dtype,
  bytes_on_disk, problems, notes, what the record has, and leaves with --leaves.
"""

from __future__ import annotations

from typing import Annotated

import typer

from zerojax.cli.options import AsJson, found_checkpoint, wrong_input
from zerojax.cli.terminal import progress_bar


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A folder of steps, or one step's folder.")],
    step: Annotated[int | None, typer.Option(help="Look only at this step.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare records and files, read no arrays.")
    ] = False,
    leaves: Annotated[
        bool, typer.Option("--leaves", help="List the arrays of the newest or the chosen step.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Lists the contents of the steps of CHECKPOINT, and reads every array to check it for damage.

    Exits with 0 if no step is damaged, with 1 if a step is, and with 2 if there is no step.
    """
    checkpoint = found_checkpoint(checkpoint)
    import jax

    from zerojax.checkpoint import CheckpointError
    from zerojax.checkpoint.inspection import inspect as inspected
    from zerojax.cli.inspect_table import print_json, show

    jax.config.update("jax_platforms", "cpu")  # a GPU may be busy training

    try:
        with progress_bar("reading") as update:
            inspection = inspected(
                checkpoint,
                quick=quick,
                step=step,
                progress=lambda done, todo: update(completed=done, total=todo),
            )
    except CheckpointError as error:
        wrong_input(error)
    if as_json:
        print_json(inspection, leaves=leaves)
    else:
        show(inspection, leaves=leaves, only_one_step=step is not None)
    if inspection.damaged:
        raise typer.Exit(1)
