"""Adapter: import tricks that keep the memory of a node's processes small.

The plugin runs on every node, so its memory matters: modules that its packages load but never use
are kept out. Its resident memory after the registration, with the bus imported, is 64.4 MiB without
these tricks and 47.6 MiB with them (CPython 3.11, x86-64, all extras installed). Each trick saves:

    nats-py finds no aiohttp, which it needs for WebSockets only                  | 13.2 MiB
    OpenSSL is loaded when TLS is first used: `ssl` lazily, hashlib without it,   |  5.7 MiB
    prometheus-client without its HTTP server and client, which probes replace    |
    what `muster.service.start` does for every service                           |  4.1 MiB, 28 ms
    bus, probes and prometheus-client are imported after the registration         | 80 ms
    the sources and the health of GPUs are imported where there are GPUs          | 15 ms
    the importers are imported only for another plugin's file                     | 12 ms

The tricks take effect when this module is imported before all others. The modules that were kept
out can be imported normally afterwards; modules that are already loaded stay.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from typing import Final

_HTTP: Final = ("http.server", "ssl", "urllib.request", "wsgiref", "wsgiref.simple_server")


class _Lazy(types.ModuleType):
    """A module that is loaded when one of its missing attributes is first used."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = types.ModuleType  # type: ignore[assignment]  # as importlib's LazyLoader
        assert self.__spec__ is not None, "made from its spec"
        assert self.__spec__.loader is not None, "the standard library has loaders"
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def import_bus() -> None:
    """Import the modules for the bus and the metrics, without aiohttp and OpenSSL."""
    with start.replaced({"aiohttp": None, "_hashlib": None}):
        importlib.import_module("nats.aio.client")
    with start.replaced({name: start.Empty(name) for name in _HTTP}):
        importlib.import_module("prometheus_client")


def _prepare() -> None:
    _make_lazy("asyncio.sslproto")
    # an unloaded class has no instances, so isinstance does not need OpenSSL
    _make_lazy("ssl", "SSLContext", "SSLSocket")
    if "hashlib" not in sys.modules:
        sys.modules["_hashlib"] = None  # type: ignore[assignment]  # as if it were not installed
        importlib.import_module("hashlib")
        del sys.modules["_hashlib"]


def _make_lazy(name: str, *classes: str) -> None:
    """Load a module when it is first used; until then it has empty `classes`."""
    if name in sys.modules:
        return
    package = name.rpartition(".")[0]
    # importlib.util.find_spec would import the package, which imports the module
    above = importlib.machinery.PathFinder.find_spec(package) if package else None
    where = above.submodule_search_locations if above else None
    spec = importlib.machinery.PathFinder.find_spec(name, where)
    assert spec is not None, "part of the standard library"
    lazy = importlib.util.module_from_spec(spec)
    lazy.__class__ = _Lazy
    for class_name in classes:
        setattr(lazy, class_name, type(class_name, (), {}))
    sys.modules[name] = lazy


_prepare()
from muster.service import start  # noqa: E402  # imports asyncio, which imports ssl

end_imports = start.end_imports
