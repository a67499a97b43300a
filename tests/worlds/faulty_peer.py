"""A stand-in for nats-server with TLS that fails at a chosen step of a connection."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from enum import IntEnum, StrEnum, auto
from pathlib import Path
from typing import Final

from muster.cli import keyfiles

_INFO: Final = (
    b'INFO {"server_id":"x","version":"2.15.0","headers":true,"max_payload":1048576,'
    b'"tls_required":true}\r\n'
)
_RESET: Final = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with which closing the socket resets the connection."""


class Step(IntEnum):
    """How far a connection gets before the fault."""

    ACCEPTED = auto()
    INFO = auto()
    TLS = auto()
    CONNECT = auto()
    PONG = auto()


class Fault(StrEnum):
    """What the server does at that step."""

    SILENCE = auto()
    DEAFNESS = auto()
    """Like SILENCE, but it does not read either, and so does not notice when the client closes."""
    END = auto()
    HALF_END = auto()
    RESET = auto()
    ERROR = auto()
    ERROR_END = auto()
    GARBAGE = auto()


class Peer:
    """The server: each connection gets the next of `faults`; without any, it works correctly."""

    def __init__(self, certificates: Path) -> None:
        self.faults: list[tuple[Step, Fault]] = []
        self.dials = 0
        self.served = 0
        """How many connections had no fault."""
        self.connections = 0
        """How many of the connections without a fault are open."""
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")
        self._open: dict[asyncio.Transport, asyncio.StreamWriter] = {}
        self._over = asyncio.Event()

    def kick(self, *faults: tuple[Step, Fault]) -> None:
        """End every connection; the next ones get these faults."""
        self.faults[:] = faults
        self.send(b"-ERR 'Kicked'\r\n")
        for writer in self._open.values():
            writer.close()

    def send(self, data: bytes) -> None:
        """Send something to every client."""
        for writer in self._open.values():
            writer.write(data)

    async def end(self) -> None:
        """Abort every connection."""
        self._over.set()
        while self._open:
            for transport in self._open:
                transport.abort()
            await asyncio.sleep(0)

    async def serve(self, reader: asyncio.StreamReader, accepted: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        self.dials += 1
        # keep a reference until the end: a deleted StreamWriter closes its transport (3.12)
        writer = accepted
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        fault = self.faults.pop(0) if self.faults else None
        try:
            with contextlib.suppress(OSError, EOFError):
                for step in Step:
                    self._open[transport] = writer
                    match step:
                        case Step.ACCEPTED:
                            pass
                        case Step.INFO:
                            writer.write(_INFO)
                        case Step.TLS:
                            reader, writer = await _secure(transport, self._tls)
                        case Step.CONNECT:
                            await reader.readuntil(b"PING\r\n")
                        case Step.PONG:
                            writer.write(b"PONG\r\n")
                    if fault and fault[0] is step:
                        await self._misbehave(fault[1], reader, writer)
                        return
                await self._serve_well(reader, writer)
        finally:
            del self._open[transport]
            writer.close()
            transport.abort()

    async def _serve_well(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.served += 1
        self.connections += 1
        try:
            while True:
                await reader.readuntil(b"PING\r\n")
                writer.write(b"PONG\r\n")
        finally:
            self.connections -= 1

    async def _misbehave(
        self, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        raw: socket.socket = writer.get_extra_info("socket")
        match fault:
            case Fault.SILENCE:
                pass
            case Fault.DEAFNESS:
                assert isinstance(writer.transport, asyncio.Transport)
                writer.transport.pause_reading()
                await self._over.wait()
            case Fault.END:
                writer.close()
                return
            case Fault.HALF_END:
                raw.shutdown(socket.SHUT_WR)
            case Fault.RESET:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                return
            case Fault.ERROR | Fault.ERROR_END:
                writer.write(b"-ERR 'Authorization Violation'\r\n")
                if fault is Fault.ERROR_END:
                    writer.close()
                    return
            case Fault.GARBAGE:
                writer.write(b"\x00\xff no NATS \r\n")
        # the client closes the connection
        await reader.read(-1)


async def _secure(
    transport: asyncio.Transport, tls: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Do the TLS handshake (StreamWriter.start_tls of 3.11 fails if the client disconnects)."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    above = await loop.start_tls(transport, protocol, tls, server_side=True)
    if above is None:
        raise ConnectionError
    return reader, asyncio.StreamWriter(above, protocol, reader, loop)


def make_certificates(where: Path) -> None:
    """Make certificates for `serving`."""
    keyfiles.make_certificates(where, ["127.0.0.1"], at=datetime.now(UTC), lasts=timedelta(days=1))


@contextlib.asynccontextmanager
async def serving(certificates: Path) -> AsyncIterator[tuple[Peer, str]]:
    """Serve on a free port; yield the server and its URL."""
    peer = Peer(certificates)
    async with await asyncio.start_server(peer.serve, "127.0.0.1", 0) as server:
        yield peer, f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await peer.end()


def every_fault() -> Sequence[tuple[Step, Fault]]:
    """Return each fault at each step."""
    return [(step, fault) for step in Step for fault in Fault]
