"""Door to JetStream: pulls messages, acknowledges them, makes streams and buckets."""

import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Final

import nats.js.errors
import prometheus_client
from nats.aio.client import Client
from nats.js import api

from muster import connection, logs, runtime, streams

_PULL_S: Final = 1.0
_PULL_BATCH: Final = 100
"""Of a MiB each at most: nats-py drops what comes while 128 MiB wait in a subscription."""
_OTHER_CONFIGURATION: Final = 10058
"""nats-server's JSStreamNameExistErr: the stream is there with another configuration."""
_WRITTEN_SINCE: Final = frozenset({10071, 10164})
"""nats-server's JSStreamWrongLastSequenceErr, and the same without the sequence."""
_FAILURES_TOLD: Final = 5
_PASSING_S: Final = 600.0
"""So long at most a consumer without a name may outlive its user; ours take 30 s."""
_NO_MESSAGE: Final = 10037
"""nats-server's JSNoMessageFoundErr."""


_REFUSALS: Final = prometheus_client.Counter(
    "muster_bus_stream_refusals_total",
    "Tries to read a stream that NATS did not serve.",
    ["stream"],
)


class ConsumerLost(Exception):
    """The server no longer knows our consumer."""


class Patience:
    """The waits of one who reads a stream; it tells when that goes on failing, and when it is over.

    Nothing else would: NATS is there, and what is not heard looks like silence.
    """

    def __init__(self, link: connection.Connection, stream: str) -> None:
        self._link = link
        self._stream = stream
        self._backoff = connection.Backoff()
        self._failures = 0

    async def wait(self, error: BaseException) -> None:
        """Wait for the next try."""
        self._failures += 1
        _REFUSALS.labels(self._stream).inc()
        if self._failures >= _FAILURES_TOLD:
            text = f"{self._stream} cannot be read: {error or type(error).__name__}"
            if self not in self._link.unread:
                logs.logger().error("stream_unread", stream=self._stream, error=text)
            self._link.unread[self] = text
        await self._backoff.wait()

    def reset(self) -> None:
        """Take note that NATS serves the stream."""
        self._backoff.reset()
        self._failures = 0
        if self._link.unread.pop(self, None) is not None:
            logs.logger().info("stream_read_again", stream=self._stream)


def _nothing() -> None:
    pass


async def pull(
    client: Client,
    stream: str,
    config: api.ConsumerConfig,
    *,
    until_empty: bool = False,
    served: Callable[[], None] = _nothing,
) -> AsyncGenerator[connection.Message, None]:
    """Give the messages of one consumer, each as it comes; with `until_empty`, only what is there.

    Our own loop over pull requests: nats-py's `fetch` gathers a batch before it gives the first.
    `served` is called with every answer of the server's, also with one that there is nothing.
    Raises ConsumerLost when the server forgot the consumer, or messages were lost on the way, and
    what nats-py raises.
    """
    info = await client.jetstream().add_consumer(stream, config)
    runtime.end_if_cancelled()
    left = info.num_pending or 0
    inbox = client.new_inbox()
    request = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{info.name}"
    expires = json.dumps({"batch": _PULL_BATCH, "expires": int(_PULL_S * 1e9)}).encode()
    subscription = await client.subscribe(inbox)
    try:
        while not (until_empty and left <= 0):
            await client.publish(request, expires, reply=inbox)
            for _ in range(_PULL_BATCH):
                message = await subscription.next_msg(timeout=2 * _PULL_S)
                runtime.end_if_cancelled()
                ends = _ends_pull(message)
                served()
                if ends:
                    if until_empty:
                        await _must_have_more(client, stream, info.name)
                    break
                left -= 1
                yield message
                if until_empty and left <= 0:
                    return
    finally:
        with contextlib.suppress(*connection.LOST):
            await subscription.unsubscribe()


async def ack(message: connection.Message) -> None:
    """Acknowledge; if the server is away the message comes again, and is known by its id."""
    with contextlib.suppress(*connection.LOST):
        await message.ack()


async def is_of(client: Client, ack: api.PubAck, subject: str) -> bool:
    """Tell whether what was stored before under the same id is on this subject, or cannot be known.

    All who may write to a stream share one space of ids: another may have used up one of ours.
    """
    try:
        found = await client.jetstream().get_msg(ack.stream, ack.seq)
    except connection.LOST:
        runtime.end_if_cancelled()
        return True
    runtime.end_if_cancelled()
    return found.subject == subject


async def create_streams(client: Client, *, replicas: int = 1) -> None:
    """Make what is missing and bring what differs up to date; several may do so at once.

    Nothing gets fewer replicas than it has: who was not told of them would take them from the rest.
    """
    jetstream = client.jetstream()
    for stream in streams.STREAMS:
        config = api.StreamConfig(
            name=stream.name,
            subjects=list(stream.subjects),
            max_age=stream.age_max_s,
            max_bytes=stream.bytes_max,
            max_msgs_per_subject=stream.per_subject_max,
            max_msg_size=stream.message_bytes_max,
            duplicate_window=stream.duplicate_window_s,
            num_replicas=replicas,
            storage=api.StorageType.FILE,
            retention=(
                api.RetentionPolicy.WORK_QUEUE if stream.is_queue else api.RetentionPolicy.LIMITS
            ),
            discard=api.DiscardPolicy.NEW if stream.is_queue else api.DiscardPolicy.OLD,
            compression=api.StoreCompression.S2,
            allow_direct=True,
            allow_rollup_hdrs=stream.rolls_up,
        )
        try:
            await jetstream.add_stream(config)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _OTHER_CONFIGURATION:
                raise
            there = (await jetstream.stream_info(stream.name)).config.num_replicas or 1
            await jetstream.update_stream(config.evolve(num_replicas=max(replicas, there)))
    for bucket in streams.BUCKETS:
        try:
            found = (await jetstream.stream_info(f"KV_{bucket.name}")).config
            if (found.num_replicas or 1) < replicas:
                await jetstream.update_stream(found.evolve(num_replicas=replicas))
        except nats.js.errors.NotFoundError:
            await jetstream.create_key_value(
                bucket=bucket.name,
                max_bytes=bucket.bytes_max,
                max_value_size=bucket.value_bytes_max,
                ttl=bucket.age_max_s,
                history=1,
                replicas=replicas,
            )


async def sweep(client: Client) -> int:
    """Remove passing consumers that would stay long after whoever made them; return how many.

    nats-server takes 1,000 for each stream, from whoever may read it, and then no more from anybody
    (2.15). Raises what nats-py raises.
    """
    removed = 0
    for stream in (streams.EVENTS, streams.ALERTS):
        for name in await _left_behind(client, stream.name):
            # its own time may have come first
            with contextlib.suppress(nats.js.errors.NotFoundError):
                removed += await client.jetstream().delete_consumer(stream.name, name)
            runtime.end_if_cancelled()
    return removed


async def _left_behind(client: Client, stream: str) -> list[str]:
    found: list[api.ConsumerInfo] = []
    while True:
        some = await client.jetstream().consumers_info(stream, offset=len(found))
        runtime.end_if_cancelled()
        found += some
        if not some:
            break
    return [
        one.name
        for one in found
        if not one.config.durable_name and (one.config.inactive_threshold or 0) > _PASSING_S
    ]


async def claim(
    client: Client, subject: str, stream: str, value: bytes, *, ttl_s: int, revision: int
) -> streams.Claimed:
    """Write a value that lasts `ttl_s` if nobody wrote since `revision`; return what is there now.

    What is there and would last for ever was never claimed, and is written over: JetStream sends
    its answers wherever a request asks it to, with nobody's rights. Raises what nats-py raises;
    then the value may be there or not.
    """
    found, is_claim = await _claim(client, subject, stream, value, ttl_s=ttl_s, revision=revision)
    if not is_claim:
        found, _ = await _claim(
            client, subject, stream, value, ttl_s=ttl_s, revision=found.revision
        )
    return found


async def _claim(
    client: Client, subject: str, stream: str, value: bytes, *, ttl_s: int, revision: int
) -> tuple[streams.Claimed, bool]:
    """Return what is there now, and whether it is a claim or nothing."""
    jetstream = client.jetstream()
    headers = {
        api.Header.MSG_TTL.value: f"{ttl_s}s",
        api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision),
    }
    try:
        ack = await jetstream.publish(subject, value, stream=stream, headers=headers)
    except nats.js.errors.BadRequestError as error:
        if error.err_code not in _WRITTEN_SINCE:
            raise
    else:
        return streams.Claimed(ack.seq, value, written=True), True
    try:
        found = await jetstream.get_last_msg(stream, subject)
    except nats.js.errors.NotFoundError as error:
        if error.err_code != _NO_MESSAGE:
            raise
        return streams.Claimed(0, b"", written=False), True
    is_claim = api.Header.MSG_TTL.value in (found.headers or {})
    return streams.Claimed(found.seq or 0, found.data or b"", written=False), is_claim


async def release(client: Client, subject: str, stream: str, *, revision: int) -> None:
    """Remove what was written at `revision`, and nothing newer. Raises what nats-py raises."""
    await client.jetstream().purge_stream(stream, seq=revision + 1, subject=subject)


async def _must_have_more(client: Client, stream: str, consumer: str) -> None:
    """Raise ConsumerLost if the server has given all there was: what did not come, never comes."""
    info = await client.jetstream().consumer_info(stream, consumer)
    runtime.end_if_cancelled()
    if not info.num_pending:
        raise ConsumerLost(f"{stream}: messages were given and did not come")


def _ends_pull(message: connection.Message) -> bool:
    """Tell a status line from a message (ADR-37): 404 and 408 end a pull, others a consumer."""
    status = (message.headers or {}).get(api.Header.STATUS)
    if status is None:
        return False
    if status in {api.StatusCode.NO_MESSAGES, api.StatusCode.REQUEST_TIMEOUT}:
        return True
    raise ConsumerLost(f"{status} {(message.headers or {}).get(api.Header.DESCRIPTION, '')}")
