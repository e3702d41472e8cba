"""`zerojax export CHECKPOINT OUT`: a checkpoint's parameters as safetensors.

`--json` prints an object with these keys:

- `out`: The folder.
- `files`: The names of the files with tensors.
- `tensors`: Their number.
- `nbytes`: Bytes of the tensors.
- `dtypes`: The distinct dtypes.
- `seconds`: Seconds that it took.
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from zerojax.cli.options import AsJson, found_checkpoint, wrong_input
from zerojax.cli.terminal import print_json, progress_bar

if TYPE_CHECKING:
    from zerojax.checkpoint.naming import Names


def export(
    checkpoint: Annotated[str, typer.Argument(help="A folder of steps, or one step's folder.")],
    out: Annotated[str, typer.Argument(help="The folder to write; must be empty or absent.")],
    step: Annotated[int | None, typer.Option(help="This step, not the newest.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16. By default as saved, or of 16 bits where the "
            "run's config has stage3_gather_16bit_weights_on_model_save."
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Of a file, in bytes, or as in 500MB, 5GB, 1GiB.")
    ] = "5GB",
    names: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Names of tensors and other files, as "
            "zerojax.models.hugging_face.gpt2:export_names returns them for transformers' GPT-2.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Writes the parameters in CHECKPOINT to OUT, as safetensors.

    Checks every array against the checkpoint's record. Uses no GPU.

    Exits with 2 for bad input and with 1 if CHECKPOINT is damaged; both leave OUT unchanged.
    """
    checkpoint = found_checkpoint(checkpoint)
    import jax

    from zerojax.checkpoint import CheckpointError, DamagedCheckpointError
    from zerojax.checkpoint.exporter import export as exported

    jax.config.update("jax_platforms", "cpu")  # a GPU may be busy training

    start = time.perf_counter()
    try:
        with progress_bar("writing") as update:
            found = exported(
                checkpoint,
                out,
                step=step,
                dtype=dtype,
                max_shard_size=max_shard_size,
                names=_function(names) if names else None,
                progress=lambda done, todo: update(completed=done, total=todo),
            )
    except DamagedCheckpointError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    except CheckpointError as error:
        wrong_input(error)
    seconds = time.perf_counter() - start
    if as_json:
        print_json(found._asdict() | {"out": out, "seconds": seconds})
        return
    typer.echo(
        f"{out}: {_count(len(found.files), 'file')}, {_count(found.tensors, 'tensor')}, "
        f"{found.nbytes:,} bytes, {' and '.join(found.dtypes)}, {seconds:.1f} s"
    )


def _function(path: str) -> Names:
    from zerojax import weights
    from zerojax.checkpoint import CheckpointError

    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"--names {path}: {error}: pass MODULE:FUNCTION, of PYTHONPATH or the current folder"
        ) from error
    if not callable(found) and not isinstance(found, weights.Names | Mapping):
        raise CheckpointError(
            f"--names {path}: {type(found).__name__} is neither a function nor a map of names: "
            "pass MODULE:FUNCTION"
        )
    return found  # type: ignore[no-any-return]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
