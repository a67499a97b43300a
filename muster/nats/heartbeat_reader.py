"""Adapter for NATS: reads a fleet's heartbeats in batches, with a limit for each node.

Heartbeats arrive over their own connection, so that answers to requests do not queue behind ten
thousand heartbeats. If the reader cannot keep up, heartbeats queue in nats-server, which finally
closes the connection. The reader therefore detects that heartbeats are missing; if heartbeats were
dropped instead, their senders would seem silent.

A single heartbeat is handled immediately. If more arrive, they are read every 100 ms, and if very
many arrive, every 250 ms. Read one by one through nats-py, 2,000 heartbeats a second take 17 % of a
core, but 4 % in batches (CPython 3.11, nats-py 2.16). nats-server delivers no more heartbeats from
a node than `heartbeat_budget` allows.
"""

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, Self

import nats.aio.client
import nats.errors

from muster import codec, vocabulary
from muster.nats import compat, connection, heartbeat_budget
from muster.nats.heartbeat_budget import Excess, Limits, Message

Handler = Callable[[Sequence[vocabulary.Heartbeat]], Awaitable[None]]
OnExcess = Callable[[Excess], Awaitable[None]]
Nodes = Callable[[], tuple[int, Collection[str]]]
"""Returns a number that changes whenever the known nodes change, and these nodes."""

_SHORT_BATCH_S: Final = 0.01
"""The length of a batch while new nodes are being discovered."""
_BATCH_S: Final = 0.1
_MANY: Final = 100
_LONG_BATCH_S: Final = 0.25
"""The length of a batch while very many heartbeats arrive. Each wake-up costs a millisecond,
because caches are cold; the delay affects no verdict.
"""
_BATCH_MAX: Final = 1_000
"""Larger batches would block other tasks of the event loop."""
_JITTER: Final = 0.1
"""The share by which batches vary in length, so that no node always sends its heartbeats when the
budget for unknown nodes is used up.
"""
_RENEW_S: Final = 0.25
_COMPARED_PER_S: Final = 100_000
"""How many known nodes are compared with the subscriptions in a second, which takes about 10 ms."""
_COUNT: Final = re.compile(rb"[0-9]{1,8}")
"""A length in bytes: NATS allows at most 64 MiB a message (max_payload)."""
_SHOWN_MAX: Final = 200
_LINE_BYTES_MAX: Final = 1024 * 1024
"""The longest lines of NATS are INFO lines with the addresses of a cluster; none is longer."""


class HeartbeatStream:
    """Reads the heartbeats of a fleet; entering the context never waits for the server.

    `run` must be running: it renews the subscriptions.
    """

    def __init__(self, url: str, *, name: str, limits: Limits | None = None) -> None:
        self.link = connection.Connection(
            url, name=name, prepare=self._subscribe, make=self._make_client
        )
        self._budget = heartbeat_budget.HeartbeatBudget(limits or Limits())
        self._client: nats.aio.client.Client | None = None
        """The most recently connected client."""
        self._handler: Handler | None = None
        self._on_excess: OnExcess | None = None
        self._nodes: Nodes = _nobody
        self._version = -1
        self._compared_at = -math.inf

    async def __aenter__(self) -> Self:
        """Start connecting."""
        await self.link.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        await self.link.__aexit__()

    async def follow(
        self,
        handler: Handler,
        *,
        nodes: Nodes | None = None,
        on_excess: OnExcess | None = None,
    ) -> None:
        """Call `handler` with the valid heartbeats of each batch; count invalid ones.

        The next batch waits until `handler` returns. `nodes` returns the nodes that get their own
        subscription; `on_excess` is called at most once a period for each noisy node.
        """
        self._handler, self._on_excess = handler, on_excess
        self._nodes = nodes or _nobody
        if self._client is not None and self._client.is_connected:
            await self._subscribe(self._client)

    async def run(self) -> None:
        """Renew the subscriptions, and subscribe to new nodes, forever."""
        while True:
            await asyncio.sleep(_RENEW_S)
            await self._renew()

    async def _subscribe(self, client: nats.aio.client.Client) -> None:
        """Subscribe over a new connection, if `follow` has already been called."""
        self._client = client
        if self._handler is None:
            return
        now = asyncio.get_running_loop().time()
        self._known(now)
        await compat.send(client, self._budget.connect(now))

    def _known(self, now: float) -> bytes:
        """Return protocol lines that adapt the subscriptions to the nodes that are known now."""
        version, nodes = self._nodes()
        if version == self._version:
            return b""
        if now < self._compared_at + len(nodes) / _COMPARED_PER_S:
            return self._budget.follow_discovered(nodes, now)
        self._version, self._compared_at = version, now
        return self._budget.follow(nodes, now)

    async def _renew(self) -> None:
        client = self._client
        if client is None or not client.is_connected or self._handler is None:
            return
        now = asyncio.get_running_loop().time()
        lines = self._known(now)
        more, excesses = self._budget.renew(now)
        if lines or more:
            await compat.send(client, lines + more)
        if self._on_excess is not None:
            for excess in excesses:
                await self._on_excess(excess)

    def _make_client(self) -> nats.aio.client.Client:
        client = compat.TolerantClient()
        _BatchParser(client, self._on_batch)
        return client

    async def _on_batch(self, messages: Sequence[Message]) -> bool:
        """Handle messages; return whether more should be read soon."""
        now = asyncio.get_running_loop().time()
        admitted, ended = self._budget.admit(messages, now)
        if ended and self._client is not None:
            await compat.send(self._client, ended)
        heartbeats = []
        for subject, payload in admitted:
            try:
                heartbeats.append(codec.decode_heartbeat(payload, subject=subject.decode()))
            except (codec.MalformedEvent, UnicodeDecodeError) as error:
                reason = getattr(error, "reason", codec.MalformedReason.WRONG_SUBJECT)
                connection.RECEIVED.labels(f"malformed_{reason}").inc()
        connection.RECEIVED.labels("heartbeat").inc(len(heartbeats))
        excess = len(messages) - len(admitted)
        if excess:
            connection.RECEIVED.labels("heartbeat_skipped").inc(excess)
        if heartbeats and self._handler is not None:
            await self._handler(heartbeats)
        await self._renew()
        return self._budget.is_discovering


def _nobody() -> tuple[int, Collection[str]]:
    return 0, ()


class _BatchParser(compat.Parser):
    """Extracts the messages from a client's input; nats-py's parser handles all other lines."""

    def __init__(
        self,
        client: nats.aio.client.Client,
        on_batch: Callable[[Sequence[Message]], Awaitable[bool]],
    ) -> None:
        super().__init__(client)
        self._on_batch = on_batch
        self._read_at = 0.0
        self._received = 0
        """How many messages have arrived since the last read."""

    def reset(self) -> None:
        """Start over for another connection."""
        super().reset()
        self._rest = b""
        self._messages: list[Message] = []

    async def parse(self, data: bytes = b"") -> None:
        """Handle the bytes that were read; return when the next read is due."""
        messages, others, self._rest = split_messages(self._rest + data)
        self._messages += messages
        self._received += len(messages)
        for line in others:
            await super().parse(line)
        if self.has_unread() and len(self._messages) < _BATCH_MAX:
            return
        is_urgent = False
        if self._messages:
            is_urgent = await self._on_batch(self._messages)
            self._messages = []
        if len(data) < compat.READ_BYTES:
            await self._pause(is_urgent=is_urgent)

    async def _pause(self, *, is_urgent: bool) -> None:
        """Pause reading, unless the last read was long ago."""
        clock = asyncio.get_running_loop().time
        batch_s = _BATCH_S if self._received < _MANY else _LONG_BATCH_S
        batch_s = _SHORT_BATCH_S if is_urgent else batch_s
        batch_s *= random.uniform(1.0 - _JITTER, 1.0)  # noqa: S311  # not a secret
        await self.pause_reading(self._read_at + batch_s - clock())
        self._read_at, self._received = clock(), 0


def split_messages(data: bytes) -> tuple[list[Message], list[bytes], bytes]:
    """Return the complete messages, the other complete lines, and the bytes after both.

    NATS protocol: `MSG <subject> <sid> [reply] <bytes>`, and with headers `HMSG <subject> <sid>
    [reply] <bytes of headers> <bytes>`. Raises ProtocolError.
    """
    messages: list[Message] = []
    others: list[bytes] = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        start = end + 2
        is_plain = data.startswith(b"MSG ", at)
        if not is_plain and not data.startswith(b"HMSG ", at):
            others.append(data[at:start])
            at = start
            continue
        words = data[at:end].split()
        # int() would also accept a sign: a negative length would cause an endless loop
        counts = words[-1:] if is_plain else words[-2:]
        is_whole = len(words) in ((4, 5) if is_plain else (5, 6))
        if not is_whole or not all(_COUNT.fullmatch(count) for count in counts):
            raise nats.errors.ProtocolError(f"nats: malformed {data[at:end][:_SHOWN_MAX]!r}")
        subject, stop = words[1], start + int(counts[-1])
        skip = 0 if is_plain else int(counts[0])
        if len(data) < stop + 2:
            break
        messages.append((subject, words[2], data[start + skip : stop]))
        at = stop + 2
    if end < 0 and len(data) - at > _LINE_BYTES_MAX:
        raise nats.errors.ProtocolError(f"nats: endless {data[at:][:_SHOWN_MAX]!r}")
    return messages, others, data[at:]
