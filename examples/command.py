"""What the examples' commands share: processes joined, and errors of the user's as one line."""

import contextlib
from collections.abc import Iterator

import jax
import typer
from rich.console import Console
from rich.markup import escape

from examples.run_clm.devices import join


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
