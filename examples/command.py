"""What the examples' commands share: options, processes joined, and errors of the user's as one
line."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from examples.run_clm.devices import join


class Command(TyperCommand):
    """A command whose options are spelled with underscores, as those of transformers' scripts:
    `--max_length 128`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:
            parameter.opts = [
                f"--{x[2:].replace('-', '_')}" for x in parameter.opts if x[:2] == "--"
            ]
            parameter.secondary_opts = []


@contextlib.contextmanager
def command(*errors: type[Exception]) -> Iterator[Console]:
    """Joins the processes of a run and gives the console of the first.

    One of `errors` is printed as one line, and the command ends with status 2. Among several
    processes it passes on: it ends all of them, and is shown once by what launched them.
    """
    join()
    alone = not jax.distributed.is_initialized()
    try:
        yield Console(highlight=False, soft_wrap=True, quiet=not alone and jax.process_index() > 0)
    except errors as error:
        if not alone:
            raise
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from None
