"""Runs the command `muster` without the imports that take most of its time.

It runs in forks of one process: see `tests/programs/forked_muster.py`.
`tests/flow/test_extras.py` starts the commands as separate processes.
"""

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

PROGRAM: Final = Path(__file__).parents[1] / "programs/forked_muster.py"
WAIT_S: Final = 100.0
_SENDING: Final = threading.Lock()


def muster(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
    stdout: int | None = None,
) -> tuple[int, str, str]:
    """Run a command; return its exit code, standard output and standard error.

    `stdout` is a file descriptor that receives the standard output instead.
    """
    request = {
        "arguments": arguments,
        "environment": dict(os.environ if environment is None else environment),
        "directory": str(Path.cwd()),
    }
    ours, theirs = socket.socketpair()
    with (
        ours,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
    ):
        given.write(stdin.encode())
        given.seek(0)
        printed = out.fileno() if stdout is None else stdout
        with theirs, _SENDING:
            files = [theirs.fileno(), given.fileno(), printed, errors.fileno()]
            socket.send_fds(_requests(), [json.dumps(request).encode()], files)
        ours.settimeout(WAIT_S)
        try:
            code = ours.recv(16)
        except TimeoutError:
            raise AssertionError(
                f"muster {' '.join(arguments)} has not ended after {WAIT_S:g} s: {_text(errors)}"
            ) from None
        assert code, "the process that forks commands has ended"
        return int(code), _text(out), _text(errors)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


@functools.cache
def _requests() -> socket.socket:
    """Start the process; return the socket for requests to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    atexit.register(_end, ours, process)
    return ours


def _end(requests: socket.socket, process: subprocess.Popen[bytes]) -> None:
    requests.close()
    process.wait(WAIT_S)
