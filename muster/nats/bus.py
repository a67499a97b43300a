"""Adapter for NATS: publishes events, sends and receives heartbeats, sends requests and replies.

Heartbeats are skipped while disconnected: nats-py would buffer them and later send a stale burst.
"""

from muster.nats import websockets  # isort: skip  # noqa: F401  # before nats-py

import asyncio
import collections
import contextlib
import functools
import itertools
import uuid
from collections.abc import Awaitable, Callable
from typing import Final, Self

import nats.errors
import prometheus_client

from muster import codec, inventory_pages, shortening, vocabulary
from muster.nats import connection, consumer_sweep, jetstream, streams
from muster.service import logs, runtime

QUEUE_MAX: Final = 1_000
"""The maximum number of events kept in an outage; older events are dropped and counted. After a
reconnect, a plugin sends a snapshot.
"""

_SWEEP_S: Final = 15.0
_NOBODY: Final = vocabulary.rpc_subject(vocabulary.FLEET, "nobody", "probe")
"""A subject that no plugin can listen on."""

_QUEUED = prometheus_client.Gauge("muster_bus_queued_events", "Events waiting for NATS.")


class NobodyAnswered(Exception):
    """A request was not answered; `subscribed` is whether a subscriber may have received it."""

    def __init__(self, subject: str, *, subscribed: bool) -> None:
        reason = "no answer in time" if subscribed else "no subscriber, or no connection to NATS"
        super().__init__(f"{subject}: {reason}")
        self.subscribed = subscribed


class Bus:
    """A process's connection to the bus; entering the context never waits for the server.

    `producer` names the process in every event's source, such as `plugins/device-plugin`. An
    `owner` creates missing streams and buckets with this number of `replicas`, and removes
    abandoned consumers; other processes may not do so and only wait.
    """

    def __init__(
        self,
        url: str,
        *,
        producer: str,
        name: str,
        boot: str = "",
        owner: bool = False,
        replicas: int = 1,
    ) -> None:
        self.instance = uuid.uuid4().hex[:16]
        create = functools.partial(jetstream.create_streams, replicas=replicas)
        self.link = connection.Connection(url, name=name, prepare=create if owner else None)
        self._producer = producer
        self._boot = boot
        self._log = logs.logger()
        self._sequence = itertools.count(1)
        self._queue: collections.deque[tuple[vocabulary.Event, int]] = collections.deque()
        self._queued = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_owner = owner
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start connecting and sending."""
        await self.link.__aenter__()
        self._tasks.append(asyncio.create_task(self._send_queue()))
        if self._is_owner:
            self._tasks.append(asyncio.create_task(self._sweep()))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close; events that are still queued are lost (see `flush`)."""
        assert self._tasks, "exited without being entered"
        for task in self._tasks:
            await runtime.end(task)
        await asyncio.gather(*filter(asyncio.Task.done, self._tasks), return_exceptions=True)
        await self.link.__aexit__()

    def enqueue(self, event: vocabulary.Event) -> None:
        """Queue an event for publication in order; never waits, never raises.

        During an outage the newest `QUEUE_MAX` events are kept.
        """
        if len(self._queue) >= QUEUE_MAX:
            self._queue.popleft()
            connection.PUBLISHED.labels("dropped").inc()
        self._queue.append((event, next(self._sequence)))
        _QUEUED.set(len(self._queue))
        self._idle.clear()
        self._queued.set()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until every queued event was stored or refused; return False after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()

    async def publish(
        self,
        event: vocabulary.Event,
        *,
        event_id: str | None = None,
        is_leader: Callable[[], bool] | None = None,
    ) -> bool:
        """Publish an event and wait, without a time limit, until its stream has stored it.

        An event that cannot be sent, or that the server refuses, is logged and dropped. Pass
        `event_id` if the fact has its own identity, so that a restarted producer repeats the event
        with the same id. `is_leader` is called before every attempt; if it returns False, this
        function stops and returns False. In all other cases it returns True.
        """
        return await self._publish(event, next(self._sequence), event_id, is_leader)

    async def send_heartbeat(self, heartbeat: vocabulary.Heartbeat) -> bool:
        """Send a heartbeat; return False if it was skipped because the server is unreachable."""
        client = self.link.live_client()
        if client is None:
            connection.PUBLISHED.labels("heartbeat_skipped").inc()
            return False
        await client.publish(heartbeat.subject, codec.encode_heartbeat(heartbeat))
        connection.PUBLISHED.labels("heartbeat").inc()
        return True

    async def heartbeats(
        self, handler: Callable[[vocabulary.Heartbeat], Awaitable[None]], *, node: str = "*"
    ) -> None:
        """Call `handler` with every valid heartbeat from now on; count invalid ones."""

        async def receive(message: connection.Message) -> None:
            try:
                heartbeat = codec.decode_heartbeat(message.data, subject=message.subject)
            except codec.MalformedEvent as error:
                connection.RECEIVED.labels(f"malformed_{error.reason}").inc()
                return
            connection.RECEIVED.labels("heartbeat").inc()
            await handler(heartbeat)

        token = node if node == "*" else vocabulary.node_token(node)
        await self.link.subscribe(f"muster.heartbeat.{token}.*", receive)

    async def reply(self, subject: str, reply: Callable[[], bytes]) -> None:
        """Answer every request on a subject, from now on."""

        async def receive(message: connection.Message) -> None:
            if message.reply:
                await message.respond(reply())

        await self.link.subscribe(subject, receive)

    async def subscribe(
        self, subject: str, handler: Callable[[str, bytes], Awaitable[None]]
    ) -> None:
        """Call `handler` with subject and payload of all messages from now on."""

        async def receive(message: connection.Message) -> None:
            await handler(message.subject, message.data)

        await self.link.subscribe(subject, receive)

    async def request(self, subject: str, *, timeout_s: float) -> bytes:
        """Send a request and return its answer. Raises NobodyAnswered."""
        client = self.link.live_client()
        if client is None:
            raise NobodyAnswered(subject, subscribed=False)
        try:
            answer = await client.request(subject, timeout=timeout_s)
        except nats.errors.NoRespondersError:
            raise NobodyAnswered(subject, subscribed=False) from None
        except connection.LOST:
            raise NobodyAnswered(subject, subscribed=True) from None
        runtime.end_if_cancelled()
        return answer.data

    async def is_reachable(self, *, timeout_s: float) -> bool:
        """Return whether the server answers now; if not, a peer's silence proves nothing.

        This sends a request instead of a ping, because nats-py's read loop fails on the pong of an
        abandoned ping (2.16, `_process_pong`). The request has no responder, which the server
        reports immediately; JetStream would be slow to answer while a stream is flooded. A server
        that is partitioned from its cluster also answers; health's conclusions are then not
        published, because its lock is in JetStream.
        """
        client = self.link.live_client()
        if client is None:
            return False
        try:
            await client.request(_NOBODY, timeout=timeout_s)
        except nats.errors.NoRespondersError:
            return True
        except connection.LOST:
            return False
        return True

    async def _send_queue(self) -> None:
        while True:
            await self._queued.wait()
            while self._queue:
                head = self._queue[0]
                await self._publish(*head)
                # meanwhile a full queue may have dropped its oldest event
                if self._queue and self._queue[0] is head:
                    self._queue.popleft()
                _QUEUED.set(len(self._queue))
            self._queued.clear()
            self._idle.set()

    async def _sweep(self) -> None:
        """Periodically recreate lost streams and remove abandoned consumers, until cancelled."""
        while True:
            client = await self.link.client()
            try:
                # a stream or bucket can be lost while the server is connected
                await self.link.prepare(client)
                removed = await consumer_sweep.sweep(client)
            except connection.LOST as error:
                runtime.end_if_cancelled()
                self._log.warning("stream_check_failed", error=str(error) or type(error).__name__)
            else:
                if removed:
                    self._log.warning("consumers_removed", count=removed)
            await asyncio.sleep(_SWEEP_S)

    async def _publish(
        self,
        event: vocabulary.Event,
        sequence: int,
        event_id: str | None = None,
        is_leader: Callable[[], bool] | None = None,
    ) -> bool:
        """Publish an event as one or more messages; return False if `is_leader` returned False."""
        for subject, payload, key in self._messages(event, sequence, event_id):
            headers = {"Nats-Msg-Id": key, "Content-Type": codec.CONTENT_TYPE}
            # what the server refuses once, it refuses always; `store` has logged it
            with contextlib.suppress(jetstream.Refused):
                stored = await jetstream.store(
                    self.link, subject, payload, headers, is_leader=is_leader
                )
                if stored is jetstream.Stored.NO_LONGER_LEADER:
                    return False
        return True

    def _messages(
        self, event: vocabulary.Event, sequence: int, event_id: str | None
    ) -> list[tuple[str, bytes, str]]:
        """Return subject, payload and id of each message; log an event that cannot be sent."""
        try:
            if isinstance(event, vocabulary.InventoryReported):
                pages = inventory_pages.numbered(event, sequence)
                return [self._encoded(page, sequence, None) for page in pages]
            subject, payload, key = self._encoded(event, sequence, event_id)
            stream = streams.stream_of(subject)
            payload_max = streams.payload_bytes_max(stream) if stream else codec.EVENT_BYTES_MAX
            if len(payload) <= payload_max:
                return [(subject, payload, key)]
            parts = shortening.fit(event, payload_max - inventory_pages.ATTRIBUTES_BYTES)
            messages = [self._encoded(part, sequence, None) for part in parts]
        except inventory_pages.TooManyPages as error:
            connection.PUBLISHED.labels("oversized").inc()
            self._log.error("event_oversized", type=event.TYPE, error=str(error))
            return []
        except (ValueError, OverflowError) as error:
            # such as a name that cannot be in a subject, half a surrogate pair, or a number of 65
            # bits
            connection.PUBLISHED.labels("invalid").inc()
            self._log.error("event_invalid", type=event.TYPE, error=str(error))
            return []
        connection.PUBLISHED.labels("shortened").inc()
        self._log.warning(
            "event_shortened", type=event.TYPE, bytes=len(payload), messages=len(messages)
        )
        return messages

    def _encoded(
        self, event: vocabulary.Event, sequence: int, event_id: str | None
    ) -> tuple[str, bytes, str]:
        # another publisher of the stream could use a predictable id first
        key = event_id or uuid.uuid4().hex
        payload = codec.encode(
            event,
            event_id=key,
            producer=self._producer,
            instance=self.instance,
            sequence=sequence,
            boot=self._boot,
        )
        return event.subject, payload, key
