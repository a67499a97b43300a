"""Adapter: monitors NVML's GPUs during one session: polls, events, rescans, and late calls.

Each GPU is polled in a separate thread, so that a GPU that hangs delays only itself. Every call is
tracked until it has returned, because NVML must not be shut down during a call. A task that waits
for a thread is therefore never cancelled, even if nothing awaits it any more.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, NoReturn, TypeVar, assert_never

import msgspec

from muster import blocking
from muster_plugin.gpu.nvml import events, session
from muster_plugin.model import gpu

Result = TypeVar("Result")
Observer = Callable[[gpu.Scan | gpu.Observation], None]

SCAN_KIND: Final = "gpu_look"
EVENTS_KIND: Final = "gpu_events"
POLL_KIND: Final = "gpu_poll"
_POLL_GAP_S: Final = 0.2
"""The shortest time between two polls of a GPU, however many events occur."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """All timeouts and periods, in seconds."""

    answer_s: float = 5.0
    """Every call to NVML is expected to return within this time."""
    slice_s: float = 0.5
    """A wait for events is divided into slices; stopping takes at most one slice."""
    guard_s: float = 1.0
    rescan_s: float = 30.0
    """The shortest time between two periodic attempts to read unreadable GPUs."""
    restart_first_s: float = 1.0
    restart_max_s: float = 30.0
    abandon_s: float = 60.0
    """How long a session that ends waits for calls, after `answer_s`, before it abandons them."""
    close_s: float = 1.5


class InflightCalls:
    """The running calls to NVML, some of which may never return."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, lane: blocking.Serial, work: Callable[[], Result]) -> asyncio.Task[Result]:
        """Start a call that may never return; return its task."""
        task = asyncio.ensure_future(lane.run(work, timeout_s=math.inf))
        self._tasks.add(task)
        task.add_done_callback(self._returned)
        return task

    async def wait_all(self, timeout_s: float) -> bool:
        """Wait until all calls have returned; return whether they did in time."""
        if not self._tasks:
            return True
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        return not late

    def _returned(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved; awaiting tasks still receive it


class EventQueue:
    """Passes NVML's events, in order, from the waiting thread to the event loop.

    An event replaces a queued event of the same kind for the same GPU, or for XIDs of the same
    number and part, so that a flood of events cannot fill the memory.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._queued: dict[object, events.NvmlEvent] = {}

    def put(self, event: events.NvmlEvent) -> None:
        """Queue an event; called by the thread."""
        with self._lock:
            is_first = not self._queued
            self._queued[_key(event)] = event
        if is_first:
            # the loop may have been closed meanwhile
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def get_all(self) -> list[events.NvmlEvent]:
        """Wait for an event, and return all that are queued."""
        await self._arrived.wait()
        self._arrived.clear()
        with self._lock:
            queued, self._queued = [*self._queued.values()], {}
        return queued


class MonitoringStatus:
    """Stores the monitoring problems of each GPU by kind; reports every change."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._problems: dict[str, dict[str, str]] = {}
        self._reported: dict[str, str] = {}

    def set_problem(self, gpus: Iterable[str], kind: str, problem: str) -> None:
        """Set the problem of one kind for these GPUs; an empty problem clears it."""
        for uuid in gpus:
            self._problems.setdefault(uuid, {})[kind] = problem
            self._report(uuid)

    def reset(self, kind: str, problems: Mapping[str, str]) -> None:
        """Replace all problems of these GPUs with one of this kind; an empty problem means none."""
        for uuid, problem in problems.items():
            self._problems[uuid] = {kind: problem}
            self._report(uuid)

    def _report(self, uuid: str) -> None:
        text = "; ".join(dict.fromkeys(filter(None, self._problems[uuid].values())))
        if text != self._reported.get(uuid, ""):
            self._reported[uuid] = text
            self._observer(gpu.MonitoringChanged(gpu=uuid, at=datetime.now(UTC), problem=text))


class SessionMonitor:
    """Monitors the GPUs of one session until NVML has to be initialised again."""

    def __init__(
        self,
        session: session.Session,
        queue: EventQueue,
        calls: InflightCalls,
        status: MonitoringStatus,
        *,
        observer: Observer,
        poll_s: Callable[[], float],
        timeouts: Timeouts,
        checked_at: dict[str, float],
    ) -> None:
        self._session = session
        self._queue = queue
        self._calls = calls
        self._status = status
        self._observer = observer
        self._poll_s = poll_s
        self._timeouts = timeouts
        self._checked_at = checked_at
        self._scan = session.scan
        self._gpus = [device.uuid for device in session.scan.gpus]
        self._fabric = {poll.gpu: poll.fabric for poll in session.scan.polls}
        self._polled_at = dict.fromkeys(self._gpus, time.monotonic())
        self._poll_requested = {uuid: asyncio.Event() for uuid in self._gpus}
        self._rescan_requested = asyncio.Event()

    async def run(self) -> str:
        """Report observations until NVML has to be initialised again; return the reason."""
        now = time.monotonic()
        self._checked_at.update({SCAN_KIND: now, EVENTS_KIND: now, POLL_KIND: now})
        problems = {**dict.fromkeys(self._gpus, ""), **self._session.events.problems}
        self._status.reset(EVENTS_KIND, problems)
        reason = ""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._wait_for_events())
                tasks.create_task(self._handle_events())
                tasks.create_task(self._guard_events())
                tasks.create_task(self._rescan())
                poll_s = self._poll_s()
                for at, uuid in enumerate(self._gpus, 1):
                    # staggered, so that not all threads run at the same time
                    tasks.create_task(self._poll(uuid, poll_s * at / len(self._gpus)))
        except* session.SessionEnded as ended:
            reason = str(ended.exceptions[0])
        return reason

    def poll_now(self) -> None:
        """Poll every GPU immediately, then at the current interval."""
        self._request_poll("")

    async def _wait_for_events(self) -> None:
        """Run the thread that waits for events."""
        waiting = self._calls.start(blocking.Serial(), self._session.events.wait_for_events)
        await asyncio.wait([waiting])
        waiting.result()

    async def _handle_events(self) -> None:
        while True:
            for event in await self._queue.get_all():
                self._handle(event)

    def _handle(self, event: events.NvmlEvent) -> None:
        match event:
            case gpu.Xid():
                self._observer(self._on_existing_part(event))
                self._request_poll(event.part.gpu)
            case gpu.Poll():
                self._observer(event)
            case events.MonitoringProblems():
                for uuid, problem in event.problems.items():
                    self._status.set_problem([uuid], EVENTS_KIND, problem)
            case events.PollRequested():
                self._request_poll(event.gpu)
            case events.MigChanged():
                self._rescan_requested.set()
            case events.EventsEnded():
                _end_session(f"waiting for events failed with {event.error}")
            case _:
                assert_never(event)

    def _on_existing_part(self, xid: gpu.Xid) -> gpu.Xid:
        """Return the XID, assigned to the whole GPU if the GPU has no MIG devices."""
        if any(device.uuid == xid.part.gpu and device.mig for device in self._scan.gpus):
            return xid
        return msgspec.structs.replace(xid, part=gpu.Part(gpu=xid.part.gpu))

    def _request_poll(self, uuid: str) -> None:
        for name in [uuid] if uuid else self._gpus:
            self._poll_requested[name].set()

    async def _guard_events(self) -> None:
        """Report a problem while a wait for events does not return; record the last success."""
        late_s = self._timeouts.answer_s + self._timeouts.slice_s
        while True:
            since = self._session.events.waiting_since
            hangs = since is not None and time.monotonic() - since > late_s
            problem = f"the wait for GPU events has not returned for {late_s:g} s" if hangs else ""
            self._status.set_problem(self._gpus, f"{EVENTS_KIND}_late", problem)
            self._checked_at[EVENTS_KIND] = self._session.events.last_success_at
            await asyncio.sleep(self._timeouts.guard_s)

    async def _poll(self, uuid: str, first_s: float) -> None:
        lane, wait_s = blocking.Serial(), first_s
        while True:
            await _set_within(self._poll_requested[uuid], wait_s)
            poll = lambda: self._session.poll(uuid)  # noqa: E731  # in one place with its call
            answer = await self._call(lane, poll, [uuid], POLL_KIND)
            self._polled_at[uuid] = time.monotonic()
            self._checked_at[POLL_KIND] = min(self._polled_at.values())
            self._observer(answer.poll)
            if not answer.poll.error:
                self._compare(answer)
            gap_s = min(_POLL_GAP_S, self._poll_s())
            await asyncio.sleep(gap_s)
            wait_s = self._poll_s() - gap_s

    def _compare(self, answer: session.PollAnswer) -> None:
        """Request a rescan if the GPU's MIG devices or fabric state have changed.

        Also request a new event set if the GPU is in none but might be accepted.
        """
        uuid, fabric = answer.poll.gpu, answer.poll.fabric
        if answer.mig_changed or fabric != self._fabric[uuid]:
            self._fabric[uuid] = fabric
            self._rescan_requested.set()
        if self._session.events.needs_rearm(uuid):
            self._session.events.rearm()

    async def _rescan(self) -> None:
        """Rescan on request, and regularly while a GPU is unreadable; else only count the GPUs."""
        lane, scanned_at = blocking.Serial(), time.monotonic()
        while True:
            requested = await _set_within(self._rescan_requested, self._poll_s())
            is_due = time.monotonic() - scanned_at > self._timeouts.rescan_s
            if requested or (is_due and not self._session.is_complete):
                scan = await self._call(lane, self._session.rescan, self._gpus, SCAN_KIND)
                scanned_at = time.monotonic()
                if not _is_same(scan, self._scan):
                    self._scan = scan
                    self._observer(scan)
            else:
                check = self._session.check_gpu_count
                await self._call(lane, check, self._gpus, SCAN_KIND)
            self._checked_at[SCAN_KIND] = time.monotonic()
            if not self._gpus:
                self._checked_at[POLL_KIND] = self._checked_at[SCAN_KIND]

    async def _call(
        self, lane: blocking.Serial, work: Callable[[], Result], gpus: Collection[str], kind: str
    ) -> Result:
        """Return the call's answer, however long it takes; report if it is late."""
        call = self._calls.start(lane, work)
        late_s = self._timeouts.answer_s
        if not (await asyncio.wait([call], timeout=late_s))[0]:
            self._status.set_problem(gpus, kind, f"NVML has not answered for {late_s:g} s")
            await asyncio.wait([call])
        self._status.set_problem(gpus, kind, "")
        return call.result()


def _key(event: events.NvmlEvent) -> object:
    match event:
        case gpu.Xid(part=part, xid=xid):
            return part, xid
        case gpu.Poll(gpu=uuid) | events.PollRequested(gpu=uuid) | events.MigChanged(gpu=uuid):
            return type(event), uuid
        case _:
            return type(event)


async def _set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event with a timeout; clear it, and return whether it was set."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


def _is_same(scan: gpu.Scan, previous: gpu.Scan) -> bool:
    """Return whether two scans are equal except for their polls."""
    return msgspec.structs.replace(scan, polls=()) == msgspec.structs.replace(previous, polls=())


def _end_session(reason: str) -> NoReturn:
    raise session.SessionEnded(reason)
