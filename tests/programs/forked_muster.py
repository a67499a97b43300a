"""Runs the command `muster` many times in forks of one process, which imports it only once.

Each command has the arguments, environment, directory and standard streams that it would have as a
separate process.

python forked_muster.py            each line of standard input has a file for the output and the
                                   arguments, quoted as by a shell; each exit code is printed
python forked_muster.py DESCRIPTOR a socket for requests; see `tests/worlds/muster_command.py`
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import shlex
import socket
import sys
import tempfile
import time
from typing import NoReturn

import kubernetes.aio.client
import kubernetes.client
import prometheus_client

from muster.cli import registry

OF_DEVELOPERS = {"demo", "up"}
"""Commands that import much, and are run rarely."""
IMPORTED_LATER = (
    kubernetes.aio.client.ApiClient,
    kubernetes.client.ApiClient,
    prometheus_client.REGISTRY,
)
"""Names that commands import only when they need them."""
DESCRIPTORS = 4
SLOW_S = 80.0
"""After this time a command prints its tracebacks; less than `WAIT_S` in `muster_command.py`."""
REQUEST_MAX = 1 << 17


def prepare() -> None:
    """Import the modules of commands in advance, which takes longer than running commands."""
    for name, target in registry.targets().items():
        if name not in OF_DEVELOPERS:
            importlib.import_module(target.partition(":")[0])
    gc.freeze()  # garbage collection in a child would copy all these pages


def muster(arguments: list[str], *, stdin: int, stdout: int, stderr: int) -> NoReturn:
    """Run the command in this process, with these standard streams."""
    for ours, theirs in enumerate((stdin, stdout, stderr)):
        os.dup2(theirs, ours)
    faulthandler.dump_traceback_later(SLOW_S, file=2)
    tempfile.tempdir = None  # read it again from this environment
    sys.argv = ["muster", *arguments]
    # this import reads sys.argv
    from muster.cli import __main__  # noqa: PLC0415

    code = __main__.main()
    sys.stdout.flush()
    os._exit(code)  # skip the clean-up of imported modules


def waited_for(child: int) -> int:
    """Wait until a child of this process has ended; return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(file: str, arguments: list[str]) -> int:
    """Run the command in a child of this process; return its exit code."""
    child = os.fork()
    if child:
        return waited_for(child)
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    stdin = os.open(os.devnull, os.O_RDONLY)
    muster(arguments, stdin=stdin, stdout=output, stderr=output)


def answer(request: bytes, reply: int, stdin: int, stdout: int, stderr: int) -> None:
    """Run the command in a child of this process; send its exit code."""
    child = os.fork()
    if child:
        os.write(reply, str(waited_for(child)).encode())
        return
    os.close(reply)
    wanted = json.loads(request)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    time.tzset()
    os.chdir(wanted["directory"])
    muster(wanted["arguments"], stdin=stdin, stdout=stdout, stderr=stderr)


def serve(requests: socket.socket) -> None:
    """Answer requests until the other end of the socket is closed."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, REQUEST_MAX, DESCRIPTORS)
        if not request:
            return
        if not os.fork():
            requests.close()
            answer(request, *descriptors)
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        # reap children that have ended, so that their CPU time counts as this process's
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    gc.disable()
    prepare()
    gc.enable()
    if len(sys.argv) > 1:
        with socket.socket(fileno=int(sys.argv[1])) as asked:
            serve(asked)
    else:
        for line in sys.stdin:
            file, *arguments = shlex.split(line)
            sys.stdout.write(f"{run(file, arguments)}\n")
            sys.stdout.flush()
