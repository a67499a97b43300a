"""Commands of faulty mounters, for `mounter_client.Mounter`."""

import sys
from pathlib import Path

from muster_fuse.kernel import mounter_client

_PACKAGES = mounter_client.COMMAND[-1]
_KILLING = """
import os, signal, sys
sys.path.append(sys.argv[1])
from muster_fuse.kernel import mounter
first, victim, step, moment = os.getpid(), *sys.argv[2].split(":")

def kill(frame, event, _):
    if event == moment and frame.f_code.co_name == step and os.getpid() != first:
        sys.setprofile(None)
        os.kill(os.getppid() if victim == "mounter" else os.getpid(), signal.SIGKILL)

sys.setprofile(kill)
mounter.main(int(sys.argv[3]))
"""
_FORKLESS = """
import errno, os, sys
sys.path.append(sys.argv[1])
from muster_fuse.kernel import mounter
failures, fork = int(sys.argv[2]), os.fork

def failing():
    global failures
    if failures:
        failures -= 1
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()

os.fork = failing
mounter.main(int(sys.argv[3]))
"""
_DEAD_CHILDREN = """
import os, socket, sys
sys.path.append(sys.argv[1])
from muster_fuse.kernel import jobs, mounter
control = socket.socket(fileno=int(sys.argv[3]))
while True:
    message, descriptors, _, _ = socket.recv_fds(control, 20_000, 3)
    if not message:
        break
    for descriptor in descriptors:
        os.close(descriptor)
    for outcome in (jobs.Outcome(stage=jobs.STARTED), mounter._LATE):
        control.send(message[:4] + jobs.encode_outcome(outcome))
    open(sys.argv[2], "w").close()
"""


def command(script: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a mounter that runs a script."""
    return (sys.executable, "-I", "-S", "-c", script, _PACKAGES, *arguments)


def forkless(failures: int) -> tuple[str, ...]:
    """Return the command of a mounter that fails to fork its first `failures` children."""
    return command(_FORKLESS, str(failures))


def with_dead_children(answered: Path) -> tuple[str, ...]:
    """Return the command of a mounter whose children are killed once they have descriptors.

    It creates the file `answered` when it has reported that.
    """
    return command(_DEAD_CHILDREN, str(answered))


def killing(victim: str, step: str, moment: str) -> tuple[str, ...]:
    """Return the command of a mounter that is killed at a step of its child, or whose child is.

    `victim` is `mounter` or `child`; `step` is a function that the child calls; `moment` is `call`
    or `return`.
    """
    return command(_KILLING, f"{victim}:{step}:{moment}")
