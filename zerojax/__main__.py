"""The console command ``zerojax``, and ``python -m zerojax``: one subcommand a file in ``cli``."""

import os
import sys

import typer

from zerojax.cli.estimate import estimate
from zerojax.cli.explain import explain
from zerojax.cli.export import export
from zerojax.cli.fit import fit
from zerojax.cli.inspect import inspect
from zerojax.cli.plan import plan
from zerojax.cli.report import report
from zerojax.distributed.failure import leave
from zerojax.distributed.launched import launched

_IN_EACH_PROCESS = (["report"], ["launch"])
"""The subcommands for which every process of a launch is needed; others run in the first alone."""

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command()(estimate)
app.command()(explain)
app.command()(export)
app.command()(fit)
app.command()(inspect)
app.command()(plan)
app.command()(report)


@app.callback()
def about() -> None:
    """ZeRO for JAX, from the command line."""


def main() -> None:
    """Run the command in ``sys.argv``. Help and errors name the program as it was called."""
    given = dict(os.environ)
    set_environment()
    me = launched(given)
    if me is not None and sys.argv[1:2] not in _IN_EACH_PROCESS:
        leave("joined", me.index)  # the others are not needed
        if me.index:
            return
    app(obj=given)


def set_environment() -> None:
    """Set the variables that JAX and XLA read once, when they start.

    They have no other switch. This process is the user's command, so that nothing else of theirs
    runs in it; the library sets no variable.
    """
    # `report` takes a few MB of a GPU, not three quarters of it: another program may be running.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # XLA warns on stderr of programs that do not fit, which `plan` and `fit` compile on purpose.
    # jax itself sets 1 when it is imported.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") in (None, "1"):
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"


if __name__ == "__main__":
    main()
