"""The subcommands of `zerojax`: each has a file of its name with a function of that name.

`zerojax/__main__.py` imports a subcommand on its first use. Options come in; a command prints a
table (most also print JSON, with `--json`) and exits with a status that its docstring, the text of
`--help`, explains. The other files are shared or split off:

- `terminal`: tables and progress bars. `problem`: messages for errors of the input.
- `planning`: options and functions that `plan` and `fit` share.
- `planned`: the results of `plan`; `plan_table`, `plan_picture`, `plan_collectives`: their output.
- `launch_cluster`: `launch` on Slurm, Kubernetes or Ray.
"""
