"""Adapter: takes over a node's resources from another process of the plugin, without a gap.

In a rolling update the new pod starts beside the old one. The two processes communicate over a
socket beside the resource locks:

    successor                           holder
    ------------------------------------|--------------------------------------------------------
    request                          -> | leaves the bus, stops repairing, releases the
                                        | locks, keeps serving; answers with its sockets
    locks and registers the resources   | (the kubelet uses the newer registration)
    finish, when all are listed      -> | ends its streams and servers; answers
    keeps the connection open           | waits for the connection to end
    the connection ends                 | serves and registers again: its successor has ended

A kubelet before 1.37 drops the newer registration as well when the older stream ends (k/k#121994);
the successor then registers again. A holder refuses the pod from which it took over, so that two
pods never keep taking the resources from each other.
"""

import asyncio
import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from muster import codec
from muster.service import logs

_ANSWER_TIMEOUT_S: Final = 5.0
_FINISH_TIMEOUT_S: Final = 30.0
_ASKS_MAX: Final = 5
"""How many times a successor sends its request to a holder that closes the connection."""
_ASK_AGAIN_S: Final = 1.0
_LINE_BYTES_MAX: Final = 256 * 1024
"""The longest line: a node has up to 1,000 resources, each with a socket path of 107 bytes."""


class Request(msgspec.Struct, frozen=True, tag="request"):
    """The first line that a successor sends; `host` is its host name (in a cluster, its pod)."""

    host: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The successor's second line, sent when the kubelet lists its resources."""


class Released(msgspec.Struct, frozen=True, tag="released"):
    """The holder has released its locks; it serves `sockets` until it receives `Finish`."""

    host: str
    sockets: tuple[str, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The holder refuses the handover and keeps its resources."""

    reason: str


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The holder no longer serves anything."""


class Served(Protocol):
    """The resources of a holder, which can be handed over and taken back."""

    async def hand_over(self) -> tuple[str, ...]:
        """Release everything except the servers; return the paths of their sockets."""

    async def end_handed_over(self) -> None:
        """End the servers that were handed over."""

    async def take_back(self) -> None:
        """Serve everything again, with new servers."""


class Handover:
    """A process's handovers: from a predecessor when it starts, and to a successor later."""

    def __init__(self, path: Path, served: Served, *, ask_again_s: float = _ASK_AGAIN_S) -> None:
        self.sockets: frozenset[str] = frozenset()
        """The sockets that the predecessor still serves until `finish`."""
        self.can_ask = True
        """Whether a request to the holder may still succeed."""
        self._asks_left = _ASKS_MAX
        self._ask_again_s = ask_again_s
        self._path = path
        self._served = served
        self._predecessor = ""
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._handing_over: asyncio.Task[None] | None = None
        self._taken_back = asyncio.Event()
        """Set when the socket must be bound again, because a successor has bound its path."""

    async def request(self) -> str:
        """Request the handover from the holder; return why that failed, or an empty string."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(
                    str(self._path), limit=_LINE_BYTES_MAX
                )
                await _send(writer, Request(socket.gethostname()))
                answer = await _receive(reader, Released | Refused)
        except (OSError, ValueError, TimeoutError) as error:
            if writer is not None:
                writer.close()
                await self._pause(error)
            return f"the handover request failed: {str(error) or type(error).__name__}"
        self.can_ask = False
        if isinstance(answer, Refused):
            writer.close()
            return answer.reason
        self._connection = reader, writer
        self._predecessor = answer.host
        self.sockets = frozenset(answer.sockets)
        logs.logger().info("handover_started", predecessor=answer.host)
        return ""

    async def _pause(self, error: Exception) -> None:
        """Wait before the next request to the holder, if another request is useful.

        A holder that closes the connection may be busy with another successor for a moment. A
        holder that is slow, or sends an unexpected answer, has already begun to hand over; another
        request would make it begin again.
        """
        self._asks_left -= 1
        self.can_ask = isinstance(error, ConnectionError) and self._asks_left > 0
        if self.can_ask:
            await asyncio.sleep(self._ask_again_s)

    async def finish(self) -> None:
        """Make a predecessor end its servers, because the kubelet lists this plugin's devices."""
        if self._connection is None:
            return
        reader, writer = self._connection
        # if the predecessor has ended in the meantime, its servers have already ended
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await _send(writer, Finish())
                await _receive(reader, Finished)
        logs.logger().info("handover_finished", predecessor=self._predecessor)

    def close(self) -> None:
        """End the connection to the predecessor, which then serves again if it still runs."""
        if self._connection is not None:
            self._connection[1].close()

    async def listen(self) -> None:
        """Hand over to each successor that requests it, until cancelled."""
        while True:
            self._taken_back.clear()
            try:
                self._path.parent.mkdir(exist_ok=True)
                # the path belongs to the holder of the resources; a predecessor keeps its
                # descriptor
                self._path.unlink(missing_ok=True)
                server = await asyncio.start_unix_server(
                    self._on_connection, self._path, limit=_LINE_BYTES_MAX
                )
            except OSError as error:
                logs.logger().warning("handover_not_possible", error=str(error))
                # the resources are served anyway
                await asyncio.Event().wait()
                return
            try:
                await self._taken_back.wait()
            finally:
                server.close()
                if not self._taken_back.is_set() and self._handing_over is not None:
                    self._handing_over.cancel()
                    await asyncio.wait([self._handing_over])

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # not a coroutine: asyncio logs a traceback if it cancels one itself (CPython 3.11)
        if self._handing_over is None and _is_same_user(writer):
            self._handing_over = asyncio.create_task(self._answer(reader, writer))
        else:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._hand_over(reader, writer)
        except (OSError, ValueError, TimeoutError) as error:
            logs.logger().warning("handover_failed", error=str(error) or type(error).__name__)
        finally:
            writer.close()
            self._handing_over = None

    async def _hand_over(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            request = await _receive(reader, Request)
            if request.host == self._predecessor:
                await _send(writer, Refused("it took over from this pod"))
                return
        logs.logger().info("handover_accepted", successor=request.host)
        try:
            released = Released(socket.gethostname(), await self._served.hand_over())
            async with asyncio.timeout(_FINISH_TIMEOUT_S):
                await _send(writer, released)
                await _receive(reader, Finish)
            await self._served.end_handed_over()
            logs.logger().info("resources_handed_over", successor=request.host)
            await _send(writer, Finished())
            await reader.read()
        except (OSError, ValueError, TimeoutError) as error:
            logs.logger().warning("handover_failed", error=str(error) or type(error).__name__)
        # not reached when cancelled, because this process then ends as well
        writer.close()
        logs.logger().warning("successor_lost", successor=request.host)
        await self._served.end_handed_over()
        await self._served.take_back()
        self._taken_back.set()


async def _send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    writer.write(msgspec.json.encode(message) + b"\n")
    await writer.drain()


async def _receive(reader: asyncio.StreamReader, kind: Any) -> Any:
    """Return the next message. Raises OSError, or ValueError if it is not one of this kind."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the other side has ended")
    try:
        return msgspec.json.decode(line, type=kind)
    except codec.UNREADABLE as error:
        raise ValueError(str(error)) from None


def _is_same_user(writer: asyncio.StreamWriter) -> bool:
    peer: socket.socket = writer.get_extra_info("socket")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())
