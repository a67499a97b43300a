"""A process that runs the command `muster` again and again without importing it again.

Each line of standard input has a file for the output and the arguments, quoted as by a shell.
The command runs in a fork of this process; its exit code is written to standard output.

python forked_muster.py
"""

import os
import shlex
import sys

import kubernetes.client

from muster.cli import cluster, dlq, events, health, keyfiles, silence
from muster_labeler.cli import label_gpus
from muster_plugin.config import files

IMPORTED = (
    cluster,
    dlq,
    events,
    files,
    health,
    keyfiles,
    kubernetes.client,
    label_gpus,
    silence,
)
"""What commands would import by themselves, which takes longer than they do."""


def run(file: str, arguments: list[str]) -> int:
    """Run the command in a child of this process; return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["muster", *arguments]
    # reads the arguments when it is imported
    from muster.cli import __main__  # noqa: PLC0415

    sys.exit(__main__.main())


if __name__ == "__main__":
    for line in sys.stdin:
        file, *arguments = shlex.split(line)
        sys.stdout.write(f"{run(file, arguments)}\n")
        sys.stdout.flush()
