"""The main job's model in int8 or int4, and the share of its held-out loss that this costs.

Command, from the repository root::

    python -m examples.run_clm                                     # a checkpoint in runs/clm
    python -m examples.quantize --run runs/clm --bits 4 --max_loss 2%

It takes 15 CPU seconds. Above `--max_loss` it is an error, so that a script stops before it hands
the weights over::

    held-out loss 2.2313, quantized 2.23309: +0.08%
"""

import pathlib
from typing import Annotated, Any

import jax
import numpy as np
import typer

import zerojax
from examples.command import Command, command
from examples.generate import restored
from examples.run_clm import data
from zerojax.checkpoint import CheckpointError

ROWS, BATCHES = 16, 4

app = typer.Typer(add_completion=False)


def share(text: str) -> float:
    """Returns a share: of "2%", as of "0.02", 0.02."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a share: write 2% or 0.02") from None


@app.command(cls=Command, help="Quantize the main job's newest checkpoint, and report the loss.")
def main(
    run: Annotated[
        pathlib.Path, typer.Option(help="--output_dir of examples.run_clm")
    ] = pathlib.Path("runs/clm"),
    text: Annotated[
        list[pathlib.Path] | None, typer.Option(help="the files that the run trained on")
    ] = None,
    bits: Annotated[int, typer.Option(help="8 or 4")] = 8,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="inputs that share a scale; else all of an output")
    ] = None,
    max_loss: Annotated[
        float | None, typer.Option(parser=share, metavar="SHARE", help="the most to lose, as 2%")
    ] = None,
) -> None:
    with command(ValueError, OSError, CheckpointError) as console:
        model, params, trained_on = restored(run)
        documents = [data.read_text(path) for path in text or ()] or data.python_sources()
        split = data.split(documents, model.config.block_size)
        if not trained_on.startswith(split.fingerprint):
            raise ValueError(
                f"--run {run} trained on {trained_on}, and this text has {split.fingerprint} to "
                "train on: name the files of its --text in the same order"
            )
        batches: Any = data.Batches(split.held_out, ROWS, model.config.block_size).spread(BATCHES)

        @zerojax.zero(stage=3).evaluate
        def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
            losses: Any = model.apply({"params": params}, inputs, targets=targets)
            return losses.mean()  # type: ignore[no-any-return]

        quantized = zerojax.quantize_weights(params, bits, group_size=group_size)
        before, after = np.mean([(loss(params, x), loss(quantized, x)) for x in batches], 0)
        lost = after / before - 1
        console.print(f"held-out loss {before:.6g}, quantized {after:.6g}: {lost:+.2%}")
        if max_loss is not None and not lost <= max_loss:
            raise ValueError(
                f"quantization loses {lost:.2%}, more than --max_loss {max_loss:.2%}: write "
                "--bits 8 or a smaller --group_size"
            )


if __name__ == "__main__":
    app()
