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

    scan: gpu.Scan
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

    async def first_scan(self, timeout_s: float) -> gpu.Scan:
        """Look for the first time. That there is no answer in time is one; `follow` goes on."""
        starting = self._begin()
        await asyncio.wait([starting], timeout=timeout_s)
        self._told = starting.result().scan if starting.done() else _silent(timeout_s)
        return self._told

    async def observe(self, observer: Observer) -> None:
        """Tell for ever what is observed, and every look but the one that `first` gave."""
        status = monitor.MonitoringStatus(observer)
        pause_s = self._periods.restart_first_s
        while True:
            started = await self._begun(observer)
            self._tell(started.scan, observer)
            started_at = time.monotonic()
            if started.session is not None:
                self._log.info("nvml_begun", gpus=len(started.scan.gpus))
                why = await self._watch(started.session, started.inbox, status, observer)
                self._log.warning("nvml_given_up", reason=why)
                # what befalls them until it is begun anew, nobody sees
                uuids = [device.uuid for device in started.scan.gpus]
                status.reset("begin", dict.fromkeys(uuids, f"NVML is begun anew: {why}"))
                await self._end(started.session, status)
            if time.monotonic() - started_at > self._periods.restart_max_s:
                pause_s = self._periods.restart_first_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._periods.restart_max_s)

    def set_poll_interval(self, seconds: float) -> None:
        """Ask each GPU so often from now on."""
        if seconds != self._poll_s:
            self._poll_s = seconds
            if self._watching is not None:
                self._watching.poll_now()

    async def close(self) -> None:
        """Give NVML up, if it can be; a call that hangs ends with the process."""
        if self._session is not None:
            self._session.events.stop()
        if not await self._flights.wait_all(self._periods.close_s):
            self._log.warning("nvml_hangs_at_the_end", waited_s=self._periods.close_s)
            return
        session = self._session or (self._beginning and self._beginning.result().session)
        if session:
            self._flights.start(self._lane, session.end)
            await self._flights.wait_all(self._periods.close_s)

    def _begin(self) -> asyncio.Task[_Begun]:
        if self._beginning is None:
            queue = monitor.EventQueue()
            self._beginning = self._flights.start(self._lane, lambda: self._make(queue))
        return self._beginning

    def _make(self, queue: monitor.EventQueue) -> _Begun:
        """Begin NVML; runs in a thread."""
        try:
            session = nvml_session.Session(
                self._rules,
                self._files,
                queue.put,
                previous=self._known,
                slice_s=self._periods.slice_s,
            )
        except library.NvmlUnavailable as error:
            scan = gpu.Scan(
                driver=error.driver,
                problem=error.problem,
                machine=self._files.machine(),
                on_bus=self._files.on_bus(),
            )
            return _Begun(scan=scan, inbox=queue)
        return _Begun(scan=session.scan, inbox=queue, session=session)

    async def _begun(self, observer: Observer) -> _Begun:
        starting, late_s = self._begin(), self._periods.answer_s
        await asyncio.wait([starting], timeout=late_s)
        if not starting.done():
            self._tell(_silent(late_s), observer)
            await asyncio.wait([starting])
        started = starting.result()
        self._session, self._beginning = started.session, None
        return started

    async def _watch(
        self,
        session: nvml_session.Session,
        queue: monitor.EventQueue,
        status: monitor.MonitoringStatus,
        observer: Observer,
    ) -> str:
        self._watching = monitoring = monitor.SessionMonitor(
            session,
            queue,
            self._flights,
            status,
            observer=observer,
            poll_s=lambda: self._poll_s,
            periods=self._periods,
            checked_at=self.checked_at,
        )
        return await monitoring.watch()

    async def _end(self, session: nvml_session.Session, status: monitor.MonitoringStatus) -> None:
        """End NVML once all that is under way has come back, and remember what it told."""
        session.events.stop()
        late_s, longest_s = self._periods.answer_s, self._periods.abandon_s
        is_over = await self._flights.wait_all(late_s)
        if not is_over:
            uuids = [device.uuid for device in session.scan.gpus]
            status.set_problem(uuids, "end", f"NVML has not answered for {late_s:g} s")
            is_over = await self._flights.wait_all(longest_s)
        self._known, self._session = session.as_previous_scan, None
        self._left.append((self._flights, session))
        if not is_over:
            self._log.error("nvml_left_behind", waited_s=late_s + longest_s)
        elif all([await calls.wait_all(0) for calls, _ in self._left]):
            ended = self._flights.start(self._lane, self._end_all)
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

    def _tell(self, scan: gpu.Scan, observer: Observer) -> None:
        """Tell a look; one that says again why there is nothing to see is no news."""
        is_known = scan is self._told or (
            scan.driver is not gpu.Driver.READY and scan == self._told
        )
        self._told = scan
        if not is_known:
            observer(scan)


def _silent(seconds: float) -> gpu.Scan:
    return gpu.Scan(driver=gpu.Driver.SILENT, problem=f"NVML has not answered for {seconds:g} s")
