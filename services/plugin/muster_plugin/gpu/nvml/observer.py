"""Adapter: reports NVML's observations of GPUs in order, without blocking while NVML hangs.

NVML is never called on the event loop. Calls cannot be interrupted: each is awaited for as long as
it takes. A late call is reported, because its GPU is not monitored meanwhile. NVML is shut down and
initialised again when GPUs appear or disappear, when the driver is unloaded or when handles are
stale; no call may be in flight then. The pause before a session grows while sessions are short. A
call that has not returned about a minute after the end of its session is abandoned. NVML counts its
initialisations, so a new session can monitor the other GPUs, and the missing shutdowns are made
when no call is in flight any more.
"""

import asyncio
import time
from pathlib import Path

import msgspec

from muster import blocking
from muster.service import logs
from muster_plugin.config import gpus
from muster_plugin.gpu.nvml import discovery, library, monitor
from muster_plugin.gpu.nvml import session as nvml_session
from muster_plugin.model import gpu

Timeouts = monitor.Timeouts
Observer = monitor.Observer


class _Started(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an initialisation; `session` is None if NVML is unavailable."""

    scan: gpu.Scan
    queue: monitor.EventQueue
    session: nvml_session.Session | None = None


class NvmlSource:
    """A source of observations of this node's GPUs: NVML."""

    def __init__(
        self,
        rules: gpus.Gpus,
        *,
        sysfs: Path = Path("/sys"),
        proc: Path = Path("/proc"),
        timeouts: Timeouts | None = None,
    ) -> None:
        self.checked_at: dict[str, float] = {}
        """When scans, waits for events and polls last succeeded, in monotonic seconds."""
        self._rules = rules
        self._poll_s = rules.health.poll_s
        self._files = discovery.KernelFiles(sysfs=sysfs, proc=proc)
        self._timeouts = timeouts or Timeouts()
        self._lane = blocking.Serial()
        self._calls = monitor.InflightCalls()
        self._starting: asyncio.Task[_Started] | None = None
        self._session: nvml_session.Session | None = None
        self._open: list[tuple[monitor.InflightCalls, nvml_session.Session]] = []
        self._previous = nvml_session.PreviousScan()
        self._monitor: monitor.SessionMonitor | None = None
        self._reported: gpu.Scan | None = None
        self._log = logs.logger()

    async def first_scan(self, timeout_s: float) -> gpu.Scan:
        """Return the first scan; if it takes too long, return a scan that reports this.

        `observe` then reports the result of the first scan.
        """
        starting = self._start()
        await asyncio.wait([starting], timeout=timeout_s)
        self._reported = starting.result().scan if starting.done() else _silent(timeout_s)
        return self._reported

    async def observe(self, observer: Observer) -> None:
        """Report all observations until cancelled, except the scan that `first_scan` returned."""
        status = monitor.MonitoringStatus(observer)
        pause_s = self._timeouts.restart_first_s
        while True:
            started = await self._started(observer)
            self._report(started.scan, observer)
            started_at = time.monotonic()
            if started.session is not None:
                self._log.info("nvml_initialised", gpus=len(started.scan.gpus))
                reason = await self._run(started.session, started.queue, status, observer)
                self._log.warning("nvml_session_ended", reason=reason)
                # the GPUs are not monitored until the next session
                uuids = [device.uuid for device in started.scan.gpus]
                restarting = f"NVML is being initialised again: {reason}"
                status.reset("begin", dict.fromkeys(uuids, restarting))
                await self._end(started.session, status)
            if time.monotonic() - started_at > self._timeouts.restart_max_s:
                pause_s = self._timeouts.restart_first_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._timeouts.restart_max_s)

    def set_poll_interval(self, seconds: float) -> None:
        """Poll each GPU at this interval from now on."""
        if seconds != self._poll_s:
            self._poll_s = seconds
            if self._monitor is not None:
                self._monitor.poll_now()

    async def close(self) -> None:
        """Shut NVML down unless a call hangs; a hanging call ends with the process."""
        if self._session is not None:
            self._session.events.stop()
        if not await self._calls.wait_all(self._timeouts.close_s):
            waited_s = self._timeouts.close_s
            self._log.warning("nvml_not_shut_down", reason="a call hangs", waited_s=waited_s)
            return
        session = self._session or (self._starting and self._starting.result().session)
        if session:
            self._calls.start(self._lane, session.close)
            await self._calls.wait_all(self._timeouts.close_s)

    def _start(self) -> asyncio.Task[_Started]:
        if self._starting is None:
            queue = monitor.EventQueue()
            self._starting = self._calls.start(self._lane, lambda: self._initialise(queue))
        return self._starting

    def _initialise(self, queue: monitor.EventQueue) -> _Started:
        """Initialise NVML and return the result; runs in a thread."""
        try:
            session = nvml_session.Session(
                self._rules,
                self._files,
                queue.put,
                previous=self._previous,
                slice_s=self._timeouts.slice_s,
            )
        except library.NvmlUnavailable as error:
            scan = gpu.Scan(
                driver=error.driver,
                problem=error.problem,
                machine=self._files.machine(),
                on_bus=self._files.on_bus(),
            )
            return _Started(scan=scan, queue=queue)
        return _Started(scan=session.scan, queue=queue, session=session)

    async def _started(self, observer: Observer) -> _Started:
        starting, late_s = self._start(), self._timeouts.answer_s
        await asyncio.wait([starting], timeout=late_s)
        if not starting.done():
            self._report(_silent(late_s), observer)
            await asyncio.wait([starting])
        started = starting.result()
        self._session, self._starting = started.session, None
        return started

    async def _run(
        self,
        session: nvml_session.Session,
        queue: monitor.EventQueue,
        status: monitor.MonitoringStatus,
        observer: Observer,
    ) -> str:
        self._monitor = monitor.SessionMonitor(
            session,
            queue,
            self._calls,
            status,
            observer=observer,
            poll_s=lambda: self._poll_s,
            timeouts=self._timeouts,
            checked_at=self.checked_at,
        )
        return await self._monitor.run()

    async def _end(self, session: nvml_session.Session, status: monitor.MonitoringStatus) -> None:
        """Stop a session and store its scan; shut NVML down if every call has returned."""
        session.events.stop()
        late_s, abandon_s = self._timeouts.answer_s, self._timeouts.abandon_s
        all_returned = await self._calls.wait_all(late_s)
        if not all_returned:
            uuids = [device.uuid for device in session.scan.gpus]
            status.set_problem(uuids, "end", f"NVML has not answered for {late_s:g} s")
            all_returned = await self._calls.wait_all(abandon_s)
        self._previous, self._session = session.as_previous_scan, None
        self._open.append((self._calls, session))
        if not all_returned:
            self._log.error("nvml_calls_abandoned", waited_s=late_s + abandon_s)
        elif all([await calls.wait_all(0) for calls, _ in self._open]):
            closed = self._calls.start(self._lane, self._close_all)
            if (await asyncio.wait([closed], timeout=abandon_s))[0]:
                return
            self._log.error("nvml_shutdown_timed_out", waited_s=abandon_s)
        else:
            return
        self._calls, self._lane = monitor.InflightCalls(), blocking.Serial()

    def _close_all(self) -> None:
        """Shut NVML down once for every open session; runs in a thread, with no call in flight."""
        while self._open:
            self._open.pop()[1].close()

    def _report(self, scan: gpu.Scan, observer: Observer) -> None:
        """Report a scan, unless it was just reported or repeats that NVML is unavailable."""
        is_repeated = scan is self._reported or (
            scan.driver is not gpu.Driver.READY and scan == self._reported
        )
        self._reported = scan
        if not is_repeated:
            observer(scan)


def _silent(seconds: float) -> gpu.Scan:
    return gpu.Scan(driver=gpu.Driver.SILENT, problem=f"NVML has not answered for {seconds:g} s")
