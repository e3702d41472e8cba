"""Classify pairs of sentences by a DeBERTa with ZeRO: accuracy and F1.

Command, from the repository root::

    python -m examples.run_glue                             # sentences of the Python library
    python -m examples.run_glue --config accelerate_cls.yaml --task_name mrpc \\
        --model_name_or_path deberta-v2-xlarge/ --max_length 128 --learning_rate 2e-5 \\
        --per_device_train_batch_size 40 --num_train_epochs 3

Without files a pair is two neighbouring sentences of real text, and its label whether the second
one's words are as written or shuffled: an easy task, made for random weights. The docstrings of the
Python library are the text, or `--text`. The defaults end at accuracy 0.90 to 0.94, by chance 0.51
to 0.57, after one to two minutes.

Files are JSON lines, CSV or parquet with the columns of `--columns`; `--dataset_name` is a folder
of them, or a name for `datasets`, as is glue, which `--task_name` takes. `--model_name_or_path` is
a size, or a folder as transformers writes it: config.json, safetensors, tokenizer.json.
"""

import pathlib
from typing import Annotated

import typer

import zerojax
from examples.command import Command, command
from examples.run_glue.job import LEARNING_RATE, ROWS, TASKS, Job
from examples.run_glue.train import train
from examples.tracking import ReportTo
from zerojax.models.deberta import SIZES

app = typer.Typer(add_completion=False)


@app.command(cls=Command, help="Classify pairs of sentences by a DeBERTa with ZeRO.")
def main(
    config: Annotated[
        pathlib.Path | None, typer.Option(help="DeepSpeed JSON, or Accelerate's YAML; else stage 2")
    ] = None,
    task_name: Annotated[
        str | None,
        typer.Option(help=f"of GLUE, by `datasets` or --dataset_name: {', '.join(TASKS)}"),
    ] = None,
    dataset_name: Annotated[
        str | None, typer.Option(help="a folder of such files, or a name of `datasets`")
    ] = None,
    dataset_config_name: Annotated[
        str | None, typer.Option(help="a folder within that folder, or a configuration's name")
    ] = None,
    train_file: Annotated[str | None, typer.Option(help=".json, .jsonl, .csv or .parquet")] = None,
    validation_file: Annotated[
        str | None, typer.Option(help="the same; else every tenth row")
    ] = None,
    text: Annotated[
        list[pathlib.Path] | None, typer.Option(help="text to make pairs of; else docstrings")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="two sentences and the label; else the task's, as for mrpc"),
    ] = None,
    model_name_or_path: Annotated[
        str, typer.Option(help=f"one of {', '.join(SIZES)}, or a folder of transformers' weights")
    ] = "deberta-mini",
    ignore_mismatched_sizes: Annotated[
        bool, typer.Option(help="a new head where the folder's has another number of labels")
    ] = False,
    max_length: Annotated[int, typer.Option(min=8, help="tokens in a pair; longer ones cut")] = 128,
    pad_to_max_length: Annotated[
        bool, typer.Option(help="fill up all pairs to that; else to the longest")
    ] = False,
    per_device_train_batch_size: Annotated[
        int | None, typer.Option(min=1, help=f"else as the config has it, or {ROWS}")
    ] = None,
    per_device_eval_batch_size: Annotated[
        int | None, typer.Option(min=1, help="else the rows of an update")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(min=0, help=f"else as the config has it, or {LEARNING_RATE:g}"),
    ] = None,
    num_train_epochs: Annotated[int, typer.Option(min=0, help="0 evaluates alone")] = 5,
    output_dir: Annotated[
        pathlib.Path | None, typer.Option(help="a folder for the model, as transformers reads it")
    ] = None,
    with_tracking: Annotated[bool, typer.Option(help="write the run's figures")] = False,
    report_to: Annotated[
        ReportTo | None, typer.Option(help="where to; else all that are installed")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    devices: Annotated[
        int | None, typer.Option(min=1, help="how many; else all, or 8 virtual ones on a CPU")
    ] = None,
    remat: Annotated[bool, typer.Option(help="recompute blocks in the backward pass")] = False,
) -> None:
    with command(
        ValueError, OSError, ImportError,
        zerojax.DiskError, zerojax.OutOfMemoryError,
    ) as console:  # fmt: skip
        job = Job(
            config=config,
            task_name=task_name,
            dataset_name=dataset_name,
            dataset_config_name=dataset_config_name,
            train_file=train_file,
            validation_file=validation_file,
            text=tuple(text or ()),
            columns=tuple(columns.split(",")) if columns is not None else None,
            model_name_or_path=model_name_or_path,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            max_length=max_length,
            pad_to_max_length=pad_to_max_length,
            per_device_train_batch_size=per_device_train_batch_size,
            per_device_eval_batch_size=per_device_eval_batch_size,
            learning_rate=learning_rate,
            num_train_epochs=num_train_epochs,
            output_dir=output_dir,
            with_tracking=with_tracking,
            report_to=report_to,
            seed=seed,
            devices=devices,
            remat=remat,
        )
        result = train(job, console)
    console.print(result.table())


if __name__ == "__main__":
    app()
