"""The command `muster`."""
