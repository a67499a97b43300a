"""Adapter: health's packages. Finds plugins that failed silently, and says which way.

Loaded here, before anybody loads them whole: of 49 MiB without a single plugin 32 are left.
"""

from muster import lean

lean.begin()
lean.load("nats.aio.client", without=["_hashlib", "aiohttp", "importlib.metadata"])
lean.load(
    "prometheus_client",
    hollow=["http.server", "ssl", "urllib.request", "wsgiref", "wsgiref.simple_server"],
)
