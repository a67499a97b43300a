"""Door to Python's import system: loads what the plugin needs fast, and no more than that.

Packages load more than they are used for: structlog loads rich where it is installed (40 ms,
5 MiB), nats-py aiohttp (100 ms, 11 MiB) and always the reader of package metadata (1 MiB),
prometheus-client an HTTP server and an HTTP client (1 MiB). The garbage collector goes through
every import again and again and finds nothing (15 ms of 145). Measured with CPython 3.11.
"""

import gc
import importlib
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
        return type(name, (), {})


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
    withheld = {name: stand_in for name, stand_in in withheld.items() if name not in sys.modules}
    sys.modules.update(withheld)  # type: ignore[arg-type]
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
