"""Adapter: the notifier's packages. Groups alerts and tells people, once.

nats-py loads aiohttp where it is installed and structlog rich: 15 MiB that nobody here uses. This
runs before every module of the room; whoever wants them afterwards gets them.
"""

from muster import lean

lean.load("structlog", without=["rich"])
lean.load("nats.aio.client", without=["aiohttp"])
