"""Door to the notifier's packages: groups alerts and tells people, once.

nats-py loads aiohttp where it is installed and structlog rich: 15 MiB that nobody here uses. They
are kept from loading while those two are imported, because this runs before every module of the
room; whoever wants them afterwards gets them.
"""

import importlib
import sys

_UNUSED = ("aiohttp", "rich")
_withheld = [name for name in _UNUSED if name not in sys.modules]
# None makes the import system say ModuleNotFoundError, which both allow for
sys.modules.update(dict.fromkeys(_withheld))  # type: ignore[arg-type]
try:
    importlib.import_module("structlog")
    importlib.import_module("nats.aio.client")
finally:
    for _name in _withheld:
        del sys.modules[_name]
