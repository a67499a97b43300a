"""Adapter: import tricks that reduce the memory of the processes on each node.

The plugin runs on every node, so it must use little memory: modules that its packages load but
never use are not imported. After the registration, with the bus imported, its resident memory is
64.4 MiB without these tricks and 47.6 MiB with them (CPython 3.11, x86-64, all extras installed).
This is what each trick saves:

    nats-py finds no aiohttp, which it needs for WebSockets only                  | 13.2 MiB
    OpenSSL is loaded when TLS is first used: `ssl` lazily, hashlib without it,   |  5.7 MiB
    prometheus-client without its HTTP server and client, which probes replace    |
    what `muster.service.start` does for every service                           |  4.1 MiB, 28 ms
    bus, probes and prometheus-client are imported after the registration         | 80 ms
    the modules about GPUs are imported only on nodes with GPUs                   | 15 ms
    the importers of other plugins' files are imported only for such a file       | 12 ms

The tricks take effect only if this module is imported before all others. The modules that were left
out can be imported normally afterwards; modules that are already loaded stay loaded.
"""

import importlib
import sys
from typing import Final

from muster.service import lazy

_HTTP: Final = ("http.server", "ssl", "urllib.request", "wsgiref", "wsgiref.simple_server")


def import_bus() -> None:
    """Import the modules for the bus and the metrics, without aiohttp and OpenSSL."""
    with start.replaced({"aiohttp": None, "_hashlib": None}):
        importlib.import_module("nats.aio.client")
    with start.replaced({name: start.Empty(name) for name in _HTTP}):
        importlib.import_module("prometheus_client")


def _prepare() -> None:
    lazy.make("asyncio.sslproto")
    # an unloaded class has no instances, so isinstance does not need OpenSSL
    lazy.make("ssl", "SSLContext", "SSLSocket")
    if "hashlib" not in sys.modules:
        sys.modules["_hashlib"] = None  # type: ignore[assignment]  # as if it were not installed
        importlib.import_module("hashlib")
        del sys.modules["_hashlib"]


_prepare()
from muster.service import start  # noqa: E402  # imports asyncio, which imports ssl

end_imports = start.end_imports
