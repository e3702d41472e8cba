"""`zerojax config`: a DeepSpeed JSON or Accelerate's YAML, by question and answer."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.prompt import Confirm

from zerojax.cli import terminal
from zerojax.cli.config_answers import Answers, ask, to_json, to_yaml
from zerojax.cli.options import wrong_input
from zerojax.config.yaml_file import ENDINGS
from zerojax.launch.error import UsageError
from zerojax.launch.gpus import gpus

_SUFFIXES = (".json", *ENDINGS)


def config(
    context: typer.Context,
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Ends in .json: a DeepSpeed JSON; in .yaml: Accelerate's YAML."
        ),
    ] = Path("ds_config.json"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Take every default.")] = False,
) -> None:
    """Writes a DeepSpeed JSON or Accelerate's YAML by question and answer.

    The defaults follow from the devices of this machine. The JSON is for zerojax.zero(FILE) and
    TrainingArguments(deepspeed=FILE); the YAML, with the number of processes and machines, is for
    zerojax launch --config-file FILE too.

    Exits with 0, with 1 if FILE exists and stays, and with 2 for bad input.
    """
    if output.suffix not in _SUFFIXES:
        wrong_input(f"--output {output}: give a file that ends in {' or '.join(_SUFFIXES)}")
    folder = output.resolve().parent
    if output.is_dir() or not os.access(folder, os.W_OK):
        wrong_input(f"--output {output}: no file can be written there")
    if yes and output.exists():
        wrong_input(f"--output {output} exists: give another file, or remove it")
    console, as_yaml = terminal.console(), output.suffix in ENDINGS
    try:
        answers = found(context.obj or os.environ, console)
        if not yes:
            console.print("An empty answer takes the default in parentheses.")
            answers = ask(console, answers, as_yaml)
        text = to_yaml(answers) if as_yaml else to_json(answers)
        console.print(f"\n{text}", markup=False, soft_wrap=True)
        if output.exists() and not Confirm.ask(
            f"{output} exists. Overwrite the file?", default=False, console=console
        ):
            raise typer.Exit(1)
    except UsageError as error:
        wrong_input(error)
    except EOFError:
        wrong_input("\nThe input ended before the last answer; --yes takes every default")
    try:
        output.write_text(text)
    except OSError as error:
        wrong_input(f"--output {output} cannot be written: {error.strerror}")
    console.print(f"Written to {output}. Next:", markup=False)
    for line in next_commands(output, answers, as_yaml):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def found(environ: Mapping[str, str], console: Console) -> Answers:
    """Returns the defaults for the devices of this machine, and prints their number.

    Raises:
      UsageError: ``CUDA_VISIBLE_DEVICES`` names a GPU that is not there.
    """
    count = len(gpus(environ))
    console.print(f"This machine has {count} GPU{'s' * (count != 1)}." if count else "No GPU here.")
    return Answers(devices=max(1, count), on_cpu=not count, precision="bf16" if count else "no")


def next_commands(output: Path, answers: Answers, as_yaml: bool) -> list[str]:
    """Returns the commands that check the file and train with it."""
    file = shlex.quote(str(output))
    explain = f"python -m zerojax explain {file} --devices {answers.devices}"
    if as_yaml:
        return [explain, f"python -m zerojax launch --config-file {file} train.py"]
    return [explain, f"zerojax.zero({str(output)!r})  # in train.py", "python train.py"]
