"""Plugins that inject faults into themselves on request.

python sabotaged.py SOCKET_FD

Each message on the socket is the path of a configuration, with one file descriptor. For each, this
process forks one that runs the shipped plugin; modules, whose imports take most of a start, are
already imported. The plugin writes its log to the descriptor, and reads from it lines of one word
and one number. They inject faults that a test cannot cause from outside the process, as close to
their usual cause as possible. Each line is answered by `{"event": "sabotaged"}`.

| word   | effect while the number is above 0                                                 |
|--------|------------------------------------------------------------------------------------|
| hang   | its gRPC server accepts calls and never answers them, as with a stuck executor     |
| block  | its event loop is blocked, as in a call into a hung library                        |
| lag    | its event loop is blocked for this number of seconds in every second               |
| mute   | its ListAndWatch sends the previous list again, whatever has changed               |
| blind  | the times of its own checks are not recorded, as if the checks hung                |
| clock  | its wall clock is this number of seconds ahead                                     |

MUSTER_TEST_PERIOD_S is the period of its own checks in seconds, for shorter tests.
"""

import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, Final, NoReturn

from muster.service import lean
from muster_plugin import __main__ as plugin
from muster_plugin import node
from muster_plugin.config import settings
from muster_plugin.discovery import host_scanner
from muster_plugin.kubelet import (
    kubelet_socket,
    podresources,
    protobuf,
    registration,
    resource_plugin,
    server,
)

PERIOD_S: Final = float(os.environ.get("MUSTER_TEST_PERIOD_S", "0"))
_PR_SET_PDEATHSIG: Final = 1
said: dict[str, float] = {}
sent: dict[str, Any] = {}


def shorten() -> None:
    """Make the plugin check itself more often."""
    longer = resource_plugin.Timing
    patient = registration.Timeouts(kubelet_startup_s=0.0, settled_s=0.0)
    resource_plugin.Timing = lambda: longer(timeouts=patient, probe_s=PERIOD_S)  # type: ignore[assignment, misc]
    host_scanner._PERIOD_S = kubelet_socket._CHECK_PERIOD_S = PERIOD_S  # type: ignore[misc]
    defaults = podresources.PodResourcesPoller.run.__kwdefaults__
    assert defaults is not None, "it has a period"
    defaults["period_s"] = PERIOD_S


def prepare() -> None:
    """Patch the plugin's functions in which faults are injected."""
    options, checked = server.Endpoint.get_device_plugin_options, node.Node._record_check_time
    allocate, listed, wall = server.Endpoint.allocate, protobuf.device_list, time.time

    async def hanging_options(*given: Any) -> Any:
        while said.get("hang"):
            await asyncio.sleep(0.05)
        return await options(*given)

    async def hanging_allocate(*given: Any) -> Any:
        while said.get("hang"):
            await asyncio.sleep(0.05)
        return await allocate(*given)

    def maybe_checked(self: node.Node, kind: str, at: float) -> None:
        if not said.get("blind"):
            checked(self, kind, at)

    def maybe_listed(devices: Any) -> Any:
        if not said.get("mute") or not sent:
            sent["last"] = listed(devices)
        return sent["last"]

    server.Endpoint.get_device_plugin_options = hanging_options  # type: ignore[method-assign, assignment]
    server.Endpoint.allocate = hanging_allocate  # type: ignore[method-assign, assignment]
    node.Node._record_check_time = maybe_checked  # type: ignore[method-assign]
    protobuf.device_list = maybe_listed
    time.time = lambda: wall() + said.get("clock", 0.0)


def block() -> None:
    """Block the event loop until `block` is 0."""
    while said.get("block"):
        time.sleep(0.01)


def lag(loop: asyncio.AbstractEventLoop) -> None:
    """Block the event loop for `lag` seconds of every second, until `lag` is 0."""
    seconds = said.get("lag", 0.0)
    if seconds:
        time.sleep(seconds)
        loop.call_later(1.0 - seconds, lag, loop)


def obey(loop: asyncio.AbstractEventLoop) -> None:
    """Read lines and apply their faults, in a separate thread."""
    for line in sys.stdin:
        word, _, number = line.partition(" ")
        said[word] = float(number)
        if word == "block":
            loop.call_soon_threadsafe(block)
        if word == "lag":
            loop.call_soon_threadsafe(lag, loop)
        os.write(1, b'{"event":"sabotaged"}\n')


async def serve(*given: Any) -> None:
    loop = asyncio.get_running_loop()
    threading.Thread(target=obey, args=(loop,), daemon=True).start()
    await served(*given)


def live(path: str, pipe: int) -> NoReturn:
    """Run the plugin with this configuration, and exit."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (0, 1):
        os.dup2(pipe, descriptor)
    os.close(pipe)
    resource_plugin._PROCESS = os.urandom(settings.PROCESS_BYTES).hex()  # type: ignore[misc]
    sys.argv = ["muster-plugin", "--config", path]
    code = 1
    try:
        code = plugin.main()
    finally:
        os._exit(code)


def main() -> None:
    """Fork a plugin for each message, until the other end of the socket is closed."""
    if PERIOD_S:
        shorten()
    prepare()
    plugin.serve = serve  # type: ignore[assignment]
    lean.import_bus()
    from muster_plugin import bus_reporter  # noqa: F401, PLC0415  # as the plugin does

    # plugins are not waited for: the kernel reaps them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        while True:
            path, (*pipes,), _, _ = socket.recv_fds(orders, 4096, 1)
            if not path:
                return
            born = os.fork()
            if not born:
                orders.close()
                live(path.decode(), pipes[0])
            os.close(pipes[0])
            orders.send(str(born).encode())


served = plugin.serve
if __name__ == "__main__":
    main()
