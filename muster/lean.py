"""Adapter: Python's import system: loads what a process needs fast, and no more than that.

Packages load more than they are used for: structlog loads rich where it is installed (40 ms,
5 MiB) and its console (7 ms), nats-py aiohttp (100 ms, 11 MiB) and always the reader of package
metadata (1 MiB), prometheus-client an HTTP server and an HTTP client (1 MiB), protobuf what only
its Python implementation needs (5 ms, 0.7 MiB), asyncio and hashlib OpenSSL (6 ms, 6 MiB). The
garbage collector goes through every import again and again and finds nothing (15 ms of 145).
Measured with CPython 3.11.
"""

import gc
import importlib
import importlib.machinery
import importlib.util
import itertools
import sys
import types
from collections.abc import Sequence


class _Hollow(types.ModuleType):
    """A module in which every name is an empty class: enough to derive from, not to use."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": _ignore})


class _Later(types.ModuleType):
    """A module that is loaded as soon as something is asked of it that it has not got."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = types.ModuleType  # type: ignore[assignment]  # as importlib's LazyLoader
        assert self.__spec__ is not None, "made from its spec"
        assert self.__spec__.loader is not None, "no module without a loader is made here"
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def later(module: str, *, classes: Sequence[str] = ()) -> None:
    """Have `module` loaded when it is first used, not when it is first imported.

    Unlike importlib's LazyLoader this lets `isinstance` be asked for `classes` before: nothing can
    be an instance of one that was never loaded. What is loaded already stays.
    """
    if module in sys.modules:
        return
    package, _, child = module.rpartition(".")
    where = None
    for above in itertools.accumulate(package.split(".") if package else (), "{}.{}".format):
        parent = importlib.machinery.PathFinder.find_spec(above, where)
        where = parent.submodule_search_locations if parent else None
    spec = importlib.machinery.PathFinder.find_spec(module, where)
    if spec is None:
        return
    found = importlib.util.module_from_spec(spec)
    found.__class__ = _Later
    for name in classes:
        setattr(found, name, type(name, (), {}))
    sys.modules[module] = found
    if package:
        load(package)
        setattr(sys.modules[package], child, found)


def fully(module: str) -> None:
    """Load what `later` put off, because somebody is about to keep what they find in it."""
    hasattr(importlib.import_module(module), "anything")


def load(module: str, *, without: Sequence[str] = (), hollow: Sequence[str] = ()) -> None:
    """Import `module`; afterwards others may import for themselves what it did not get.

    It finds `without` not installed, which it must allow for, and `hollow` empty of meaning: what
    it insists on, for functions of its own that we never call. What is loaded already stays.
    """
    if module in sys.modules:
        return
    withheld: dict[str, types.ModuleType | None] = {
        # None makes the import system say ModuleNotFoundError (docs: "import system", module cache)
        **dict.fromkeys(without),
        **{name: _Hollow(name) for name in hollow},
    }
    before = {name: sys.modules[name] for name in withheld if name in sys.modules}
    for name, stand_in in withheld.items():
        if name not in before or isinstance(before[name], _Later):
            sys.modules[name] = stand_in  # type: ignore[assignment]
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        # what was loaded stays for good: nothing is gained by going through it again
        gc.freeze()
        if collects:
            gc.enable()
        for name in withheld:
            del sys.modules[name]
        sys.modules.update(before)


def begin() -> None:
    """Have hashes and logs loaded that cost little, and TLS only by those who come to speak it."""
    later("ssl", classes=["SSLContext", "SSLSocket"])
    for seldom in ("asyncio.sslproto", "bz2", "difflib", "ipaddress", "lzma"):
        later(seldom)
    load("hashlib", without=["_hashlib"])
    load(
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


def _ignore(*_: object, **__: object) -> None:
    """Make an instance of nothing."""
