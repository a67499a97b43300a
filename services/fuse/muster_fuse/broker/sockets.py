"""Adapter for a pod's socket: accepts connections, limited in number and rate.

A pod can delay the closing of the descriptors that it has sent, without limit. So `discard` has
another process close them before the connection is closed and its slot is free: a pod can block
only its own connections.
"""

import asyncio
import contextlib
import functools
import os
import socket
import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

import structlog

from muster import blocking, pacing
from muster_fuse.broker import peer

_BACKLOG: Final = 16
_ACCEPT_PER_S: Final = 100.0
_ACCEPT_BURST: Final = 200
_RETRY_S: Final = 1.0
_EVERYONE: Final = 0o666
_PATH_BYTES_MAX: Final = 107

Serve = Callable[[peer.Peer], Coroutine[object, object, None]]
"""A function that answers the request on a connection, or discards the connection."""

log = structlog.get_logger()


async def readable(connection: socket.socket) -> None:
    """Wait until data or a connection has arrived on a socket, or its peer has closed it."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


class Listener:
    """A pod's socket."""

    def __init__(self, *, connections: int, discard: Serve) -> None:
        self._discard = discard
        self._closing = blocking.Serial()
        self._slots = asyncio.Semaphore(connections)
        self._listening: socket.socket | None = None
        self._path = Path()
        self._inode = 0
        self._accepting: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self, path: Path, serve: Serve) -> None:
        """Serve a new socket file to which every user may connect. Raises OSError."""
        listening, self._inode = await blocking.Serial().run(lambda: _bound(path))
        self._listening, self._path = listening, path
        self._accepting = _keep(self._running, self._accept(listening, serve))

    async def is_at(self, path: Path) -> bool:
        """Return whether the socket file at this path is ours and still served."""
        if self._accepting is None or self._accepting.done():
            return False
        inode = await blocking.Serial().run(lambda: _inode(path))
        return (path, inode) == (self._path, self._inode)

    @property
    def is_ending(self) -> bool:
        """Whether connections still have to be closed after `stop`."""
        return bool(self._ending)

    async def stop(self, *, wait_s: float) -> None:
        """Stop listening, and wait at most `wait_s` until the connections are closed."""
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)
        if self._listening is not None:
            self._empty(self._listening)
            _keep(self._ending, self._closing.run(self._listening.close))
            self._listening = None
        if self._ending:
            await asyncio.wait(self._ending, timeout=wait_s)

    async def _accept(self, listening: socket.socket, serve: Serve) -> None:
        loop = asyncio.get_running_loop()
        pace = pacing.TokenBucket(per_s=_ACCEPT_PER_S, burst=_ACCEPT_BURST, now=loop.time())
        while True:
            await asyncio.sleep(pace.ready_at(loop.time()) - loop.time())
            pace.take(loop.time())
            await self._slots.acquire()
            try:
                await readable(listening)
                # without a wait, in which the connection would belong to nobody
                connection, _ = listening.accept()
            except BlockingIOError:
                self._slots.release()
                continue
            except OSError as error:
                self._slots.release()
                log.warning("accept_failed", path=str(self._path), error=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            # blocking, because the mounter also waits on it; our own calls use MSG_DONTWAIT
            connection.settimeout(None)
            connected = peer.Peer(connection)
            task = _keep(self._running, serve(connected))
            task.add_done_callback(functools.partial(self._close, connected))

    def _empty(self, listening: socket.socket) -> None:
        """Accept no more connections, and close those that have not been accepted yet."""
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RD)
            for _ in range(_BACKLOG + 1):
                connection, _ = listening.accept()
                _keep(self._ending, self._end(peer.Peer(connection)))

    def _close(self, connected: peer.Peer, _: object) -> None:
        task = _keep(self._ending, self._end(connected))
        task.add_done_callback(lambda _: self._slots.release())

    async def _end(self, connected: peer.Peer) -> None:
        await self._discard(connected)
        await self._closing.run(connected.close)


def _keep(
    tasks: set[asyncio.Task[None]], work: Coroutine[object, object, None]
) -> asyncio.Task[None]:
    """Run a coroutine in a task, and keep a reference to the task while it runs."""
    task = asyncio.create_task(work)
    tasks.add(task)

    def end(done: asyncio.Task[None]) -> None:
        tasks.discard(done)
        if not done.cancelled() and (error := done.exception()):
            log.error("helper_connection_failed", exc_info=error)

    task.add_done_callback(end)
    return task


def _bound(path: Path) -> tuple[socket.socket, int]:
    """Return a listening socket and the inode of its file, which replaces any older file."""
    fresh = path.with_name(f"{path.name}.new")
    if len(os.fsencode(fresh)) > _PATH_BYTES_MAX:
        raise OSError(f"{fresh}: a socket's path may have at most {_PATH_BYTES_MAX} bytes")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        listening.bind(str(fresh))
        inode = _open_to_everybody(fresh)
        listening.listen(_BACKLOG)
        listening.settimeout(0)
        fresh.replace(path)
    except BaseException:
        listening.close()
        raise
    return listening, inode


def _open_to_everybody(path: Path) -> int:
    """Let every user connect to a socket file; return its inode.

    Raises OSError. Root in the pod may be able to write to the directory. So a symbolic link in
    place of the socket is not followed, because that would change the mode of a file on the host.
    """
    socket_file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(socket_file)
        if not stat.S_ISSOCK(status.st_mode):
            raise OSError(f"{path} was replaced by a file that is not a socket")
        Path(f"/proc/self/fd/{socket_file}").chmod(_EVERYONE)
    finally:
        os.close(socket_file)
    return status.st_ino


def _inode(path: Path) -> int:
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return 0
