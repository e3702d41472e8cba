"""The subcommands of `python -m zerojax`, one file each."""
