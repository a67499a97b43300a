"""Adapter: self-probe: dials the plugin's own sockets by their paths, as a client would."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from muster_plugin.kubelet import registration_events, resource_status, server

PERIOD_S: Final = 14.0
"""A probe costs a connection, half of an idle plugin's work, so it runs rarely; whether the socket
file is ours is checked more often. A server that hangs must be detected within 20 s: this period,
the probe's timeout of 2 s, and the 3 s that health waits for a recovery."""
_RETRY_S: Final = 0.2
_TEXT_MAX: Final = 300


class SelfProbe:
    """Probes the current `endpoint` and keeps the last result.

    `send` gets a signal for each probe; `on_failure` gets each failure, and whether it is the first
    after a success.
    """

    def __init__(
        self,
        endpoint: Callable[[], server.Endpoint | None],
        *,
        send: Callable[[registration_events.Signal], None],
        on_failure: Callable[[server.Endpoint, str, bool], None],
        period_s: float,
    ) -> None:
        self.last_result: resource_status.ProbeResult | None = None
        self.due = asyncio.Event()
        """Set when the kubelet has listed the resource: probe at once."""
        self._endpoint = endpoint
        self._send = send
        self._on_failure = on_failure
        self._period_s = period_s

    async def run(self) -> None:
        """Probe until cancelled: once listed, then periodically, and soon after a failure."""
        wait_s = self._period_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.due.wait()
            self.due.clear()
            wait_s = self._period_s
            endpoint = self._endpoint()
            if endpoint is not None and not await self._probe(endpoint):
                wait_s = min(self._period_s, _RETRY_S)

    async def _probe(self, endpoint: server.Endpoint) -> bool:
        try:
            seconds = await endpoint.probe()
        except server.ProbeFailed as failure:
            is_first = self.last_result is None or self.last_result.ok
            self.last_result = resource_status.ProbeResult(
                ok=False, seconds=0.0, at=time.monotonic()
            )
            self._on_failure(endpoint, str(failure), is_first)
            self._send(
                registration_events.ProbeFailed(endpoint.generation, str(failure)[:_TEXT_MAX])
            )
            return False
        self.last_result = resource_status.ProbeResult(
            ok=True, seconds=seconds, at=time.monotonic()
        )
        self._send(registration_events.ProbePassed(endpoint.generation))
        return True
