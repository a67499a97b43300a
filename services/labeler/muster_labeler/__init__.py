"""Adapter: the labeler's packages. Turns GPU inventories into the right node labels.

nats-py loads aiohttp where it is installed and structlog rich, a third of what a start costs. This
runs before every module of the room; what speaks to Kubernetes loads aiohttp then.
"""

from muster import lean

lean.load("structlog", without=["rich"])
lean.load("nats.aio.client", without=["aiohttp"])
