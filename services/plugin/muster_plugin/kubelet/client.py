"""Adapter: registers with the kubelet over gRPC, and probes the plugin's own sockets.

The kubelet's plugin watcher needs no Register call: it finds the plugin's socket by itself. The
self-probe dials the plugin's sockets by their paths, as the kubelet would.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from muster.pb import rpc
from muster_plugin.kubelet import kubelet_socket, protobuf, registration_signals, server

# During Register the kubelet dials the plugin, for up to 10 s (pluginmanager, dial with block).
_REGISTER_TIMEOUT_S: Final = 12.0
_WATCHER_TIMEOUT_S: Final = 10.0
_UNREACHABLE: Final = ("failed to connect to all addresses", "Socket closed")
"""gRPC's error texts if nothing listens on a socket any more (grpc 1.7x)."""
_PROBE_RETRY_S: Final = 0.2
_FAILURE_CHARS_MAX: Final = 300


class Refused(Exception):
    """The kubelet refused the registration, with gRPC's code and details, or was `unreachable`."""

    def __init__(self, code: str, details: str, *, unreachable: bool = False) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details
        self.unreachable = unreachable


async def register(kubelet: Path, resource: str, socket: str, *, pre_start: bool) -> str:
    """Register at the kubelet's socket; return that socket's identity. Raises Refused."""
    identity = kubelet_socket.identity(kubelet)
    if not identity:
        raise Refused("UNAVAILABLE", f"{kubelet_socket.NAME} is missing", unreachable=True)
    request = protobuf.register_request(resource, socket, pre_start=pre_start)
    # A new channel with its own pool: after a refused dial, gRPC's shared pool waits for 1 s.
    async with grpc.aio.insecure_channel(f"unix:{kubelet}", options=server.OWN_POOL) as channel:
        try:
            await rpc.RegistrationClient(channel).register(request, timeout=_REGISTER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            unreachable = any(text in details for text in _UNREACHABLE)
            raise Refused(error.code().name, details, unreachable=unreachable) from None
    return identity


async def wait_for_plugin_watcher(endpoint: server.Endpoint) -> str:
    """Wait until the kubelet's plugin watcher has registered the plugin's socket. Raises Refused.

    Returns an empty text in place of the identity of kubelet.sock, which is not needed: a restarted
    kubelet finds the plugin's socket by itself.
    """
    try:
        async with asyncio.timeout(_WATCHER_TIMEOUT_S):
            error = await endpoint.registration_status()
    except TimeoutError:
        text = f"no plugin watcher has read {endpoint.path.parent}"
        raise Refused("UNAVAILABLE", f"{text} within {_WATCHER_TIMEOUT_S:g} s") from None
    if error:
        raise Refused("UNKNOWN", error)
    return ""


class SelfProbe:
    """Probes the current `endpoint` and stores the last result.

    `send` receives a signal for each probe. `on_failure` receives each failure, and whether it is
    the first failure after a success.
    """

    def __init__(
        self,
        endpoint: Callable[[], server.Endpoint | None],
        *,
        send: Callable[[registration_signals.Signal], None],
        on_failure: Callable[[server.Endpoint, str, bool], None],
        period_s: float,
    ) -> None:
        self.last_result: registration_signals.ProbeResult | None = None
        self.due = asyncio.Event()
        """Set when the kubelet has listed the resource, so that a probe runs immediately."""
        self._endpoint = endpoint
        self._send = send
        self._on_failure = on_failure
        self._period_s = period_s

    async def run(self) -> None:
        """Probe until cancelled: periodically, when `due` is set, and soon after a failure."""
        wait_s = self._period_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.due.wait()
            self.due.clear()
            wait_s = self._period_s
            endpoint = self._endpoint()
            if endpoint is not None and not await self._probe(endpoint):
                wait_s = min(self._period_s, _PROBE_RETRY_S)

    async def _probe(self, endpoint: server.Endpoint) -> bool:
        seconds, error = 0.0, ""
        try:
            seconds = await endpoint.probe()
        except server.ProbeFailed as failure:
            error = str(failure)
        before, at = self.last_result, time.monotonic()
        self.last_result = registration_signals.ProbeResult(ok=not error, seconds=seconds, at=at)
        if not error:
            self._send(registration_signals.ProbePassed(endpoint.generation))
            return True
        self._on_failure(endpoint, error, before is None or before.ok)
        text = error[:_FAILURE_CHARS_MAX]
        self._send(registration_signals.ProbeFailed(endpoint.generation, text))
        return False
