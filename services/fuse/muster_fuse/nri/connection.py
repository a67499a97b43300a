"""Adapter for the runtime's NRI socket: connects, exchanges a session's bytes, and reconnects.

The runtime disconnects a plugin that does not answer in time; containers then start without the
device until the next registration. So this module waits only for the socket.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from muster import pacing
from muster.service import logs
from muster_fuse.nri import session

_READ_BYTES: Final = 256 * 1024
_READY_S: Final = 30.0
"""The maximum time from the connection to the first synchronization."""
_SEND_S: Final = 5.0
_DELAYS: Final = pacing.Backoff(first_s=0.2, max_s=5.0, jitter=0.5)


class Connection:
    """The connection to the runtime of this node; while it is down, `problem` is the reason."""

    def __init__(
        self,
        socket: Path,
        namespaces: Sequence[str],
        *,
        observe: Callable[[session.Observation], None],
    ) -> None:
        self.problem: str | None = "not connected yet"
        self._socket = socket
        self._namespaces = namespaces
        self._observe = observe

    async def keep(self) -> None:
        """Connect, and reconnect after each failure, until cancelled."""
        failures = 0
        while True:
            was_ready = False
            try:
                await self._serve()
            except (OSError, EOFError, session.Refused) as error:
                was_ready = self.problem is None
                text = f"{self._socket}: {_reason(error)}"
                if text != self.problem:
                    logs.logger().warning("nri_disconnected", error=text)
                self.problem = text
            failures = 1 if was_ready else failures + 1
            await asyncio.sleep(_DELAYS.delay_s(failures, chance=random.random()))  # noqa: S311  # jitter, not a secret

    async def _serve(self) -> None:
        """Serve one connection until it ends. Raises OSError, EOFError or Refused."""
        async with asyncio.timeout(_READY_S) as limit:
            reader, writer = await asyncio.open_unix_connection(self._socket)
            try:
                current = session.Session(self._namespaces)
                answer = current.begin()
                while True:
                    await _send(writer, answer)
                    received = await reader.read(_READ_BYTES)
                    if not received:
                        raise EOFError
                    answer, observed = current.receive(received)
                    for observation in observed:
                        if isinstance(observation, session.Synchronized):
                            self.problem = None
                            limit.reschedule(None)
                        self._observe(observation)
            finally:
                writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, answer: bytes) -> None:
    writer.write(answer)
    async with asyncio.timeout(_SEND_S):
        await writer.drain()


def _reason(error: Exception) -> str:
    match error:
        case EOFError():
            return "the runtime closed the connection"
        case TimeoutError():
            return "the runtime does not answer"
        case OSError():
            return error.strerror or str(error)
        case _:
            return str(error)
