"""Adapter: the machine's users: who runs this."""

import getpass
import os


def name() -> str:
    """Return the user's name; in a container, which may have no names, the number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
