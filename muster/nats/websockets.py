"""Adapter for nats-py's WebSockets: delays the import of aiohttp until a WebSocket is opened.

nats-py imports aiohttp wherever it is installed. The processor time that commands take to start
(CPython 3.11, x86-64, all extras installed):

    muster status          | 0.36 s instead of 0.52 s
    muster events --help   | 0.36 s instead of 0.55 s

This module takes effect only if it is imported before nats-py and aiohttp. The plugin, which has no
aiohttp, uses `muster.service.lean` instead.
"""

import importlib
import sys
import types


class _Aiohttp(types.ModuleType):
    """Imports aiohttp on first use.

    nats-py uses aiohttp only to open WebSockets and to read their messages.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module("aiohttp"), name)


def _import_without_aiohttp() -> None:
    """Import nats-py's transport with a stand-in for aiohttp, which no other module gets."""
    if "aiohttp" in sys.modules or "nats.aio.transport" in sys.modules:
        return
    sys.modules["aiohttp"] = _Aiohttp("aiohttp")
    try:
        importlib.import_module("nats.aio.transport")
    finally:
        del sys.modules["aiohttp"]


_import_without_aiohttp()
