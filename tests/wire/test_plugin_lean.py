import subprocess
import sys

import pytest

BUDGET = """
import importlib, pkgutil, sys
import muster_plugin
for found in pkgutil.walk_packages(muster_plugin.__path__, "muster_plugin."):
    importlib.import_module(found.name)
from muster import bus, probes
print(*sorted({"aiohttp", "kubernetes", "pydantic", "rich", "asyncinotify"} & sys.modules.keys()))
"""
BEFORE_REGISTER = """
import sys
import muster_plugin.__main__
print(*sorted({"nats", "prometheus_client", "rich"} & sys.modules.keys()))
"""
LEFT_BEHIND = """
import sys
from muster_plugin import lean
lean.load("prometheus_client", hollow=["http.server", "wsgiref", "wsgiref.simple_server"])
lean.load("nats.aio.client", without=["aiohttp", "importlib.metadata"])
import http.server, importlib.metadata, prometheus_client
assert http.server.BaseHTTPRequestHandler.__init__
assert importlib.metadata.version("nats-py")
assert prometheus_client.generate_latest()
print(*(name for name in ("aiohttp", "wsgiref") if name in sys.modules))
"""
NOTHING_LOADED_FIRST = """
from muster_plugin import lean
lean.load("nats.aio.client", without=["aiohttp"])
"""


@pytest.mark.parametrize(
    "program",
    [NOTHING_LOADED_FIRST + BUDGET, BEFORE_REGISTER, LEFT_BEHIND],
    ids=["all modules", "before the registration", "after a lean load"],
)
def test_the_plugin_loads_nothing_that_it_does_not_use(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("\n", "")
