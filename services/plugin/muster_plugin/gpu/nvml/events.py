"""Adapter: receives NVML's events; one thread waits for the events of all GPUs.

While this thread runs, no other thread uses the event set. A wait cannot be interrupted, so it is
divided into short slices. With a lost GPU in the set, NVML keeps answering GPU_IS_LOST immediately,
so the lost GPU is identified and left out of the next set. After any other error the thread pauses,
longer each time.
"""

import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, TypeAlias

import msgspec

from muster import pacing
from muster_plugin.gpu.nvml import decode, library
from muster_plugin.model import gpu

_XID: Final = 0x8
_DOUBLE_BIT: Final = 0x2
_MIG_CHANGED: Final = 0x100
_WANTED: Final = _XID | _DOUBLE_BIT | _MIG_CHANGED
_PAUSE_FIRST_S: Final = 0.5
_BACKOFF: Final = pacing.Backoff(first_s=_PAUSE_FIRST_S, max_s=30.0)
_PAUSE_SHORT_S: Final = 0.01
"""The pause after a wait that NVML cut short, so that the thread does not spin."""
_DRAIN_MAX: Final = 256


class MonitoringProblems(msgspec.Struct, frozen=True):
    """For each GPU, by its uuid, why its events cannot be received; empty without a problem."""

    problems: Mapping[str, str]


class PollRequested(msgspec.Struct, frozen=True):
    """A request to poll a GPU immediately after an event; an empty uuid stands for all GPUs."""

    gpu: str = ""


class MigChanged(msgspec.Struct, frozen=True):
    """The MIG devices of this GPU changed."""

    gpu: str


class EventsEnded(msgspec.Struct, frozen=True):
    """No event can be received until NVML is initialised again."""

    error: str


NvmlEvent: TypeAlias = (
    gpu.Xid | gpu.Poll | MonitoringProblems | PollRequested | MigChanged | EventsEnded
)


class EventListener:
    """Receives the events of the GPUs with these handles; its thread calls `on_event`."""

    def __init__(
        self,
        nvml: library.Binding,
        handles: Mapping[str, library.Handle],
        on_event: Callable[[NvmlEvent], None],
        *,
        slice_s: float,
    ) -> None:
        self.last_success_at = time.monotonic()
        """When a wait last returned without an error, or timed out, in monotonic seconds."""
        self.waiting_since: float | None = None
        """When the current call to NVML began; None during a pause."""
        self._nvml = nvml
        self._handles = dict(handles)
        self._uuids = {library.handle_address(handle): uuid for uuid, handle in handles.items()}
        self._on_event = on_event
        self._slice_s = slice_s
        self._set: library.Handle | None = None
        self._failures = 0
        self._lost: dict[str, str] = {}
        self._problems: dict[str, str] = {}
        self._refused: frozenset[str] = frozenset()
        self._rearm_requested = threading.Event()
        self._stop = threading.Event()

    def arm(self) -> None:
        """Create an NVML event set of the GPUs, except lost and refused GPUs; drain the old set.

        Raises NVMLError if the set cannot be created or NVML has to be initialised again.
        """
        old, excluded = self._set, dict(self._lost)
        while True:
            made = self._nvml.nvmlEventSetCreate()
            problems, undefined = self._register(made, excluded)
            if undefined is None:
                break
            # after UNKNOWN the content of the set is undefined (nvml.h, nvmlDeviceRegisterEvents)
            self._free(made)
            excluded[undefined] = problems[undefined]
        self._set, self._problems = made, problems
        if old is not None:
            self._drain(old)
            self._free(old)

    @property
    def problems(self) -> Mapping[str, str]:
        """For each GPU, by its uuid, why its events cannot be received; empty without a problem."""
        return {uuid: self._problems.get(uuid, "") for uuid in self._handles}

    def needs_rearm(self, uuid: str) -> bool:
        """Return whether a GPU outside the event set might be accepted into a new set."""
        return bool(self._problems.get(uuid)) and uuid not in self._refused

    def rearm(self) -> None:
        """Request a new NVML event set that includes lost GPUs, because they may be back."""
        self._rearm_requested.set()

    def stop(self) -> None:
        """Make the thread end after its current wait."""
        self._stop.set()

    def wait_for_events(self) -> None:
        """Receive events until `stop` or an error that ends the session; the body of the thread."""
        try:
            while not self._stop.is_set():
                self.waiting_since = time.monotonic()
                if self._rearm_requested.is_set():
                    self._rearm_requested.clear()
                    self._lost.clear()
                    self._rearm()
                self._wait()
        except self._nvml.NVMLError as error:
            self._on_event(EventsEnded(decode.error_name(error.value)))
        finally:
            if self._set is not None:
                self._free(self._set)
            self.waiting_since = None

    def _register(
        self, made: library.Handle, excluded: Mapping[str, str]
    ) -> tuple[dict[str, str], str | None]:
        """Register GPUs in a set; return problems by uuid, and the GPU that broke the set."""
        problems: dict[str, str] = dict(excluded)
        refused: set[str] = set()
        for uuid, handle in self._handles.items():
            if uuid in excluded:
                continue
            try:
                mask = _WANTED & self._nvml.nvmlDeviceGetSupportedEventTypes(handle)
                if not mask & _XID:
                    problems[uuid] = "the driver does not report its XIDs"
                    refused.add(uuid)
                    continue
                self._nvml.nvmlDeviceRegisterEvents(handle, mask, made)
            except self._nvml.NVMLError as error:
                name = library.raise_if_ended(self._nvml, error)
                problems[uuid] = f"its events cannot be registered: {name}"
                if error.value in decode.UNSUPPORTED:
                    refused.add(uuid)
                if error.value == decode.Code.UNKNOWN:
                    return problems, uuid
        self._refused = frozenset(refused)
        return problems, None

    def _wait(self) -> None:
        if self._set is None or all(uuid in self._problems for uuid in self._handles):
            self.last_success_at = time.monotonic()
            self._pause(self._slice_s)
            return
        began = time.monotonic()
        try:
            data = self._nvml.nvmlEventSetWait_v2(self._set, int(self._slice_s * 1000))
        except self._nvml.NVMLError as error:
            if error.value != decode.Code.TIMEOUT:
                self._failed(error)
                return
            self._succeeded()
            if time.monotonic() - began < self._slice_s / 2:
                self._pause(_PAUSE_SHORT_S)
        else:
            self._succeeded()
            self._report(data)

    def _succeeded(self) -> None:
        """Record that a wait for events succeeded; after a failure, report the current problems."""
        self.last_success_at = time.monotonic()
        if self._failures:
            self._failures = 0
            self._on_event(MonitoringProblems(self.problems))

    def _failed(self, error: library.Error) -> None:
        """Exclude lost GPUs; if none caused the error, report it, pause and try a new event set."""
        name = library.raise_if_ended(self._nvml, error)
        if error.value in decode.LOST and self._find_lost():
            self._rearm()
            return
        self._failures += 1
        pause_s = _BACKOFF.delay_s(self._failures)
        problem = f"NVML reports no events: {name}"
        problems = {uuid: self._problems.get(uuid) or problem for uuid in self._handles}
        self._on_event(MonitoringProblems(problems))
        self._pause(pause_s)
        if not self._stop.is_set():
            self._rearm(quietly=True)

    def _find_lost(self) -> bool:
        """Record the lost GPUs that make waits for events fail; return whether there are any.

        A GPU is lost if a query about it fails with GPU_IS_LOST or RESET_REQUIRED. If no GPU is
        lost, each GPU is tested with a separate event set.
        """
        watched = [uuid for uuid in self._handles if uuid not in self._problems]
        lost = {uuid: library.is_lost(self._nvml, self._handles[uuid]) for uuid in watched}
        for uuid, name in lost.items():
            if name:
                self._on_event(gpu.Poll(gpu=uuid, at=datetime.now(UTC), error=name))
                self._lost[uuid] = f"it is lost: {name}"
        if not any(lost.values()):
            breaking = {uuid for uuid in watched if self._breaks_wait(self._handles[uuid])}
            self._lost.update(dict.fromkeys(breaking, "a wait for its events fails immediately"))
            return bool(breaking)
        return True

    def _breaks_wait(self, handle: library.Handle) -> bool:
        """Return whether a wait for the events of this GPU alone fails as with a lost GPU."""
        alone = self._nvml.nvmlEventSetCreate()
        try:
            self._nvml.nvmlDeviceRegisterEvents(handle, _XID, alone)
            self._report(self._nvml.nvmlEventSetWait_v2(alone, 0))
        except self._nvml.NVMLError as error:
            return error.value in decode.LOST
        finally:
            self._free(alone)
        return False

    def _rearm(self, *, quietly: bool = False) -> None:
        """Create an event set; if that fails, plan a new attempt. Report the monitoring problems.

        With `quietly`, they are reported only if it fails.
        """
        try:
            self.arm()
        except self._nvml.NVMLError as error:
            name = library.raise_if_ended(self._nvml, error)
            problem = f"an event set cannot be created: {name}"
            self._on_event(MonitoringProblems(dict.fromkeys(self._handles, problem)))
            self._pause(_PAUSE_FIRST_S)
            self._rearm_requested.set()
            return
        if not quietly:
            self._on_event(MonitoringProblems(self.problems))

    def _pause(self, seconds: float) -> None:
        self.waiting_since = None
        self._stop.wait(seconds)

    def _drain(self, old: library.Handle) -> None:
        """Receive the events left in a set that is about to be freed."""
        try:
            for _ in range(_DRAIN_MAX):
                self._report(self._nvml.nvmlEventSetWait_v2(old, 0))
        except self._nvml.NVMLError:
            return  # TIMEOUT: the set is empty; any other error ends draining too

    def _free(self, old: library.Handle) -> None:
        try:
            self._nvml.nvmlEventSetFree(old)
        except self._nvml.NVMLError:
            return  # NVML no longer has the set, so there is nothing to free

    def _report(self, data: library.EventData) -> None:
        uuid = self._uuids.get(library.handle_address(data.device)) or self._uuid(data.device)
        if not uuid:
            self._on_event(PollRequested())
        elif data.eventType == _XID:
            part = decode.event_part(uuid, data.gpuInstanceId, data.computeInstanceId)
            self._on_event(gpu.Xid(part=part, xid=data.eventData, at=datetime.now(UTC)))
        elif data.eventType == _MIG_CHANGED:
            self._on_event(MigChanged(uuid))
        else:
            self._on_event(PollRequested(uuid))

    def _uuid(self, device: library.Handle) -> str:
        """Query the uuid of a handle that NVML returned; empty if the GPU is unknown."""
        try:
            uuid = str(self._nvml.nvmlDeviceGetUUID(device))
        except self._nvml.NVMLError:
            return ""
        return uuid if uuid in self._handles else ""
