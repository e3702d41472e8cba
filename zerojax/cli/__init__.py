"""The subcommands of `zerojax`, one file each."""
