"""Classify pairs of sentences by a DeBERTa with ZeRO: accuracy and F1.

Command, from the repository root::

    python -m examples.run_glue                             # sentences of the Python library
    python -m examples.run_glue --train-file glue:mrpc --model deberta-v2-xlarge/ \\
        --max-length 128 --per-device-train-batch-size 40 --learning-rate 2e-5 \\
        --num-train-epochs 3 --config accelerate.yaml

Without files a pair is two neighbouring sentences of real text, and its label whether the second
one's words are as written or shuffled: an easy task, made for random weights. The docstrings of the
Python library are the text, or `--text`. The defaults end at accuracy 0.90 to 0.94, by chance 0.51
to 0.57, after one to two minutes.

Files are JSON lines or CSV with the columns of `--columns`, or a name for `datasets`. `--model` is
a size, or a folder as transformers writes it: config.json, safetensors, tokenizer.json.
"""

import pathlib
from typing import Annotated

import typer

import zerojax
from examples.command import command
from examples.run_glue.job import LEARNING_RATE, ROWS, Job
from examples.run_glue.train import train
from zerojax.models.deberta import SIZES

app = typer.Typer(add_completion=False)


@app.command(help="Classify pairs of sentences by a DeBERTa with ZeRO.")
def main(
    config: Annotated[
        pathlib.Path | None, typer.Option(help="DeepSpeed JSON, or Accelerate's YAML; else stage 2")
    ] = None,
    train_file: Annotated[
        str | None, typer.Option(help=".json, .jsonl or .csv, or a dataset such as glue:mrpc")
    ] = None,
    validation_file: Annotated[
        str | None, typer.Option(help="the same; else a dataset's validation, or every tenth row")
    ] = None,
    text: Annotated[
        list[pathlib.Path] | None, typer.Option(help="text to make pairs of; else docstrings")
    ] = None,
    columns: Annotated[
        str, typer.Option(help="two sentences and the label, by name")
    ] = "sentence1,sentence2,label",
    model: Annotated[
        str, typer.Option(help=f"one of {', '.join(SIZES)}, or a folder of transformers' weights")
    ] = "deberta-mini",
    max_length: Annotated[int, typer.Option(min=8, help="tokens in a pair; longer ones cut")] = 128,
    per_device_train_batch_size: Annotated[
        int | None, typer.Option(min=1, help=f"else as the config has it, or {ROWS}")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(min=0, help=f"else as the config has it, or {LEARNING_RATE:g}"),
    ] = None,
    num_train_epochs: Annotated[int, typer.Option(min=0, help="0 evaluates alone")] = 5,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="a folder for the model, as transformers reads it")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    devices: Annotated[
        int | None, typer.Option(min=1, help="how many; else all, or 8 virtual ones on a CPU")
    ] = None,
    remat: Annotated[bool, typer.Option(help="recompute blocks in the backward pass")] = False,
) -> None:
    with command(
        ValueError, FileNotFoundError, PermissionError, ImportError,
        zerojax.DiskError, zerojax.OutOfMemoryError,
    ) as console:  # fmt: skip
        job = Job(
            config=config,
            train_file=train_file,
            validation_file=validation_file,
            text=tuple(text or ()),
            columns=tuple(columns.split(",")),
            model=model,
            max_length=max_length,
            per_device_train_batch_size=per_device_train_batch_size,
            learning_rate=learning_rate,
            num_train_epochs=num_train_epochs,
            out=out,
            seed=seed,
            devices=devices,
            remat=remat,
        )
        result = train(job, console)
    console.print(result.table())


if __name__ == "__main__":
    app()
