"""Door to Python's import system: loads what the plugin needs fast, and no more than that.

structlog loads rich for tracebacks in colour (40 ms, 5 MiB), nats-py loads aiohttp for websockets
(100 ms, 11 MiB), wherever they happen to be installed. The plugin uses neither. The garbage
collector goes through every import again and again and finds nothing (15 ms of 145).
"""

import gc
import importlib
import sys


def load(module: str, *, without: str = "") -> None:
    """Import `module` as if `without` were not installed; others may import that afterwards."""
    is_hidden = bool(without) and without not in sys.modules and module not in sys.modules
    if is_hidden:
        # None makes the import system say ModuleNotFoundError (docs: "import system", module cache)
        sys.modules[without] = None  # type: ignore[assignment]
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        if collects:
            gc.enable()
        if is_hidden:
            del sys.modules[without]
