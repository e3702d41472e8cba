"""Options that several commands have. This module imports no JAX."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import typer

SUFFIXES = (".png", ".svg")
"""The suffixes of pictures."""

Model = Annotated[
    str, typer.Option(help="A name, such as llama-7b, or module:function for your own model.")
]
Devices = Annotated[
    str,
    typer.Option(
        metavar="KIND:N", help="Such as h100:8, which may be absent; here for this machine's."
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="SPEED",
        help="Between nodes, each way: 400gb (gigabits a second) for each device, 3.2tb/host, or a "
        "name, such as ib-ndr or a3-mega; default: that of the kind of device.",
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        metavar="auto|mosaic_gpu|cudnn|plain",
        help="For a model that takes `attention`. auto: mosaic_gpu where tokamax is installed and "
        "the GPUs are Hopper or newer, else plain; cudnn is assumed for GPUs that are absent.",
    ),
]
MeshAxes = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXIS=N,...",
        help='Of the devices, outermost first, such as data=4,model=2: "model" splits GPTs and '
        "Llamas (tensor parallelism), seq a row's tokens, replica adds groups; default: all data.",
    ),
]
Seq = Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Tokens in a row.")]
Auto = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help='The value of an "auto", as for explain.'),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


class StepOptions(NamedTuple):
    """The options that `plan` and `fit` share, as given."""

    model: str
    devices: str
    batch: int | None
    seq: int
    network: str | None
    mesh_axes: str | None
    attention: str | None
    as_json: bool


def wrong_input(message: object) -> NoReturn:
    """Prints the message on stderr and exits with 2, the status for input that must change."""
    typer.echo(message, err=True)
    raise typer.Exit(2)


def found_checkpoint(checkpoint: str) -> str:
    """Returns the folder of a checkpoint: the given one, or the folder ``checkpoints`` in it, in
    which Trainer and the examples save. Exits with 2 if there is none; buckets are not looked at.
    """
    if "://" in checkpoint:
        return checkpoint
    if not Path(checkpoint).exists():
        wrong_input(f"{checkpoint} does not exist (looked in {Path.cwd()}); check the path")
    below = Path(checkpoint, "checkpoints")
    return str(below) if below.is_dir() else checkpoint


def check_picture(path: Path) -> None:
    """Refuses a path to which no picture can be written.

    Raises:
      ValueError: The suffix is unknown, or the folder does not exist.
      ImportError: matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--picture {path}: name a file that ends in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"--picture {path}: {path.parent} does not exist; create it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--picture needs matplotlib: pip install -e '.[examples]'")
