"""Door to health's packages. Finds plugins that failed silently, and says which way.

Loaded here, before anybody loads them whole: of 49 MiB without a single plugin 32 are left.
"""

from muster import lean

# TLS is for those whose bus or cluster speaks it
lean.later("ssl", classes=["SSLContext", "SSLSocket"])
for _seldom in ("asyncio.sslproto", "bz2", "difflib", "ipaddress", "lzma"):
    lean.later(_seldom)
lean.load("hashlib", without=["_hashlib"])
lean.load(
    "structlog",
    without=["rich"],
    hollow=[
        "pickle",
        "structlog.dev",
        "structlog.stdlib",
        "structlog.testing",
        "structlog.threadlocal",
        "structlog.tracebacks",
        "structlog.twisted",
    ],
)
lean.load("nats.aio.client", without=["_hashlib", "aiohttp", "importlib.metadata"])
lean.load(
    "prometheus_client",
    hollow=["http.server", "ssl", "urllib.request", "wsgiref", "wsgiref.simple_server"],
)
