"""The subcommands of `triptych`."""
