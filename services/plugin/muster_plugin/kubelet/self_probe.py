"""Adapter: our own sockets, dialled by their paths as a stranger would."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from muster_plugin.kubelet import registration_events, resource_status, server

PERIOD_S: Final = 14.0
"""A probe costs a connection, half of what an idle plugin does; that the socket is ours is looked
at far more often. Somebody who serves and does not answer is to be found within 20 s: after this
period, the probe's own 2 s, and the 3 s that health gives him to mend."""
_AGAIN_S: Final = 0.2
_TEXT_MAX: Final = 300


class Probing:
    """Probes what is `served` now, and remembers what came of it.

    `tell` is given a signal each time, `failed` whenever it fails, and whether it did not before.
    """

    def __init__(
        self,
        served: Callable[[], server.Endpoint | None],
        *,
        tell: Callable[[registration_events.Signal], None],
        failed: Callable[[server.Endpoint, str, bool], None],
        period_s: float,
    ) -> None:
        self.last: resource_status.Probe | None = None
        self.now = asyncio.Event()
        """To be set when the kubelet listed us."""
        self._served = served
        self._tell = tell
        self._failed = failed
        self._period_s = period_s

    async def follow(self) -> None:
        """Probe for ever: once listed, then on a period, soon after a failure."""
        wait_s = self._period_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.now.wait()
            self.now.clear()
            wait_s = self._period_s
            served = self._served()
            if served is not None and not await self._probe(served):
                wait_s = min(self._period_s, _AGAIN_S)

    async def _probe(self, probed: server.Endpoint) -> bool:
        try:
            seconds = await probed.probe()
        except server.ProbeFailed as failure:
            is_news = self.last is None or self.last.ok
            self.last = resource_status.Probe(ok=False, seconds=0.0, at=time.monotonic())
            self._failed(probed, str(failure), is_news)
            self._tell(registration_events.ProbeFailed(probed.generation, str(failure)[:_TEXT_MAX]))
            return False
        self.last = resource_status.Probe(ok=True, seconds=seconds, at=time.monotonic())
        self._tell(registration_events.ProbePassed(probed.generation))
        return True
