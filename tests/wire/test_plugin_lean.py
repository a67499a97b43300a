import subprocess
import sys

import pytest

BUDGET = """
import importlib, pkgutil, sys
import muster_plugin
for found in pkgutil.walk_packages(muster_plugin.__path__, "muster_plugin."):
    if ".cli" not in found.name:
        hasattr(importlib.import_module(found.name), "anything")
from muster.nats import bus
from muster.service import probes
print(*sorted({"aiohttp", "kubernetes", "pydantic", "rich", "asyncinotify"} & sys.modules.keys()))
"""
BEFORE_REGISTER = """
import sys
import muster_plugin.__main__
unwanted = {"nats", "prometheus_client", "rich", "structlog.dev", "_ssl", "_hashlib", "pickle"}
unwanted |= {"google.protobuf.internal.python_message", "muster_plugin.gpu.nvml.session"}
print(*sorted(unwanted & sys.modules.keys()))
"""
LEFT_BEHIND = """
import sys
import muster_plugin
from muster import lean
lean.load("prometheus_client", hollow=["http.server", "wsgiref", "wsgiref.simple_server"])
lean.load("nats.aio.client", without=["aiohttp", "importlib.metadata"])
import http.server, importlib.metadata, prometheus_client
assert http.server.BaseHTTPRequestHandler.__init__
assert importlib.metadata.version("nats-py")
assert prometheus_client.generate_latest()
print(*(name for name in ("aiohttp", "wsgiref") if name in sys.modules))
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
NOTHING_LOADED_FIRST = """
from muster import lean
lean.load("nats.aio.client", without=["aiohttp"])
"""


@pytest.mark.parametrize(
    "program",
    [NOTHING_LOADED_FIRST + BUDGET, BEFORE_REGISTER, LEFT_BEHIND, WITH_TLS_LATER],
    ids=["all modules", "before the registration", "after a lean load", "TLS when it is wanted"],
)
def test_the_plugin_loads_nothing_that_it_does_not_use(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("\n", "")
