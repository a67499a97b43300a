"""Adapter: NVML's events: one thread waits for what befalls any of the GPUs.

The thread alone touches the event set while it runs. A wait cannot be cut short from outside, so it
is made of slices. After every error the wait pauses, longer each time: with a lost GPU in the set
NVML answers GPU_IS_LOST at once, for ever, so it is found and left out of the next set.
"""

import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, TypeAlias

import msgspec

from muster_plugin.gpu.nvml import decode, library, poll
from muster_plugin.model import gpu

_XID: Final = 0x8
_DOUBLE_BIT: Final = 0x2
_MIG_CHANGED: Final = 0x100
_WANTED: Final = _XID | _DOUBLE_BIT | _MIG_CHANGED
_PAUSE_FIRST_S: Final = 0.5
_PAUSE_MAX_S: Final = 30.0
_PAUSE_SHORT_S: Final = 0.01
"""After a wait that NVML cut short; enough not to spin."""
_DRAIN_MAX: Final = 256


class MonitoringProblems(msgspec.Struct, frozen=True):
    """Who can be watched now: `problems` by uuid, empty where all is well."""

    problems: "Problems"


class PollRequested(msgspec.Struct, frozen=True):
    """Something befell this GPU, or any of them if it is empty: better look at once."""

    gpu: str = ""


class MigChanged(msgspec.Struct, frozen=True):
    """The MIG devices of this GPU changed."""

    gpu: str


class EventsEnded(msgspec.Struct, frozen=True):
    """NVML has to be initialised again before anything more can be heard."""

    error: str


Problems: TypeAlias = Mapping[str, str]
"""Why a GPU cannot be watched, by uuid; empty where all is well."""
NvmlEvent: TypeAlias = (
    gpu.Xid | gpu.Poll | MonitoringProblems | PollRequested | MigChanged | EventsEnded
)


class EventListener:
    """The events of the GPUs with these handles; `heard` is called from the thread."""

    def __init__(
        self,
        nvml: library.Binding,
        handles: Mapping[str, library.Handle],
        heard: Callable[[NvmlEvent], None],
        *,
        slice_s: float,
    ) -> None:
        self.last_success_at = time.monotonic()
        """When a wait last came back without an error."""
        self.waiting_since: float | None = None
        """Since when NVML is being asked; None in a pause."""
        self._nvml = nvml
        self._handles = dict(handles)
        self._uuids = {library.handle_address(handle): uuid for uuid, handle in handles.items()}
        self._heard = heard
        self._slice_s = slice_s
        self._set: library.Handle | None = None
        self._failures = 0
        self._lost: dict[str, str] = {}
        self._problems: dict[str, str] = {}
        self._refused: frozenset[str] = frozenset()
        self._again = threading.Event()
        self._stop = threading.Event()

    def arm(self) -> None:
        """Make a new set of all GPUs that are not lost; what the old one still holds is heard.

        Raises NVMLError if there can be no set.
        """
        old, excluded = self._set, dict(self._lost)
        while True:
            made = self._nvml.nvmlEventSetCreate()
            problems, undefined = self._register(made, excluded)
            if undefined is None:
                break
            # after UNKNOWN nobody knows what is in the set (nvml.h, nvmlDeviceRegisterEvents)
            self._free(made)
            excluded[undefined] = problems[undefined]
        self._set, self._problems = made, problems
        if old is not None:
            self._drain(old)
            self._free(old)

    @property
    def problems(self) -> Mapping[str, str]:
        """Why a GPU cannot be watched, by uuid; empty where all is well."""
        return {uuid: self._problems.get(uuid, "") for uuid in self._handles}

    def needs_rearm(self, uuid: str) -> bool:
        """Say whether a GPU is not in the set, and might be let in if it were asked again."""
        return bool(self._problems.get(uuid)) and uuid not in self._refused

    def rearm(self) -> None:
        """Have a new set made, with the lost GPUs too: they may be back."""
        self._again.set()

    def stop(self) -> None:
        """Let the thread end with the slice it waits in."""
        self._stop.set()

    def wait_for_events(self) -> None:
        """Wait for events until told to stop; the body of the thread."""
        try:
            while not self._stop.is_set():
                self.waiting_since = time.monotonic()
                if self._again.is_set():
                    self._again.clear()
                    self._lost.clear()
                    self._rearm()
                self._wait()
        except self._nvml.NVMLError as error:
            self._heard(EventsEnded(decode.error_name(error.value)))
        finally:
            if self._set is not None:
                self._free(self._set)
            self.waiting_since = None

    def _register(
        self, made: library.Handle, excluded: Mapping[str, str]
    ) -> tuple[dict[str, str], str | None]:
        """Return why GPUs could not be registered, and after which one the set is undefined."""
        problems: dict[str, str] = dict(excluded)
        refused: set[str] = set()
        for uuid, handle in self._handles.items():
            if uuid in excluded:
                continue
            try:
                mask = _WANTED & self._nvml.nvmlDeviceGetSupportedEventTypes(handle)
                if not mask & _XID:
                    problems[uuid] = "the driver reports no XIDs of it"
                    refused.add(uuid)
                    continue
                self._nvml.nvmlDeviceRegisterEvents(handle, mask, made)
            except self._nvml.NVMLError as error:
                if library.is_session_ended(self._nvml, error.value):
                    raise
                name = decode.error_name(error.value)
                problems[uuid] = f"its events cannot be registered: {name}"
                if error.value in decode.UNSUPPORTED:
                    refused.add(uuid)
                if error.value == decode.Code.UNKNOWN:
                    return problems, uuid
        self._refused = frozenset(refused)
        return problems, None

    def _wait(self) -> None:
        if self._set is None or not self._is_watching():
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
            self._well()
            if time.monotonic() - began < self._slice_s / 2:
                self._pause(_PAUSE_SHORT_S)
        else:
            self._well()
            self._tell(data)

    def _is_watching(self) -> bool:
        return any(uuid not in self._problems for uuid in self._handles)

    def _well(self) -> None:
        """Note that the wait works (again)."""
        self.last_success_at = time.monotonic()
        if self._failures:
            self._failures = 0
            self._heard(MonitoringProblems(self.problems))

    def _failed(self, error: library.Error) -> None:
        """Find whom an error is about; otherwise pause, and try a new set."""
        if library.is_session_ended(self._nvml, error.value):
            raise error
        if error.value in decode.LOST and self._find_lost():
            self._rearm()
            return
        pause_s = min(_PAUSE_FIRST_S * 2.0 ** min(self._failures, 16), _PAUSE_MAX_S)
        self._failures += 1
        name = decode.error_name(error.value)
        unheard = f"NVML does not tell events: {name}"
        self._heard(
            MonitoringProblems({u: self._problems.get(u) or unheard for u in self._handles})
        )
        self._pause(pause_s)
        if not self._stop.is_set():
            self._rearm(quietly=True)

    def _find_lost(self) -> bool:
        """Look for GPUs that spoil the set, by asking each, then by waiting for each alone."""
        watched = [uuid for uuid in self._handles if uuid not in self._problems]
        lost = {uuid: poll.is_lost(self._nvml, self._handles[uuid]) for uuid in watched}
        for uuid, name in lost.items():
            if name:
                self._heard(gpu.Poll(gpu=uuid, at=datetime.now(UTC), error=name))
                self._lost[uuid] = f"it is lost: {name}"
        if not any(lost.values()):
            spoiling = {uuid for uuid in watched if self._spoils(self._handles[uuid])}
            self._lost.update(dict.fromkeys(spoiling, "a wait for its events fails at once"))
            return bool(spoiling)
        return True

    def _spoils(self, handle: library.Handle) -> bool:
        """Say whether a wait for the events of this GPU alone fails."""
        alone = self._nvml.nvmlEventSetCreate()
        try:
            self._nvml.nvmlDeviceRegisterEvents(handle, _XID, alone)
            self._tell(self._nvml.nvmlEventSetWait_v2(alone, 0))
        except self._nvml.NVMLError as error:
            return error.value in decode.LOST
        finally:
            self._free(alone)
        return False

    def _rearm(self, *, quietly: bool = False) -> None:
        """Make a new set, and say who is in it; if that fails it is tried again."""
        try:
            self.arm()
        except self._nvml.NVMLError as error:
            if library.is_session_ended(self._nvml, error.value):
                raise
            name = decode.error_name(error.value)
            self._heard(
                MonitoringProblems(
                    dict.fromkeys(self._handles, f"no event set can be made: {name}")
                )
            )
            self._pause(_PAUSE_FIRST_S)
            self._again.set()
            return
        if not quietly:
            self._heard(MonitoringProblems(self.problems))

    def _pause(self, seconds: float) -> None:
        self.waiting_since = None
        self._stop.wait(seconds)

    def _drain(self, old: library.Handle) -> None:
        """Hear what a set holds that is about to go."""
        try:
            for _ in range(_DRAIN_MAX):
                self._tell(self._nvml.nvmlEventSetWait_v2(old, 0))
        except self._nvml.NVMLError:
            return  # TIMEOUT: it is empty; anything else ends it too

    def _free(self, old: library.Handle) -> None:
        try:
            self._nvml.nvmlEventSetFree(old)
        except self._nvml.NVMLError:
            return  # what NVML no longer knows need not be freed

    def _tell(self, data: library.EventData) -> None:
        uuid = self._uuids.get(library.handle_address(data.device)) or self._uuid(data.device)
        if not uuid:
            self._heard(PollRequested())
        elif data.eventType == _XID:
            part = decode.event_part(uuid, data.gpuInstanceId, data.computeInstanceId)
            self._heard(gpu.Xid(part=part, xid=data.eventData, at=datetime.now(UTC)))
        elif data.eventType == _MIG_CHANGED:
            self._heard(MigChanged(uuid))
        else:
            self._heard(PollRequested(uuid))

    def _uuid(self, device: library.Handle) -> str:
        """Ask whose event it is, where the handle is not one of ours."""
        try:
            uuid = str(self._nvml.nvmlDeviceGetUUID(device))
        except self._nvml.NVMLError:
            return ""
        return uuid if uuid in self._handles else ""
