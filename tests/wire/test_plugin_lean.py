"""The plugin loads no package that it does not use, and no TLS before it is needed."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ALL_MODULES = """
import importlib, pkgutil, sys
import muster_plugin.__main__, muster.service.lean
muster.service.lean.import_bus()
for module in pkgutil.walk_packages(muster_plugin.__path__, "muster_plugin."):
    if not module.name.startswith("muster_plugin.cli"):
        importlib.import_module(module.name)
print(*sorted({"aiohttp", "kubernetes", "pydantic", "rich"} & sys.modules.keys()))
"""
BEFORE_REGISTER = """
import gc, sys
import muster_plugin.__main__
assert gc.isenabled()
assert gc.get_freeze_count() > 10_000
unwanted = {"nats", "prometheus_client", "rich", "_ssl", "_hashlib"}
unwanted |= {f"muster_plugin.{name}" for name in ("config.importers", "gpu.nvml", "gpu.evaluation")}
unwanted |= {"muster_plugin.watch", "muster_plugin.watch.watcher"}
print(*sorted(unwanted & sys.modules.keys()))
"""
WATCHING_ONLY = """
import sys
import muster_plugin.__main__, muster.service.lean
muster.service.lean.import_bus()
import muster_plugin.bus_reporter, muster_plugin.watch.watcher
print(*sorted({"grpc", "aiohttp", "kubernetes"} & sys.modules.keys()))
"""
WITHHELD_MODULES_AFTERWARDS = """
import sys
from muster.service import lean
lean.import_bus()
assert not {"_ssl", "_hashlib", "aiohttp", "wsgiref", "urllib.request"} & sys.modules.keys()
import aiohttp, http.server, prometheus_client, rich, ssl
assert aiohttp.ClientSession
assert http.server.BaseHTTPRequestHandler.__init__
assert prometheus_client.generate_latest()
assert ssl.create_default_context()
print()
"""
WITH_TLS_LATER = """
import muster_plugin.__main__
import asyncio, sys
def answer(_, writer):
    writer.write(b"this is not TLS")
    writer.close()
async def story():
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address)
        assert await reader.read() == b"this is not TLS"
        writer.close()
        print(*(name for name in ("_ssl", "_hashlib") if name in sys.modules))
        import ssl
        try:
            await asyncio.open_connection(*address, ssl=True)
        except ssl.SSLError as error:
            assert error.reason == "WRONG_VERSION_NUMBER", error
asyncio.run(story())
"""
CENTRAL = (
    *("muster_gate", "muster_health", "muster_labeler", "muster_notifier"),
    "muster_fuse.admission",
)
CENTRAL_SERVICES = f"""
import gc, importlib, sys
for service in {CENTRAL}:
    importlib.import_module(service + ".__main__")
assert gc.isenabled()
assert gc.get_freeze_count() > 10_000
print(*sorted({{"rich", "structlog.dev"}} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    "program",
    [
        ALL_MODULES,
        BEFORE_REGISTER,
        WATCHING_ONLY,
        WITHHELD_MODULES_AFTERWARDS,
        WITH_TLS_LATER,
        CENTRAL_SERVICES,
    ],
    ids=[
        "all modules",
        "before the registration",
        "watching",
        "afterwards",
        "TLS when wanted",
        "the others",
    ],
)
def test_a_service_loads_nothing_that_it_does_not_use(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("\n", "")


@pytest.mark.parametrize("service", CENTRAL)
def test_what_makes_the_start_quick_is_imported_first(service: str) -> None:
    spec = importlib.util.find_spec(f"{service}.__main__")
    assert spec is not None
    tree = ast.parse(Path(str(spec.origin)).read_text())
    first = next(node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import))
    assert ast.unparse(first) == "from muster.service import start"
