"""Processes of a container that ask for mounts, and the broker's end of their sockets."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any, NamedTuple

from muster_fuse.kernel import jobs, mounter_client
from tests.worlds import fuse_pods

_UNMOUNT = """
import os, socket, sys
broker = socket.socket(fileno=int(sys.argv[1]))
root = os.open(sys.argv[2], os.O_PATH | os.O_NOFOLLOW)
socket.send_fds(broker, [b"unmount"], [root])
os.close(root)
broker.recv(1)
"""


class Asking(NamedTuple):
    """A process that has sent a request with a descriptor, as a broker sees it."""

    process: subprocess.Popen[str]
    broker: socket.socket
    peer: int
    descriptor: int
    caller: jobs.Caller

    async def mount(self, mounter: mounter_client.Mounter, **changed: Any) -> jobs.Outcome:
        """Have the mounter mount, as a broker does that allows the request."""
        job = jobs.MountJob(self.caller, (("source", "test"),), (), 0)._replace(**changed)
        return await mounter.mount(
            job, peer=self.peer, directory=self.descriptor, reply=self.broker.fileno()
        )

    async def unmount(self, mounter: mounter_client.Mounter, *, lazy: bool = False) -> jobs.Outcome:
        """Have the mounter unmount, as a broker does that allows the request."""
        job = jobs.UnmountJob(self.caller, lazy)
        return await mounter.unmount(
            job, peer=self.peer, root=mounter_client.PodDescriptor(self.descriptor)
        )

    def line(self) -> str:
        """Return the next line that the process prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ended(self) -> tuple[int, str]:
        """Close the socket; return the process's exit status and the rest of its output."""
        self.broker.close()
        assert self.process.stdout is not None
        output = self.process.stdout.read()
        return self.process.wait(60), output


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection between a helper and a broker."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextlib.contextmanager
def mounting(
    container: fuse_pods.Container,
    directory: str,
    *arguments: str,
    uid: int = fuse_pods.USER,
    groups: tuple[int, ...] = (),
) -> Iterator[Asking]:
    """Start a daemon that asks for a mount; `arguments` are those of `fuse_daemon`."""
    program = (*fuse_pods.DAEMON, "{}", directory, *arguments)
    with _asking(container, program, uid=uid, groups=groups) as asking:
        yield asking


@contextlib.contextmanager
def unmounting(
    container: fuse_pods.Container, directory: str, *, uid: int = fuse_pods.USER
) -> Iterator[Asking]:
    """Start a process that asks for the removal of a mount."""
    program = (*fuse_pods.PROGRAM, "-c", _UNMOUNT, "{}", directory)
    with _asking(container, program, uid=uid, groups=()) as asking:
        yield asking


@contextlib.contextmanager
def _asking(
    container: fuse_pods.Container, program: tuple[str, ...], *, uid: int, groups: tuple[int, ...]
) -> Iterator[Asking]:
    broker, theirs = socketpair()
    with broker, contextlib.ExitStack() as stack:
        with theirs:
            number = str(theirs.fileno())
            process = container.start(
                *(number if word == "{}" else word for word in program),
                uid=uid,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        stack.enter_context(process)
        stack.callback(process.kill)
        _, descriptors, _, _ = socket.recv_fds(broker, 4096, 2)
        assert len(descriptors) == 1, process.communicate()
        stack.callback(os.close, descriptors[0])
        peer = os.pidfd_open(process.pid)
        stack.callback(os.close, peer)
        first = fuse_pods.FIRST_HOST_ID if container.user_namespace else 0
        caller = jobs.Caller(
            uid=first + uid,
            gid=first + uid,
            groups=groups,
            user_id=uid,
            group_id=uid,
            user_namespace=container.user_namespace,
            overrides=uid == 0,
        )
        yield Asking(process, broker, peer, descriptors[0], caller)
