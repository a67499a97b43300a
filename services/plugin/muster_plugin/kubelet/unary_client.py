"""Adapter: makes one gRPC call over a new connection to a socket; see `unary_call`.

After a call it sends GOAWAY, so that the server sees no error, and the caller closes the socket.
Nothing is read beyond a limit or a deadline.
"""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Final

from muster_plugin.kubelet import unary_call

_STEP_S: Final = 0.5
_LAG_MAX_S: Final = 1.0
_SERVER_MORE_S: Final = 1.0
"""The server's timeout exceeds ours by this, so that its error does not replace an answer."""
_READ_BYTES: Final = 65_536


class Late(Exception):
    """This process was too slow to determine whether the answer arrived in time."""


def connected(path: Path) -> socket.socket:
    """Return a connection to the socket at a path, without waiting. Raises OSError."""
    with contextlib.ExitStack() as undo:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        undo.callback(connection.close)
        connection.settimeout(0)
        connection.connect(str(path))
        undo.pop_all()
    return connection


async def call(
    connection: socket.socket,
    method: str,
    *,
    timeout_s: float,
    bytes_max: int = unary_call.BYTES_MAX,
) -> unary_call.Outcome | None:
    """Call a method without arguments; return None if no answer arrives in time.

    Raises Late, or OSError if the connection breaks.
    """
    loop = asyncio.get_running_loop()
    reader = unary_call.UnaryAnswer(bytes_max)
    ends_at = loop.time() + timeout_s
    server_timeout_s = timeout_s + _SERVER_MORE_S
    _send(connection, unary_call.request(method, timeout_s=server_timeout_s, bytes_max=bytes_max))
    while reader.outcome is None:
        now = loop.time()
        if now >= ends_at:
            break
        await _readable(connection, min(_STEP_S, ends_at - now))
        with contextlib.suppress(BlockingIOError):
            reader.receive(connection.recv(_READ_BYTES))
        if loop.time() - now > _STEP_S + _LAG_MAX_S:
            raise Late
        _send(connection, reader.to_send)
        reader.to_send = b""
    outcome = reader.end()
    _send(connection, unary_call.GOODBYE)
    return outcome


async def _readable(connection: socket.socket, timeout_s: float) -> None:
    """Wait until data can be received, or until the timeout.

    A timeout that cancels sock_recv would lose data that arrives at the same time.
    """
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    timer = loop.call_later(timeout_s, ready.set)
    # selectors would format a socket, with its addresses, in an error that asyncio ignores
    descriptor = connection.fileno()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
        timer.cancel()


def _send(connection: socket.socket, data: bytes) -> None:
    """Send data without waiting, so that the answer is read even if the server reads no input."""
    if data:
        with contextlib.suppress(OSError):
            connection.send(data)
