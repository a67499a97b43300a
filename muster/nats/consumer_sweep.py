"""Adapter for JetStream: removes consumers that waste resources or push to wrong subjects."""

import contextlib
from typing import Final

import nats.js.errors
from nats.aio.client import Client
from nats.js import api

from muster.nats import streams
from muster.service import runtime

_EPHEMERAL_S: Final = 600.0
"""How long an ephemeral consumer may exist without a reader; muster's own expire after 30 s."""
_INBOX: Final = "_INBOX."


async def sweep(client: Client) -> int:
    """Remove costly and misdirected consumers; return how many were removed.

    nats-server allows 1,000 consumers for each stream in total (2.15), and a consumer may push the
    stream's messages to any subject of the account that has a subscriber without wildcards. A
    replicated consumer takes about 200 kB on each server. Raises nats-py's errors.
    """
    removed = 0
    for stream in streams.FOLLOWED:
        for name in await _removable(client, stream.name):
            # the server may have removed the consumer first
            with contextlib.suppress(nats.js.errors.NotFoundError):
                removed += await client.jetstream().delete_consumer(stream.name, name)
            runtime.end_if_cancelled()
    return removed


async def _removable(client: Client, stream: str) -> list[str]:
    consumers: list[api.ConsumerInfo] = []
    while True:
        page = await client.jetstream().consumers_info(stream, offset=len(consumers))
        runtime.end_if_cancelled()
        consumers += page
        if not page:
            break
    return [
        consumer.name
        for consumer in consumers
        if _is_misdirected(consumer.config) or _is_costly(consumer.config)
    ]


def _is_misdirected(config: api.ConsumerConfig) -> bool:
    """Return whether a consumer pushes messages to something other than an inbox."""
    return config.deliver_subject is not None and not config.deliver_subject.startswith(_INBOX)


def _is_costly(config: api.ConsumerConfig) -> bool:
    """Return whether a consumer is ephemeral, and is replicated or long outlives its reader."""
    is_replicated = (config.num_replicas or 1) > 1
    stays = (config.inactive_threshold or 0) > _EPHEMERAL_S
    return not config.durable_name and (is_replicated or stays)
