"""Adapter: threads that ask NVML: what is under way, and what they heard.

Nothing that was asked is forgotten before it has come back, for NVML must not be shut down beside
a call. So a task that waits for a thread is never cancelled, only no longer waited for.
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

from muster_plugin import blocking
from muster_plugin.gpu.nvml import decode, events, session
from muster_plugin.model import gpu

Result = TypeVar("Result")


class InflightCalls:
    """Everything that NVML is being asked."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[object]] = set()

    def start(self, lane: blocking.Lane, work: Callable[[], Result]) -> asyncio.Task[Result]:
        """Begin something that may take for ever."""
        task = asyncio.ensure_future(lane.run(work, timeout_s=math.inf))
        self._under_way.add(task)
        task.add_done_callback(self._landed)
        return task

    async def wait_all(self, timeout_s: float) -> bool:
        """Wait until nothing is under way any more; say whether that was in time."""
        if not self._under_way:
            return True
        _, late = await asyncio.wait(self._under_way, timeout=timeout_s)
        return not late

    def _landed(self, task: "asyncio.Task[object]") -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # who waits for it gets it; if nobody does, nobody needs it


class EventQueue:
    """What the thread that waits for events heard, for the loop to take, in order.

    The same thing heard twice before it is taken is one thing, so that a storm of XIDs cannot fill
    the memory.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: dict[object, events.NvmlEvent] = {}

    def put(self, event: events.NvmlEvent) -> None:
        """Hear something; called by the thread."""
        with self._lock:
            is_first = not self._waiting
            self._waiting[_key(event)] = event
        if is_first:
            # the loop may have closed meanwhile
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._came.set)

    async def take(self) -> list[events.NvmlEvent]:
        """Wait until something was heard, and return it."""
        await self._came.wait()
        self._came.clear()
        with self._lock:
            taken, self._waiting = [*self._waiting.values()], {}
        return taken


def _key(event: events.NvmlEvent) -> object:
    match event:
        case gpu.Xid(part=part, xid=xid):
            return part, xid
        case gpu.Poll(gpu=uuid) | events.PollRequested(gpu=uuid) | events.MigChanged(gpu=uuid):
            return type(event), uuid
        case _:
            return type(event)


Observer = Callable[[gpu.Scan | gpu.Observation], None]

SCAN_KIND: Final = "gpu_look"
EVENTS_KIND: Final = "gpu_events"
POLL_KIND: Final = "gpu_poll"
_POLL_GAP_S: Final = 0.2
"""Between two polls of a GPU at least, however much befalls it."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long is waited for what, in seconds."""

    answer_s: float = 5.0
    """Whatever NVML is asked has to be answered in this time."""
    slice_s: float = 0.5
    """A wait for events is made of slices; the end waits for one."""
    guard_s: float = 1.0
    rescan_s: float = 30.0
    """How often is tried to read what could not be read."""
    restart_first_s: float = 1.0
    restart_max_s: float = 30.0
    abandon_s: float = 60.0
    """What has not come back then is left behind."""
    close_s: float = 1.5


class MonitoringStatus:
    """Whether somebody can see what befalls each GPU; tells when that changes."""

    def __init__(self, observer: Observer) -> None:
        self._seen = observer
        self._problems: dict[str, dict[str, str]] = {}
        self._told: dict[str, str] = {}

    def set_problem(self, gpus: Iterable[str], kind: str, problem: str) -> None:
        """Note what is wrong with one way to watch these GPUs; nothing if it is empty."""
        for uuid in gpus:
            self._problems.setdefault(uuid, {})[kind] = problem
            self._tell(uuid)

    def reset(self, kind: str, problems: Mapping[str, str]) -> None:
        """Note what is wrong with each of the GPUs now; what was wrong before is over."""
        for uuid, problem in problems.items():
            self._problems[uuid] = {kind: problem}
            self._tell(uuid)

    def _tell(self, uuid: str) -> None:
        text = decode.join_problems(self._problems[uuid].values())
        if text != self._told.get(uuid, ""):
            self._told[uuid] = text
            self._seen(gpu.MonitoringChanged(gpu=uuid, at=datetime.now(UTC), problem=text))


class SessionMonitor:
    """One session's GPUs, watched until NVML has to be begun anew."""

    def __init__(
        self,
        session: session.Session,
        queue: EventQueue,
        calls: InflightCalls,
        status: MonitoringStatus,
        *,
        observer: Observer,
        poll_s: Callable[[], float],
        periods: Timeouts,
        checked_at: dict[str, float],
    ) -> None:
        self._session = session
        self._inbox = queue
        self._flights = calls
        self._watchers = status
        self._seen = observer
        self._poll_s = poll_s
        self._periods = periods
        self._checked_at = checked_at
        self._look = session.scan
        self._gpus = [device.uuid for device in session.scan.gpus]
        self._fabric = {poll.gpu: poll.fabric for poll in session.scan.polls}
        self._polled_at = dict.fromkeys(self._gpus, time.monotonic())
        self._suspected = {uuid: asyncio.Event() for uuid in self._gpus}
        self._divided = asyncio.Event()

    async def watch(self) -> str:
        """Tell what is observed until NVML has to be begun anew, and return why."""
        now = time.monotonic()
        self._checked_at.update({SCAN_KIND: now, EVENTS_KIND: now, POLL_KIND: now})
        unwatched = {**dict.fromkeys(self._gpus, ""), **self._session.events.problems}
        self._watchers.reset(EVENTS_KIND, unwatched)
        why = ""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                tasks.create_task(self._hear())
                tasks.create_task(self._guard())
                tasks.create_task(self._look_again())
                poll_s = self._poll_s()
                for at, uuid in enumerate(self._gpus, 1):
                    # one after another, so that not all threads run at once
                    tasks.create_task(self._poll(uuid, poll_s * at / len(self._gpus)))
        except* session.SessionEnded as over:
            why = str(over.exceptions[0])
        return why

    def poll_now(self) -> None:
        """Ask every GPU at once, and then as often as it is told now."""
        self._suspect("")

    async def _listen(self) -> None:
        """Keep the thread that waits for events."""
        listening = self._flights.start(blocking.Lane(), self._session.events.wait_for_events)
        await asyncio.wait([listening])
        listening.result()

    async def _hear(self) -> None:
        """Take what that thread heard."""
        while True:
            for event in await self._inbox.take():
                self._take(event)

    def _take(self, event: events.NvmlEvent) -> None:
        match event:
            case gpu.Xid():
                self._seen(self._whole(event))
                self._suspect(event.part.gpu)
            case gpu.Poll():
                self._seen(event)
            case events.MonitoringProblems():
                self._turn_events(event.problems)
            case events.PollRequested():
                self._suspect(event.gpu)
            case events.MigChanged():
                self._divided.set()
            case events.EventsEnded():
                _begin_anew(f"events: {event.error}")
            case _:
                assert_never(event)

    def _whole(self, xid: gpu.Xid) -> gpu.Xid:
        """Return the XID as one of the whole GPU where that has no instances."""
        divided = any(device.uuid == xid.part.gpu and device.mig for device in self._look.gpus)
        return xid if divided else msgspec.structs.replace(xid, part=gpu.Part(gpu=xid.part.gpu))

    def _suspect(self, uuid: str) -> None:
        for name in [uuid] if uuid else self._gpus:
            self._suspected[name].set()

    def _turn_events(self, problems: events.Problems) -> None:
        for uuid, problem in problems.items():
            self._watchers.set_problem([uuid], EVENTS_KIND, problem)

    async def _guard(self) -> None:
        """Notice when the wait for events does not come back."""
        late_s = self._periods.answer_s + self._periods.slice_s
        while True:
            asked_at = self._session.events.waiting_since
            hangs = asked_at is not None and time.monotonic() - asked_at > late_s
            text = f"no wait for events has come back for {late_s:g} s" if hangs else ""
            self._watchers.set_problem(self._gpus, f"{EVENTS_KIND}_late", text)
            self._checked_at[EVENTS_KIND] = self._session.events.last_success_at
            await asyncio.sleep(self._periods.guard_s)

    async def _poll(self, uuid: str, first_s: float) -> None:
        lane, wait_s = blocking.Lane(), first_s
        while True:
            await _set_within(self._suspected[uuid], wait_s)
            answer = await self._asked(lane, lambda: self._session.poll(uuid), [uuid], POLL_KIND)
            self._polled_at[uuid] = time.monotonic()
            self._checked_at[POLL_KIND] = min(self._polled_at.values())
            self._seen(answer.poll)
            if not answer.poll.error:
                self._compare(answer)
            gap_s = min(_POLL_GAP_S, self._poll_s())
            await asyncio.sleep(gap_s)
            wait_s = self._poll_s() - gap_s

    def _compare(self, answer: session.PollAnswer) -> None:
        """Notice what a GPU that answers has that the last look, or the event set, has not."""
        uuid, fabric = answer.poll.gpu, answer.poll.fabric
        if answer.mig_changed or fabric != self._fabric[uuid]:
            self._fabric[uuid] = fabric
            self._divided.set()
        if self._session.events.needs_rearm(uuid):
            self._session.events.rearm()

    async def _look_again(self) -> None:
        """Look again when something was divided, and now and then at what could not be read."""
        lane, looked_at = blocking.Lane(), time.monotonic()
        while True:
            mig_changed = await _set_within(self._divided, self._poll_s())
            is_due = time.monotonic() - looked_at > self._periods.rescan_s
            if mig_changed or (is_due and not self._session.is_complete):
                scan = await self._asked(lane, self._session.rescan, self._gpus, SCAN_KIND)
                looked_at = time.monotonic()
                if not _is_same(scan, self._look):
                    self._look = scan
                    self._seen(scan)
            else:
                await self._asked(lane, self._session.check_gpu_count, self._gpus, SCAN_KIND)
            self._checked_at[SCAN_KIND] = time.monotonic()
            if not self._gpus:
                self._checked_at[POLL_KIND] = self._checked_at[SCAN_KIND]

    async def _asked(
        self, lane: blocking.Lane, work: Callable[[], Result], gpus: Collection[str], kind: str
    ) -> Result:
        """Return the answer, however long it takes; tell if it is late, and when it came."""
        call = self._flights.start(lane, work)
        late_s = self._periods.answer_s
        if not (await asyncio.wait([call], timeout=late_s))[0]:
            self._watchers.set_problem(gpus, kind, f"NVML has not answered for {late_s:g} s")
            await asyncio.wait([call])
        self._watchers.set_problem(gpus, kind, "")
        return call.result()


async def _set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event, but not for ever; say whether it was set, and clear it."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


def _is_same(scan: gpu.Scan, previous: gpu.Scan) -> bool:
    """Say whether nothing changed but what the polls tell."""
    return msgspec.structs.replace(scan, polls=()) == msgspec.structs.replace(previous, polls=())


def _begin_anew(why: str) -> NoReturn:
    raise session.SessionEnded(why)
