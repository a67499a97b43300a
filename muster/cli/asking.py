"""Adapter: NATS for commands that ask it something: for ten seconds, and then they say so."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Final

from muster import client
from muster.nats import bus

_PATIENCE_S: Final = 10.0


def run(command: str, asked: Coroutine[object, object, int]) -> int:
    """Do what a command asks; return its exit code."""

    async def within() -> int:
        async with asyncio.timeout(_PATIENCE_S):
            return await asked

    try:
        return asyncio.run(within())
    except TimeoutError:
        print(f"muster {command}: NATS does not answer", file=sys.stderr)
        return 1


def connected(command: str, url: str | None) -> bus.Bus:
    """Return a connection; by default to this machine's NATS."""
    return bus.Bus(
        url or client.DEFAULT_URL, producer=f"clients/{command}", name=command, owner=True
    )
