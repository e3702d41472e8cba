"""The subcommands of `zerojax`: each has a file of its name with a function of that name.

`zerojax/__main__.py` imports a subcommand on its first use. Options come in; a command prints a
table (or JSON, with `--json`, whose keys the file's first lines describe) and exits with
a status that its docstring, the text of `--help`, explains. These files import no JAX, so that help
and messages on wrong paths come at once. The other files are shared or split off:

- `terminal`: tables, JSON and progress bars. `problem`: messages for errors of the input.
- `options`: options that several commands have, and checks of paths.
- `fit_run`, `plan_run`, `plan_generate`: the work of a command, with JAX. `planning`: functions
  that `plan` and `fit` share.
- `planned`: the results of `plan`; `plan_table`, `plan_picture`: their output.
- `inspect_table`: the output of `inspect`. `machine`: what `report` finds.
"""
