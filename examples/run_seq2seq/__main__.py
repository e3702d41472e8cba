"""Train an encoder-decoder with ZeRO, and compare what it writes by beam search: BLEU.

Command, from the repository root::

    python -m examples.run_seq2seq                     # text whose case and punctuation are lost
    python -m examples.run_seq2seq --config accelerate_seq2seq.yaml --dataset_name chats/ \\
        --model_name_or_path blenderbot-400M-distill/ --source_prefix "chatbot: "

With no arguments, on WikiText where it lies beside the repository: BLEU 61, where the sources
themselves have 58, in 2 minutes of two CPU cores (6 beside other work); else on docstrings of
Python's library.
"""

import pathlib
from typing import Annotated

import typer

import zerojax
from examples.command import Command, command
from examples.run_seq2seq.model import SIZES
from examples.run_seq2seq.options import DEFAULT_CONFIG, Options
from examples.run_seq2seq.train import train
from examples.tracking import ReportTo

app = typer.Typer(add_completion=False)
Count = typer.Option(min=1)


@app.command(
    cls=Command, help="Train an encoder-decoder with ZeRO, and compare what it writes by BLEU."
)
def main(
    config: Annotated[
        pathlib.Path, typer.Option(help="DeepSpeed JSON, or Accelerate's YAML")
    ] = DEFAULT_CONFIG,
    dataset_name: Annotated[
        str | None, typer.Option(help="a folder of such files, or a name of `datasets`")
    ] = None,
    dataset_config_name: Annotated[
        str | None, typer.Option(help="a folder within that folder, or a configuration's name")
    ] = None,
    train_file: Annotated[str | None, typer.Option(help=".json, .jsonl, .csv or .parquet")] = None,
    validation_file: Annotated[str | None, typer.Option(help="the same")] = None,
    n_train: Annotated[int | None, typer.Option(min=1, help="the first rows, at most")] = None,
    n_val: Annotated[int | None, typer.Option(min=1, help="the same of those held out")] = None,
    source_column: str = "source",
    target_column: str = "target",
    text: Annotated[
        pathlib.Path | None,
        typer.Option(help="UTF-8 text to restore, without files; else WikiText or docstrings"),
    ] = None,
    words: Annotated[int, typer.Option(min=1, help="of a stretch of that text")] = 6,
    source_prefix: str = "",
    model_name_or_path: Annotated[
        str, typer.Option(help=f"a folder of transformers' weights, or one of {', '.join(SIZES)}")
    ] = "mini",
    max_source_length: Annotated[int, typer.Option(min=2, help="tokens; more are cut")] = 128,
    max_target_length: Annotated[int, typer.Option(min=2, help="tokens; more are cut")] = 64,
    val_max_target_length: Annotated[
        int | None, typer.Option(min=2, help="of what is written; else --max_target_length")
    ] = None,
    val_min_target_length: Annotated[int, typer.Option(min=0)] = 0,
    pad_to_max_length: Annotated[
        bool, typer.Option(help="fill up all rows to those lengths; else to the longest")
    ] = False,
    num_beams: Annotated[int, Count] = 10,
    per_device_train_batch_size: Annotated[int, Count] = 8,
    per_device_eval_batch_size: Annotated[int, Count] = 16,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help='where the config has it "auto"')
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0, help="the same")] = None,
    num_warmup_steps: Annotated[int | None, typer.Option(min=0, help="the same")] = None,
    num_train_epochs: Annotated[int, Count] = 4,
    max_train_steps: Annotated[int | None, typer.Option(min=1, help="updates, at most")] = None,
    output_dir: Annotated[
        pathlib.Path, typer.Option(help="the report, the targets and the model's folder")
    ] = pathlib.Path("runs/seq2seq"),
    with_tracking: Annotated[bool, typer.Option(help="write the run's figures")] = False,
    report_to: Annotated[
        ReportTo | None, typer.Option(help="where to; else all that are installed")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    devices: Annotated[
        int | None, typer.Option(min=1, help="how many; else all, or 8 virtual ones on a CPU")
    ] = None,
) -> None:
    given = locals()
    with command(ValueError, OSError, ImportError, zerojax.OutOfMemoryError) as console:
        train(Options(**given), console)


if __name__ == "__main__":
    app()
