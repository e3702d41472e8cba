"""The console command ``zerojax`` and ``python -m zerojax``; subcommands are files of ``cli``."""

import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from zerojax.distributed.failure import leave
from zerojax.distributed.launched import launched

_IN_EACH_PROCESS = (["report"], ["launch"])
"""The subcommands that every process of a launch runs; only process 0 runs the others."""

COMMANDS = {
    "estimate": "Memory of a model by DeepSpeed's formulas.",
    "explain": "The effect of every key of a config.",
    "export": "A checkpoint's parameters as safetensors.",
    "fit": "The settings that train fastest.",
    "inspect": "The contents of a checkpoint, checked.",
    "launch": "A script in several processes.",
    "plan": "Memory, traffic and time of a step.",
    "report": "This machine, and what works on it.",
}
"""The subcommands, with their line in the help."""


class Commands(TyperGroup):
    """The subcommands, each imported on its first use, so that ``launch`` starts without JAX."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:  # for a shell's completion
                return None
            # Imported here: it takes longer than all that ``launch`` needs.
            from zerojax.config.errors import closest

            guess = closest(cmd_name, COMMANDS)
            hint = f"did you mean {guess!r}?" if guess else f"there are {', '.join(COMMANDS)}"
            ctx.fail(f"No such command {cmd_name!r}: {hint}")
        module = import_module(f"zerojax.cli.{cmd_name}")
        command = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = getattr(module, "SETTINGS", None)
        line = COMMANDS[cmd_name]
        command.command(cmd_name, context_settings=settings, short_help=line)(
            getattr(module, cmd_name)
        )
        return typer.main.get_command(command)


app: typer.Typer = typer.Typer(
    cls=Commands, no_args_is_help=True, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"zerojax {version('zerojax')}, jax {version('jax')}")
        raise typer.Exit


@app.callback()
def about(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions.")
    ] = False,
) -> None:
    """ZeRO for JAX, from the command line."""


def main() -> None:
    """Runs the command in ``sys.argv``. Help and errors name the program as it was called."""
    open_standard_streams()
    given = dict(os.environ)
    set_environment()
    me = launched(given)
    if me is not None and sys.argv[1:2] not in _IN_EACH_PROCESS:
        leave("joined", me.index)  # process 0 runs the command
        if me.index:
            return
    app(obj=given)


def open_standard_streams() -> None:
    """Opens ``/dev/null`` for each standard stream that the caller closed, as with ``2>&-``.

    Otherwise the next opened file would take the number of the stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def set_environment() -> None:
    """Sets the environment variables that JAX and XLA read only once, when they start.

    These settings have no other switch. This process runs only the command and no other code of
    the user; the library itself sets no variable. Processes that ``launch`` starts get the original
    environment.
    """
    # `report` needs a few MB of a GPU, not three quarters: another program may be using it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # XLA warns on stderr of programs that do not fit, which `plan` and `fit` compile on purpose.
    # jax itself sets 1 when it is imported.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") in (None, "1"):
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"


if __name__ == "__main__":
    main()
