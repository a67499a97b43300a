"""Adapter: NVML for the event loop: what is seen of the GPUs, in order, even while NVML hangs.

No call of NVML is made on the loop. No call can be cut short either: each is waited for as long as
it takes, and told of when it is late, for then nobody watches that GPU. NVML is given up and begun
anew when GPUs came or went, when the driver went away or handles are stale, and then nothing may be
under way; between two beginnings there is a pause, longer each time. What never comes back is left
behind: NVML counts its beginnings, so that the other GPUs are watched by a new one, and the ends
are made up for when nothing is under way any more.
"""

import asyncio
import time
from pathlib import Path

import msgspec

from muster.service import logs
from muster_plugin import blocking
from muster_plugin.config import gpus
from muster_plugin.gpu.nvml import discovery, library, monitor
from muster_plugin.gpu.nvml import session as nvml_session
from muster_plugin.model import gpu

Timeouts = monitor.Timeouts
Observer = monitor.Observer


class _Begun(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a beginning; no session if NVML cannot be asked."""

    look: gpu.Scan
    inbox: monitor.EventQueue
    session: nvml_session.Session | None = None


class NvmlSource:
    """The GPUs of this node, as NVML tells of them."""

    def __init__(
        self,
        rules: gpus.Gpus,
        *,
        sysfs: Path = Path("/sys"),
        proc: Path = Path("/proc"),
        periods: Timeouts | None = None,
    ) -> None:
        self.checked_at: dict[str, float] = {}
        """When looks, waits for events and polls last succeeded, in monotonic seconds."""
        self._rules = rules
        self._poll_s = rules.health.poll_s
        self._files = discovery.KernelFiles(sysfs=sysfs, proc=proc)
        self._periods = periods or Timeouts()
        self._lane = blocking.Lane()
        self._flights = monitor.InflightCalls()
        self._beginning: asyncio.Task[_Begun] | None = None
        self._session: nvml_session.Session | None = None
        self._left: list[tuple[monitor.InflightCalls, nvml_session.Session]] = []
        self._known = nvml_session.PreviousScan()
        self._watching: monitor.SessionMonitor | None = None
        self._told: gpu.Scan | None = None
        self._log = logs.logger()

    async def first(self, timeout_s: float) -> gpu.Scan:
        """Look for the first time. That there is no answer in time is one; `follow` goes on."""
        beginning = self._begin()
        await asyncio.wait([beginning], timeout=timeout_s)
        self._told = beginning.result().look if beginning.done() else _silent(timeout_s)
        return self._told

    async def follow(self, seen: Observer) -> None:
        """Tell for ever what is observed, and every look but the one that `first` gave."""
        watchers = monitor.MonitoringStatus(seen)
        pause_s = self._periods.begin_first_s
        while True:
            begun = await self._begun(seen)
            self._tell(begun.look, seen)
            began_at = time.monotonic()
            if begun.session is not None:
                self._log.info("nvml_begun", gpus=len(begun.look.gpus))
                why = await self._watch(begun.session, begun.inbox, watchers, seen)
                self._log.warning("nvml_given_up", reason=why)
                # what befalls them until it is begun anew, nobody sees
                uuids = [one.uuid for one in begun.look.gpus]
                watchers.begin_anew("begin", dict.fromkeys(uuids, f"NVML is begun anew: {why}"))
                await self._end(begun.session, watchers)
            if time.monotonic() - began_at > self._periods.begin_max_s:
                pause_s = self._periods.begin_first_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._periods.begin_max_s)

    def poll_every(self, seconds: float) -> None:
        """Ask each GPU so often from now on."""
        if seconds != self._poll_s:
            self._poll_s = seconds
            if self._watching is not None:
                self._watching.poll_now()

    async def close(self) -> None:
        """Give NVML up, if it can be; a call that hangs ends with the process."""
        if self._session is not None:
            self._session.events.stop()
        if not await self._flights.all_back(self._periods.close_s):
            self._log.warning("nvml_hangs_at_the_end", waited_s=self._periods.close_s)
            return
        session = self._session or (self._beginning and self._beginning.result().session)
        if session:
            self._flights.begin(self._lane, session.end)
            await self._flights.all_back(self._periods.close_s)

    def _begin(self) -> asyncio.Task[_Begun]:
        if self._beginning is None:
            inbox = monitor.EventQueue()
            self._beginning = self._flights.begin(self._lane, lambda: self._make(inbox))
        return self._beginning

    def _make(self, inbox: monitor.EventQueue) -> _Begun:
        """Begin NVML; runs in a thread."""
        try:
            session = nvml_session.Session(
                self._rules,
                self._files,
                inbox.put,
                before=self._known,
                slice_s=self._periods.slice_s,
            )
        except library.NvmlUnavailable as no:
            look = gpu.Scan(
                driver=no.driver,
                problem=no.problem,
                machine=self._files.machine(),
                on_bus=self._files.on_bus(),
            )
            return _Begun(look=look, inbox=inbox)
        return _Begun(look=session.look, inbox=inbox, session=session)

    async def _begun(self, seen: Observer) -> _Begun:
        beginning, late_s = self._begin(), self._periods.answer_s
        await asyncio.wait([beginning], timeout=late_s)
        if not beginning.done():
            self._tell(_silent(late_s), seen)
            await asyncio.wait([beginning])
        begun = beginning.result()
        self._session, self._beginning = begun.session, None
        return begun

    async def _watch(
        self,
        session: nvml_session.Session,
        inbox: monitor.EventQueue,
        watchers: monitor.MonitoringStatus,
        seen: Observer,
    ) -> str:
        self._watching = watch = monitor.SessionMonitor(
            session,
            inbox,
            self._flights,
            watchers,
            seen=seen,
            poll_s=lambda: self._poll_s,
            periods=self._periods,
            checked_at=self.checked_at,
        )
        return await watch.watch()

    async def _end(self, session: nvml_session.Session, watchers: monitor.MonitoringStatus) -> None:
        """End NVML once all that is under way has come back, and remember what it told."""
        session.events.stop()
        late_s, longest_s = self._periods.answer_s, self._periods.leave_s
        is_over = await self._flights.all_back(late_s)
        if not is_over:
            uuids = [one.uuid for one in session.look.gpus]
            watchers.turn(uuids, "end", f"NVML has not answered for {late_s:g} s")
            is_over = await self._flights.all_back(longest_s)
        self._known, self._session = session.known, None
        self._left.append((self._flights, session))
        if not is_over:
            self._log.error("nvml_left_behind", waited_s=late_s + longest_s)
        elif all([await flights.all_back(0) for flights, _ in self._left]):
            ended = self._flights.begin(self._lane, self._end_all)
            if (await asyncio.wait([ended], timeout=longest_s))[0]:
                return
            self._log.error("nvml_hangs_at_the_end", waited_s=longest_s)
        else:
            return
        self._flights, self._lane = monitor.InflightCalls(), blocking.Lane()

    def _end_all(self) -> None:
        """Make up for every beginning; runs in a thread, with nothing under way."""
        while self._left:
            self._left.pop()[1].end()

    def _tell(self, look: gpu.Scan, seen: Observer) -> None:
        """Tell a look; one that says again why there is nothing to see is no news."""
        is_known = look is self._told or (
            look.driver is not gpu.Driver.READY and look == self._told
        )
        self._told = look
        if not is_known:
            seen(look)


def _silent(seconds: float) -> gpu.Scan:
    return gpu.Scan(driver=gpu.Driver.SILENT, problem=f"NVML has not answered for {seconds:g} s")
