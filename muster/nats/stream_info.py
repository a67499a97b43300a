"""Adapter: JetStream: how much a stream stores, and whether it exists."""

from datetime import datetime
from typing import Final

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from muster.nats import streams
from muster.service import runtime

_NO_STREAM: Final = 10059
"""nats-server's JSStreamNotFoundErr."""
_TIMEOUT_S: Final = 2.0


def is_missing(stream: streams.Stream, error: BaseException) -> bool:
    """Return whether reading failed because an optional stream is not created yet."""
    is_not_there = isinstance(error, nats.js.errors.NotFoundError) and error.err_code == _NO_STREAM
    return is_not_there and stream.is_optional


class _State(msgspec.Struct):
    bytes: int
    first_ts: datetime
    messages: int


class _Info(msgspec.Struct):
    state: _State
    ts: datetime


async def stored(client: Client, stream: str) -> tuple[int, float]:
    """Return a stream's bytes, and the age of its oldest message in seconds by the server's clock.

    Raises nats-py's errors, also if the server has no such stream.
    """
    answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=_TIMEOUT_S)
    runtime.end_if_cancelled()
    try:
        info = msgspec.json.decode(answer.data, type=_Info)
    except msgspec.MsgspecError as error:
        raise nats.errors.Error(f"{stream}: {error}") from None
    age_s = (info.ts - info.state.first_ts).total_seconds() if info.state.messages else 0.0
    return info.state.bytes, age_s
