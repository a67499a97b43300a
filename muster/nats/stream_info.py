"""Adapter for JetStream: reads a stream's state: whether it exists, its size and its consumers."""

from datetime import datetime
from typing import Final, TypeVar

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from muster.nats import compat, streams
from muster.service import logs, runtime

_NO_STREAM: Final = 10059
"""nats-server's JSStreamNotFoundErr."""
_TIMEOUT_S: Final = 2.0

Shape = TypeVar("Shape")


def is_missing(stream: streams.Stream, error: BaseException) -> bool:
    """Return whether reading failed because an optional stream does not exist yet."""
    return stream.is_optional and is_no_stream(error)


def is_no_stream(error: BaseException) -> bool:
    """Return whether an error says that the stream does not exist."""
    if isinstance(error, nats.js.errors.NotFoundError):
        return bool(error.err_code == _NO_STREAM)
    return isinstance(error, nats.js.errors.NoStreamResponseError)


def log_failure(event: str, reason: BaseException, **details: str) -> None:
    """Log an error, or a warning if the stream does not exist: health creates it at its start."""
    log = logs.logger()
    (log.warning if is_no_stream(reason) else log.error)(event, **details)


class _State(msgspec.Struct):
    bytes: int
    first_ts: datetime
    messages: int


class _Config(msgspec.Struct):
    max_bytes: int = -1


class _Replica(msgspec.Struct):
    name: str = ""
    current: bool = False
    offline: bool = False


class _Cluster(msgspec.Struct):
    replicas: tuple[_Replica, ...] = ()


class _Info(msgspec.Struct):
    state: _State
    ts: datetime
    config: _Config = msgspec.field(default_factory=_Config)
    cluster: _Cluster = msgspec.field(default_factory=_Cluster)


class _Error(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Refusal(msgspec.Struct):
    error: _Error | None = None


class _ConsumerConfig(msgspec.Struct):
    durable_name: str = ""


class _Consumer(msgspec.Struct):
    name: str
    config: _ConsumerConfig
    num_pending: int = 0
    num_redelivered: int = 0


class _Consumers(msgspec.Struct):
    total: int
    consumers: tuple[_Consumer, ...] = ()


async def stored(client: Client, stream: str) -> tuple[int, float]:
    """Return a stream's size in bytes, and its oldest message's age in seconds (server's clock).

    The age is 0 if there is no message. Raises nats-py's errors, including NotFoundError if the
    stream does not exist.
    """
    info = await _ask(client, f"STREAM.INFO.{stream}", _Info)
    return info.state.bytes, _age_s(info)


async def describe(client: Client, stream: str, *, timeout_s: float) -> streams.Usage | None:
    """Return a stream's usage; None if the stream does not exist. Raises nats-py's errors."""
    try:
        info = await _ask(client, f"STREAM.INFO.{stream}", _Info, timeout_s=timeout_s)
    except nats.js.errors.NotFoundError:
        return None
    return streams.Usage(
        name=stream,
        stored_bytes=info.state.bytes,
        bytes_max=info.config.max_bytes,
        messages=info.state.messages,
        oldest_age_s=_age_s(info),
        away=tuple(r.name for r in info.cluster.replicas if r.offline or not r.current),
    )


async def durables(client: Client, stream: str, *, timeout_s: float) -> list[streams.Durable]:
    """Return a stream's durable consumers. Raises nats-py's errors."""
    listed: list[_Consumer] = []
    while True:
        body = b'{"offset": %d}' % len(listed)
        page = await _ask(client, f"CONSUMER.LIST.{stream}", _Consumers, body, timeout_s=timeout_s)
        listed += page.consumers
        if not page.consumers or len(listed) >= page.total:
            break
    return [
        streams.Durable(
            stream=stream,
            name=each.name,
            waiting=each.num_pending,
            redelivered=each.num_redelivered,
        )
        for each in listed
        if each.config.durable_name
    ]


async def _ask(
    client: Client,
    what: str,
    shape: type[Shape],
    body: bytes = b"",
    *,
    timeout_s: float = _TIMEOUT_S,
) -> Shape:
    answer = await client.request(f"{compat.api(client)}.{what}", body, timeout=timeout_s)
    runtime.end_if_cancelled()
    try:
        refused = msgspec.json.decode(answer.data, type=_Refusal).error
        if refused is None:
            return msgspec.json.decode(answer.data, type=shape)
    except msgspec.MsgspecError as error:
        raise nats.errors.Error(f"{what}: {error}") from None
    if refused.err_code == _NO_STREAM:
        raise nats.js.errors.NotFoundError(code=404, err_code=_NO_STREAM, description=what)
    raise nats.errors.Error(f"{what}: {refused.description}")


def _age_s(info: _Info) -> float:
    return (info.ts - info.state.first_ts).total_seconds() if info.state.messages else 0.0
