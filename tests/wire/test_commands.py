"""Who runs a command, where the machine may have no name for it."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from muster import commands
os.setuid(int(sys.argv[1]))
print(commands.user_name())
"""
NAMELESS = "54321"


def test_a_user_without_a_name_is_a_number() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    named = {"LOGNAME", "USER", "LNAME", "USERNAME"}
    environment = {key: value for key, value in os.environ.items() if key not in named}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, NAMELESS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"user {NAMELESS}\n"
