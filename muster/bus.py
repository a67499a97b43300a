"""Door to NATS: publish events, send beats, consume streams, ask and answer, remember values.

An event is published until its stream has it, always under the same `Nats-Msg-Id`, so that the
server drops repeats. Beats are skipped while disconnected: nats-py would keep them and send one
stale burst later. Messages that cannot be believed are set aside with a reason, and counted.
"""

import asyncio
import collections
import contextlib
import functools
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Final, Self

import nats.errors
import nats.js.errors
import prometheus_client
from nats.js import api

from muster import codec, connection, jetstream, logs, runtime, streams, vocabulary

QUEUE_MAX: Final = 1_000
"""Events kept during an outage; then the oldest go, counted. A snapshot follows every reconnect."""

_PUBLISH_TIMEOUT_S: Final = 2.0
_FAILURES_TOLD: Final = 5
_UNACKNOWLEDGED_MAX: Final = 1_000
_ACK_WAIT_S: Final = 30.0
_ABANDONED_S: Final = 30.0
_SWEEP_S: Final = 60.0
_CANCEL_AGAIN_S: Final = 0.1

_PUBLISHED = prometheus_client.Counter(
    "muster_bus_published_total", "Messages given to NATS, by outcome.", ["outcome"]
)
RECEIVED = prometheus_client.Counter(
    "muster_bus_received_total", "Messages taken from NATS, by outcome.", ["outcome"]
)
_QUEUED = prometheus_client.Gauge("muster_bus_queued_events", "Events waiting for NATS.")


def _always() -> bool:
    return True


class NobodyAnswered(Exception):
    """A request found no answer; `subscribed` tells whether anybody was there to hear it."""

    def __init__(self, subject: str, *, subscribed: bool) -> None:
        super().__init__(f"{subject}: {'no answer in time' if subscribed else 'nobody listens'}")
        self.subscribed = subscribed


class Bus:
    """One process's place on the bus; an async context manager that never waits for the server.

    `producer` names the process in every event's source, such as `plugins/device-plugin`. With
    `owner`, missing streams and buckets are created, with so many `replicas`, and swept; all others
    have no right to and only wait.
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
        self._queue: collections.deque[tuple[vocabulary.Event, str | None, int]] = (
            collections.deque()
        )
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close; what is still queued is lost, see `flush`."""
        assert self._tasks, "left without being entered"
        left = set(self._tasks)
        while left:
            for task in left:
                task.cancel()
            # see runtime.end_if_cancelled
            _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.link.__aexit__(kind, error, at)

    def enqueue(self, event: vocabulary.Event, *, event_id: str | None = None) -> None:
        """Publish an event soon and in order; never waits, never raises.

        During an outage the newest `QUEUE_MAX` events are kept.
        """
        if len(self._queue) >= QUEUE_MAX:
            self._queue.popleft()
            _PUBLISHED.labels("dropped").inc()
        self._queue.append((event, event_id, next(self._sequence)))
        _QUEUED.set(len(self._queue))
        self._idle.clear()
        self._queued.set()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything enqueued is in its stream; False if it is not in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()

    async def publish(
        self,
        event: vocabulary.Event,
        *,
        event_id: str | None = None,
        still: Callable[[], bool] = _always,
    ) -> bool:
        """Publish an event and return when its stream has it, however long that takes.

        Give `event_id` where the fact has an identity of its own, so that a restarted producer
        repeats it under the same one. `still` is asked before every try; once it says no, nothing
        more is tried and the answer is False.
        """
        return await self._publish(event, event_id, next(self._sequence), still)

    async def beat(self, beat: vocabulary.Heartbeat) -> bool:
        """Send a sign of life; False when it was skipped because the server is away."""
        client = self.link.live_client()
        if client is None:
            _PUBLISHED.labels("beat_skipped").inc()
            return False
        await client.publish(beat.subject, codec.encode_heartbeat(beat))
        _PUBLISHED.labels("beat").inc()
        return True

    async def heartbeats(
        self, handler: Callable[[vocabulary.Heartbeat], Awaitable[None]], *, node: str = "*"
    ) -> None:
        """Call `handler` with every believable beat, from now on; the others are counted."""

        async def receive(message: connection.Message) -> None:
            try:
                beat = codec.decode_heartbeat(message.data, subject=message.subject)
            except codec.MalformedEvent as error:
                RECEIVED.labels(f"malformed_{error.reason}").inc()
                return
            RECEIVED.labels("beat").inc()
            await handler(beat)

        token = node if node == "*" else vocabulary.node_token(node)
        await self.link.subscribe(f"muster.heartbeat.{token}.*", receive)

    async def answer(self, subject: str, reply: Callable[[], bytes]) -> None:
        """Answer every request on a subject, from now on."""

        async def receive(message: connection.Message) -> None:
            if message.reply:
                await message.respond(reply())

        await self.link.subscribe(subject, receive)

    async def listen(self, subject: str, handler: Callable[[str, bytes], Awaitable[None]]) -> None:
        """Call `handler` with subject and payload of what others than muster say, from now on."""

        async def receive(message: connection.Message) -> None:
            await handler(message.subject, message.data)

        await self.link.subscribe(subject, receive)

    async def ask(self, subject: str, *, timeout_s: float) -> bytes:
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
        """Tell whether the server answers now, so that a silent peer can be told from our own link.

        A request instead of a ping: nats-py's read loop fails on the pong of a ping that was given
        up (2.16, `_process_pong`).
        """
        client = self.link.live_client()
        if client is None:
            return False
        try:
            await client.request("$JS.API.INFO", timeout=timeout_s)
        except nats.errors.NoRespondersError:
            return True  # by a server without JetStream
        except connection.LOST:
            return False
        return True

    async def consume(
        self,
        stream: streams.Stream,
        *,
        durable: str,
        filters: Sequence[str],
        ack_wait_s: float = _ACK_WAIT_S,
    ) -> AsyncIterator[runtime.Delivery[codec.CloudEvent]]:
        """Give every event from where this durable consumer stands, for ever.

        A message that cannot be believed is set aside among the dead letters and never seen here.
        What is not acknowledged within `ack_wait_s` comes again.
        """
        config = api.ConsumerConfig(
            name=durable,
            durable_name=durable,
            filter_subjects=list(filters),
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            max_ack_pending=_UNACKNOWLEDGED_MAX,
        )
        patience = jetstream.Patience(self.link, stream.name)
        while True:
            client = await self.link.client()
            try:
                async with contextlib.aclosing(
                    jetstream.pull(client, stream.name, config, served=patience.reset)
                ) as messages:
                    async for message in messages:
                        event = self._decoded(message)
                        if isinstance(event, codec.MalformedEvent):
                            await self._set_aside(message, durable, event)
                            await jetstream.ack(message)
                        else:
                            yield runtime.Delivery(event, functools.partial(jetstream.ack, message))
            except (jetstream.ConsumerLost, *connection.LOST) as error:
                await patience.wait(error)

    async def follow(
        self,
        stream: streams.Stream,
        *,
        filters: Sequence[str],
        since: datetime | None = None,
        after: int | None = None,
    ) -> AsyncIterator[codec.CloudEvent]:
        """Give every event from `since` (None: from now on), without gaps across reconnects.

        With `after` they begin behind that position of the stream; one that the stream has not come
        to yet is of another stream, and all of this one is given. Leaves nothing behind on the
        server. Unbelievable messages are counted and skipped.
        """
        config = api.ConsumerConfig(
            filter_subjects=list(filters),
            ack_policy=api.AckPolicy.NONE,
            deliver_policy=api.DeliverPolicy.BY_START_TIME,
            opt_start_time=since,
            inactive_threshold=_ABANDONED_S,
            mem_storage=True,
        )
        seen = -1
        created: datetime | None = None
        patience = jetstream.Patience(self.link, stream.name)
        while True:
            client = await self.link.client()
            try:
                info = await client.jetstream().stream_info(stream.name)
                if after is not None and seen < 0:
                    seen = after if after <= info.state.last_seq else 0
                elif since is None and seen < 0:
                    seen = info.state.last_seq
                elif created is not None and info.created != created:
                    # a stream that was lost and made again counts from 1
                    seen = 0
                created = info.created
                if seen >= 0:
                    config.deliver_policy = api.DeliverPolicy.BY_START_SEQUENCE
                    config.opt_start_time = None
                    config.opt_start_seq = seen + 1
                async with contextlib.aclosing(
                    jetstream.pull(client, stream.name, config, served=patience.reset)
                ) as messages:
                    async for message in messages:
                        seen = message.metadata.sequence.stream
                        event = self._decoded(message)
                        if isinstance(event, codec.CloudEvent):
                            yield event
            except (jetstream.ConsumerLost, *connection.LOST) as error:
                await patience.wait(error)

    async def newest(self, stream: streams.Stream, subject: str) -> list[codec.CloudEvent]:
        """Return the newest event of each subject that matches a filter, oldest first."""
        events = [self._decoded(m) for m in await self._newest_messages(stream.name, subject)]
        return [event for event in events if isinstance(event, codec.CloudEvent)]

    async def remember(
        self,
        bucket: streams.Bucket,
        key: str,
        value: bytes,
        *,
        still: Callable[[], bool] = _always,
    ) -> bool:
        """Write a value, however long that takes; empty is forgetting it.

        `still` is that of `publish`.
        """
        headers = {} if value else {"KV-Operation": "DEL"}
        return await self._store(f"$KV.{bucket.name}.{key}", value, headers, still)

    async def claim(
        self,
        bucket: streams.Bucket,
        key: str,
        value: bytes,
        *,
        ttl_s: int,
        revision: int,
        timeout_s: float,
    ) -> streams.Claimed:
        """Write a value that lasts `ttl_s` if nobody wrote since `revision`; return what is there.

        Raises TimeoutError when no answer came in time: the value may be there or not.
        """
        subject, stream = f"$KV.{bucket.name}.{key}", f"KV_{bucket.name}"
        async with asyncio.timeout(timeout_s):
            client = await self.link.client()
            try:
                found = await jetstream.claim(
                    client, subject, stream, value, ttl_s=ttl_s, revision=revision
                )
            except connection.LOST as error:
                runtime.end_if_cancelled()
                raise TimeoutError(str(error) or type(error).__name__) from error
        runtime.end_if_cancelled()
        return found

    async def release(
        self, bucket: streams.Bucket, key: str, *, revision: int, timeout_s: float
    ) -> None:
        """Remove what was written at `revision` if it is still there, and NATS too."""
        client = self.link.live_client()
        with contextlib.suppress(*connection.LOST):
            async with asyncio.timeout(timeout_s):
                if client is not None:
                    await jetstream.release(
                        client, f"$KV.{bucket.name}.{key}", f"KV_{bucket.name}", revision=revision
                    )

    async def recall(self, bucket: streams.Bucket) -> dict[str, bytes]:
        """Return every remembered value of a bucket by its key, however long that takes."""
        prefix = f"$KV.{bucket.name}."
        messages = await self._newest_messages(f"KV_{bucket.name}", f"{prefix}>")
        return {m.subject.removeprefix(prefix): m.data for m in messages if m.data}

    async def _newest_messages(self, stream: str, subject: str) -> list[connection.Message]:
        config = api.ConsumerConfig(
            filter_subjects=[subject],
            ack_policy=api.AckPolicy.NONE,
            deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT,
            inactive_threshold=_ABANDONED_S,
            mem_storage=True,
        )
        patience = jetstream.Patience(self.link, stream)
        while True:
            client = await self.link.client()
            try:
                pulled = jetstream.pull(
                    client, stream, config, until_empty=True, served=patience.reset
                )
                async with contextlib.aclosing(pulled) as messages:
                    return [message async for message in messages]
            except (jetstream.ConsumerLost, *connection.LOST) as error:
                await patience.wait(error)

    async def _send_queue(self) -> None:
        while True:
            await self._queued.wait()
            while self._queue:
                head = self._queue[0]
                await self._publish(*head)
                # a full queue may have dropped its head meanwhile
                if self._queue and self._queue[0] is head:
                    self._queue.popleft()
                _QUEUED.set(len(self._queue))
            self._queued.clear()
            self._idle.set()

    async def _sweep(self) -> None:
        while True:
            client = await self.link.client()
            try:
                removed = await jetstream.sweep(client)
            except connection.LOST as error:
                runtime.end_if_cancelled()
                self._log.warning("sweep_failed", error=str(error) or type(error).__name__)
            else:
                if removed:
                    self._log.warning("consumers_removed", count=removed)
            await asyncio.sleep(_SWEEP_S)

    async def _publish(
        self,
        event: vocabulary.Event,
        event_id: str | None,
        sequence: int,
        still: Callable[[], bool] = _always,
    ) -> bool:
        # one that can be guessed is one that another publisher of the stream can use up before us
        key = event_id or uuid.uuid4().hex
        try:
            subject = event.subject
            payload = codec.encode(
                event,
                event_id=key,
                producer=self._producer,
                instance=self.instance,
                sequence=sequence,
                boot=self._boot,
            )
        except (ValueError, OverflowError) as error:
            # a name that no subject can hold, half a surrogate pair, 65 bits
            _PUBLISHED.labels("unsendable").inc()
            self._log.error("event_unsendable", type=event.TYPE, error=str(error))
            return True
        if len(payload) > codec.EVENT_BYTES_MAX:
            _PUBLISHED.labels("oversized").inc()
            self._log.error("event_oversized", type=event.TYPE, bytes=len(payload))
            return True
        headers = {"Nats-Msg-Id": key, "Content-Type": codec.CONTENT_TYPE}
        return await self._store(subject, payload, headers, still)

    async def _store(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str],
        still: Callable[[], bool] = _always,
    ) -> bool:
        """Publish to JetStream until it is acknowledged; a definite refusal is logged, counted.

        What goes on failing while the server is there is logged when it begins and when it ends.
        """
        backoff = connection.Backoff()
        failures = 0
        while True:
            client = await self.link.client()
            if not still():
                _PUBLISHED.labels("no_longer_ours").inc()
                return False
            try:
                ack = await client.jetstream().publish(
                    subject, payload, timeout=_PUBLISH_TIMEOUT_S, headers=dict(headers)
                )
            except (nats.js.errors.BadRequestError, nats.errors.MaxPayloadError) as error:
                _PUBLISHED.labels("refused").inc()
                self._log.error("event_refused", subject=subject, error=str(error))
                return True
            except connection.LOST as error:
                _PUBLISHED.labels("retried").inc()
                failures += 1
                if failures == _FAILURES_TOLD:
                    kind = type(error).__name__
                    self._log.error("event_waits", subject=subject, error=str(error) or kind)
                if isinstance(error, nats.js.errors.NoStreamResponseError):
                    with contextlib.suppress(*connection.LOST):
                        await self.link.prepare(client)
                await backoff.wait()
            else:
                runtime.end_if_cancelled()
                is_first = not failures
                if ack.duplicate and is_first and not await jetstream.is_of(client, ack, subject):
                    _PUBLISHED.labels("forestalled").inc()
                    self._log.error("event_forestalled", subject=subject, stored=ack.seq)
                    headers = {**headers, "Nats-Msg-Id": uuid.uuid4().hex}
                    continue
                _PUBLISHED.labels("repeat" if ack.duplicate else "stored").inc()
                if failures >= _FAILURES_TOLD:
                    self._log.info("event_stored_late", subject=subject, attempts=failures + 1)
                return True

    def _decoded(self, message: connection.Message) -> codec.CloudEvent | codec.MalformedEvent:
        try:
            event = codec.decode(
                message.subject, message.data, position=message.metadata.sequence.stream
            )
        except codec.MalformedEvent as error:
            RECEIVED.labels(f"malformed_{error.reason}").inc()
            return error
        RECEIVED.labels("event").inc()
        return event

    async def _set_aside(
        self, message: connection.Message, consumer: str, error: codec.MalformedEvent
    ) -> None:
        origin = message.metadata
        self._log.warning(
            "event_set_aside",
            subject=message.subject,
            reason=error.reason,
            detail=error.detail[:500],
        )
        await self._store(
            f"muster.dlq.{consumer}.{error.reason}",
            message.data,
            {
                "Nats-Msg-Id": f"{origin.stream}:{origin.sequence.stream}:{consumer}",
                "Muster-Subject": message.subject,
                "Muster-Reason": str(error.reason),
            },
        )
