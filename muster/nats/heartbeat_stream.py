"""Adapter: NATS: the heartbeats of a whole fleet, heard in gulps over a connection of their own.

Nothing else comes over it, so that an answer somebody waits for never stands behind ten thousand
beats. Who has no time for more beats leaves them with nats-server, which in the end cuts us off:
then we know that we are deaf, instead of dropping beats and taking their senders for silent.

A beat that comes alone is heard at once. When more come, we read every 100 ms what has come since,
and when very many do, every 250 ms: 2,000 beats a second cost 17 % of a core one at a time through
nats-py, and this way 4 % (CPython 3.11, nats-py 2.16).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Final, Self

import nats.aio.client
import nats.errors
from nats.protocol import parser

from muster import codec, vocabulary
from muster.nats import connection

Handler = Callable[[Sequence[vocabulary.Heartbeat]], Awaitable[None]]

_GULP_S: Final = 0.1
_MANY: Final = 100
_GULP_OF_MANY_S: Final = 0.25
"""To wake costs a millisecond, all of which is cold by then. So much later nobody is suspected."""
_GULP_BYTES: Final = nats.aio.client.DEFAULT_BUFFER_SIZE
"""What nats-py reads at once: after so much there may be more."""
_GULP_MAX: Final = 1_000
"""So many beats at most: others want a turn too."""
_WORDS_MIN: Final = 3


class Pulse:
    """Hears every beat of a fleet; an async context manager that never waits for the server."""

    def __init__(self, url: str, *, name: str) -> None:
        self.link = connection.Connection(url, name=name, make=self._client)
        self._handler: Handler | None = None

    async def __aenter__(self) -> Self:
        """Start connecting."""
        await self.link.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close the connection."""
        await self.link.__aexit__(kind, error, at)

    async def follow(self, handler: Handler) -> None:
        """Call `handler` with the believable beats of each gulp, from now on; others are counted.

        The next gulp waits until it returns.
        """
        self._handler = handler
        await self.link.subscribe("muster.heartbeat.*.*", _never)

    def _client(self) -> nats.aio.client.Client:
        client = nats.aio.client.Client()
        client._ps = _Gulps(client, self._take)  # noqa: SLF001  # nats-py 2.16 has no way to it
        return client

    async def _take(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        beats = []
        for subject, payload in messages:
            try:
                beats.append(codec.decode_heartbeat(payload, subject=subject.decode()))
            except (codec.MalformedEvent, UnicodeDecodeError) as error:
                reason = getattr(error, "reason", codec.MalformedReason.WRONG_SUBJECT)
                connection.RECEIVED.labels(f"malformed_{reason}").inc()
        connection.RECEIVED.labels("beat").inc(len(beats))
        if beats and self._handler is not None:
            await self._handler(beats)


class _Gulps(parser.Parser):
    """Takes the messages out of what a client reads; the rest is left to nats-py's parser."""

    def __init__(
        self,
        client: nats.aio.client.Client,
        take: Callable[[Sequence[tuple[bytes, bytes]]], Awaitable[None]],
    ) -> None:
        super().__init__(client)
        self._client = client
        self._take = take
        self._read_at = 0.0
        self._heard = 0
        """How many since then."""

    def reset(self) -> None:
        """Begin anew, with another connection."""
        super().reset()
        self._rest = b""
        self._messages: list[tuple[bytes, bytes]] = []

    async def parse(self, data: bytes = b"") -> None:
        """Deal with what was read; return when it is time to read again."""
        messages, others, self._rest = split(self._rest + data)
        self._messages += messages
        self._heard += len(messages)
        for line in others:
            await super().parse(line)
        if self._is_unread() and len(self._messages) < _GULP_MAX:
            return
        if self._messages:
            await self._take(self._messages)
            self._messages = []
        if len(data) < _GULP_BYTES:
            await self._rest_a_while()

    def _is_unread(self) -> bool:
        """Tell whether more has come than nats-py reads at once; it goes on with that."""
        reader = getattr(self._client._transport, "_io_reader", None)  # noqa: SLF001  # as above
        return bool(getattr(reader, "_buffer", b""))

    async def _rest_a_while(self) -> None:
        """Leave what comes next in the socket, unless it is long since we have looked there."""
        clock = asyncio.get_running_loop().time
        gulp_s = _GULP_S if self._heard < _MANY else _GULP_OF_MANY_S
        wait_s = self._read_at + gulp_s - clock()
        writer = getattr(self._client._transport, "_io_writer", None)  # noqa: SLF001  # as above
        if wait_s > 0 and writer is not None:
            # while it is not read a transport wakes nobody
            writer.transport.pause_reading()
            await asyncio.sleep(wait_s)
            writer.transport.resume_reading()
        self._read_at, self._heard = clock(), 0


def split(data: bytes) -> tuple[list[tuple[bytes, bytes]], list[bytes], bytes]:
    """Return (subject, payload) of each message, all other lines, and what is not complete.

    NATS protocol: `MSG <subject> <sid> [reply] <bytes>`, and with headers `HMSG <subject> <sid>
    [reply] <bytes of headers> <bytes>`. Raises ProtocolError.
    """
    messages: list[tuple[bytes, bytes]] = []
    others: list[bytes] = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        begins = end + 2
        is_plain = data.startswith(b"MSG ", at)
        if not is_plain and not data.startswith(b"HMSG ", at):
            others.append(data[at:begins])
            at = begins
            continue
        words = data[at:end].split()
        try:
            stops = begins + int(words[-1])
            skip = 0 if is_plain else int(words[-2])
            subject = words[_WORDS_MIN - 2]
        except (ValueError, IndexError):
            raise nats.errors.ProtocolError(f"nats: malformed {data[at:end]!r}") from None
        if len(data) < stops + 2:
            break
        messages.append((subject, data[begins + skip : stops]))
        at = stops + 2
    return messages, others, data[at:]


async def _never(_: connection.Message) -> None:
    """Take no message: none gets as far as here."""
