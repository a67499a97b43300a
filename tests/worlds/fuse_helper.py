"""The helper of pods, compiled here, and a stub of the broker with the real protocol."""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from muster_fuse import protocol
from tests.worlds import manifests

SOURCE: Final = manifests.ROOT / "services/fuse/helper/fusermount.c"
SANITIZED: Final = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_WARNINGS: Final = ("-std=c11", "-Wall", "-Wextra", "-Werror")
_SHORT: Final = ("-DCONNECT_MS=2000", "-DREPLY_MS=1000", "-DMOUNT_MS=1000")
_FDS_MAX: Final = 8


class Asked(NamedTuple):
    """A request that the stub received, and the paths that its descriptors name."""

    request: protocol.Request
    paths: tuple[str, ...]


Answer = Callable[[socket.socket, Asked, Sequence[int]], None]
"""Answers a request on its connection; the descriptors of the request are open until it returns."""


def build(place: Path, *flags: str, compiler: str = "gcc", short: bool = True) -> Path:
    """Compile the helper. Skips the test without the compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is missing: apt-get install gcc musl-tools")
    program = place / "fusermount3"
    times = _SHORT if short else ()
    command = [compiler, *_WARNINGS, *times, *flags, "-o", str(program), str(SOURCE)]
    subprocess.run(command, check=True)
    return program


def gives(descriptor: int) -> Answer:
    """Return an answer to a mount with this descriptor, and to an unmount with success."""

    def answer(link: socket.socket, asked: Asked, _: Sequence[int]) -> None:
        operation = asked.request.operation
        fds = [descriptor] if operation is protocol.Operation.MOUNT else []
        socket.send_fds(link, [protocol.reply(operation)], fds)

    return answer


def sends(packet: bytes, fds: Sequence[int] = ()) -> Answer:
    """Return an answer with these bytes and descriptors to any request."""

    def answer(link: socket.socket, _: Asked, __: Sequence[int]) -> None:
        socket.send_fds(link, [packet], list(fds))

    return answer


def nothing(_link: socket.socket, _asked: Asked, _fds: Sequence[int]) -> None:
    """Close the connection without an answer."""


@contextlib.contextmanager
def broker(path: Path, answer: Answer) -> Iterator[list[Asked]]:
    """Serve at a path, one connection after the other; yield the list of requests."""
    asked: list[Asked] = []
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen()
        thread = threading.Thread(target=_serve, args=(server, answer, asked))
        thread.start()
        try:
            yield asked
        finally:
            # accept() returns, although another thread waits in it
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.contextmanager
def receive(link: socket.socket) -> Iterator[tuple[Asked | None, Sequence[int]]]:
    """Yield the next request of a connection, or None at its end, with its descriptors."""
    packet, fds, flags, _ = socket.recv_fds(link, protocol.PACKET_MAX + 1, _FDS_MAX)
    try:
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        paths = tuple(str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in fds)
        request = protocol.parse(packet, descriptors=len(fds)) if packet else None
        yield (Asked(request, paths) if request else None), fds
    finally:
        for fd in fds:
            os.close(fd)


def _serve(server: socket.socket, answer: Answer, asked: list[Asked]) -> None:
    while True:
        try:
            link, _ = server.accept()
        except OSError:
            return
        with link, receive(link) as (request, fds):
            if request is not None:
                asked.append(request)
                answer(link, request, fds)
