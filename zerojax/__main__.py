"""`python -m zerojax COMMAND`: one command for each file in `zerojax/cli`."""

import typer

from zerojax.cli.estimate import estimate
from zerojax.cli.explain import explain
from zerojax.cli.export import export
from zerojax.cli.fit import fit
from zerojax.cli.inspect import inspect
from zerojax.cli.plan import plan
from zerojax.cli.report import report

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command()(estimate)
app.command()(explain)
app.command()(export)
app.command()(fit)
app.command()(inspect)
app.command()(plan)
app.command()(report)


@app.callback()
def main() -> None:
    """ZeRO for JAX, from the command line."""


if __name__ == "__main__":
    app(prog_name="python -m zerojax")
