"""Adapter for gRPC: serves the socket on which the kubelet registers and calls a driver (CSI, DRA).

The kubelet's plugin watcher detects the socket, queries the driver's name, and reports whether the
driver is registered. It repeats this after every restart of the kubelet. The same socket serves the
driver, so that a registered driver is always served.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import grpc
import grpc.aio

from muster import pacing
from muster.pb import pluginregistration_pb2 as pr
from muster.pb import rpc
from muster.service import logs

_LOOK_S: Final = 1.0
_STOP_GRACE_S: Final = 2.0
_CALLS_MAX: Final = 512
_RETRY: Final = pacing.Backoff(first_s=0.5, max_s=30.0)


class Driver(NamedTuple):
    """The offered driver; `kind` and `versions` are spelled as in the kubelet."""

    kind: str
    name: str
    versions: tuple[str, ...]
    handlers: Sequence[grpc.GenericRpcHandler]


async def _nothing() -> None:
    """Do nothing: the default for `prepare`."""


class Registration:
    """Offers a driver to the kubelet for as long as the process runs.

    `registry` is the kubelet's directory for the sockets of plugins. `prepare` runs before each
    socket is opened, and may raise OSError. If the kubelet does not register the driver within
    `unregistered_s`, the kubelet is offered a new socket.
    """

    def __init__(
        self,
        registry: Path,
        driver: Driver,
        *,
        prepare: Callable[[], Awaitable[None]] = _nothing,
        unregistered_s: float = 60.0,
    ) -> None:
        self.registered_at: float | None = None
        """When the kubelet registered the driver, in monotonic seconds; None if it is not
        registered.
        """
        self.registrations = 0
        self.problem = "the kubelet has not registered the driver"
        """Why the driver is not registered; empty if it is."""
        self.changed = asyncio.Event()
        """Set when the driver is registered or refused, or loses its socket."""
        self._path = registry / f"{driver.name}-reg.sock"
        self._driver = driver
        self._prepare = prepare
        self._unregistered_s = unregistered_s
        self._offered_at = 0.0

    async def run(self) -> None:
        """Serve until cancelled; start again after any failure."""
        failures = 0
        while True:
            server = grpc.aio.server(maximum_concurrent_rpcs=_CALLS_MAX)
            server.add_generic_rpc_handlers(
                (*self._driver.handlers, rpc.plugin_watcher_handler(self))
            )
            try:
                await self._prepare()
                self._offered_at = time.monotonic()
                problem = await self._serve(server)
                failures = 0
            except (OSError, RuntimeError) as error:
                problem = f"{self._path}: {error}"
            finally:
                # must come first: gRPC unlinks the path, even of another process's socket
                await server.stop(_STOP_GRACE_S)
            self._lose(problem)
            failures += 1
            await asyncio.sleep(_RETRY.delay_s(failures))

    async def get_info(
        self,
        request: pr.InfoRequest,  # noqa: ARG002  # empty
        context: rpc.Context[pr.InfoRequest, pr.PluginInfo],  # noqa: ARG002
    ) -> pr.PluginInfo:
        """Return the driver that this socket offers."""
        return pr.PluginInfo(
            type=self._driver.kind,
            name=self._driver.name,
            endpoint=str(self._path),
            supported_versions=self._driver.versions,
        )

    async def notify_registration_status(
        self,
        request: pr.RegistrationStatus,
        context: rpc.Context[pr.RegistrationStatus, pr.RegistrationStatusResponse],  # noqa: ARG002
    ) -> pr.RegistrationStatusResponse:
        """Record whether the kubelet registered the driver."""
        if request.plugin_registered:
            self.registered_at, self.problem = time.monotonic(), ""
            self.registrations += 1
            logs.logger().info("driver_registered", driver=self._driver.name)
            self.changed.set()
        else:
            self._lose(f"the kubelet did not register the driver: {request.error[:500]}")
        return pr.RegistrationStatusResponse()

    async def _serve(self, server: grpc.aio.Server) -> str:
        """Serve until the socket is lost or unused; return the reason.

        Raises OSError, RuntimeError.
        """
        self._path.parent.mkdir(mode=0o750, exist_ok=True)
        server.add_insecure_port(f"unix:{self._path}")
        await server.start()
        bound = _inode(self._path)
        while True:
            await asyncio.sleep(_LOOK_S)
            if _inode(self._path) != bound:
                return f"{self._path} was removed or replaced"
            waited_s = time.monotonic() - self._offered_at
            if self.registered_at is None and waited_s >= self._unregistered_s:
                return self.problem

    def _lose(self, problem: str) -> None:
        if self.registered_at is not None or problem != self.problem:
            logs.logger().warning("driver_not_registered", problem=problem)
        self.registered_at, self.problem = None, problem
        self.changed.set()


def _inode(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return status.st_ino, status.st_ctime_ns
    return None
