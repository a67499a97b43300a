"""Adapter: nats-py's WebSockets: keeps aiohttp, which only they need, out until one is opened.

nats-py imports aiohttp wherever that is installed. Processor time of a command's start (CPython
3.11, x86-64, all extras installed):

    muster status          | 0.36 s instead of 0.52 s
    muster events --help   | 0.36 s instead of 0.55 s

This takes effect when it is imported before nats-py. If aiohttp or nats-py was imported before,
nothing changes. The plugin, which has no aiohttp, uses `muster.service.lean` instead.
"""

import importlib
import sys
import types


class _Aiohttp(types.ModuleType):
    """Imports aiohttp when something in it is first used.

    nats-py uses it only to make a client for WebSockets and to read its messages.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module("aiohttp"), name)


def _import_without_aiohttp() -> None:
    """Import nats-py's transport with a stand-in, and let everybody else import aiohttp itself."""
    if "aiohttp" in sys.modules or "nats.aio.transport" in sys.modules:
        return
    sys.modules["aiohttp"] = _Aiohttp("aiohttp")
    try:
        importlib.import_module("nats.aio.transport")
    finally:
        del sys.modules["aiohttp"]


_import_without_aiohttp()
