"""Adapter: NVML while it is initialised: one look at everything, then GPU by GPU.

Everything here blocks and runs in threads; at the end nothing of it may be in flight.
"""

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime

import msgspec

from muster import vocabulary
from muster_plugin.config import gpus
from muster_plugin.gpu.nvml import decode, discovery, events, library, mig
from muster_plugin.gpu.nvml import poll as nvml_poll
from muster_plugin.model import gpu


class SessionEnded(Exception):
    """NVML has to be initialised again; the text says why."""


class PreviousScan(msgspec.Struct, frozen=True, kw_only=True):
    """What an earlier look knew: the GPUs, and the NVLinks that were up, by uuid."""

    gpus: tuple[vocabulary.Gpu, ...] = ()
    links: Mapping[str, Collection[int]] = {}


class PollAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How a GPU is, and whether it is divided otherwise than at the last look."""

    poll: gpu.Poll
    mig_changed: bool = False


class Session:
    """NVML, initialised, and what it said at the last look.

    Raises nvml_library.Unusable if it cannot be initialised.
    """

    def __init__(
        self,
        rules: gpus.Gpus,
        files: discovery.KernelFiles,
        on_event: Callable[[events.NvmlEvent], None],
        *,
        previous: PreviousScan,
        slice_s: float,
    ) -> None:
        self._nvml = nvml = library.initialise(rules)
        self._files = files
        self._answered: set[str] = set()
        try:
            self._kernel_gpus = files.kernel_gpus()
            self._seen = discovery.discover_gpus(nvml, files, previous_gpus=previous.gpus)
            self._joined, active = discovery.discover_links(nvml, self._seen)
            products = {device.uuid: device.product for device in self._seen.gpus}
            self._links = decode.expected_links(active, products, previous.links)
            self.events = events.EventListener(nvml, self._seen.handles, on_event, slice_s=slice_s)
            # what befalls a GPU from here on is an event; what befell it before, the polls tell
            self.events.arm()
            self.scan = self._told()
        except nvml.NVMLError as error:
            library.shut_down(nvml)
            raise library.NvmlUnavailable(*decode.scan_failure(error.value)) from None

    @property
    def as_previous_scan(self) -> PreviousScan:
        """What another look should remember of this one."""
        return PreviousScan(gpus=self._seen.gpus, links=self._links)

    @property
    def is_complete(self) -> bool:
        """Whether every GPU that NVML counts could be read."""
        return not (self._seen.lost or self._seen.unreadable or self._seen.problems)

    def poll(self, uuid: str) -> PollAnswer:
        """Ask one GPU how it is. Raises Over."""
        try:
            poll = self._poll(uuid)
            if poll.error == decode.Code.INVALID_ARGUMENT.name and uuid in self._answered:
                # a handle that was good, and is stale
                raise SessionEnded(f"poll: {poll.error}")
            return PollAnswer(poll=poll, mig_changed=not poll.error and self._is_divided_anew(uuid))
        except self._nvml.NVMLError as error:
            raise SessionEnded(f"poll: {decode.error_name(error.value)}") from None

    def check_gpu_count(self) -> None:
        """Make sure that there are as many GPUs as at the start. Raises Over if not."""
        now = self._files.kernel_gpus()
        if now != self._kernel_gpus:
            came, went = sorted(now - self._kernel_gpus), sorted(self._kernel_gpus - now)
            raise SessionEnded(f"the kernel's GPUs changed: {came} came, {went} went")
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            raise SessionEnded(f"nvmlDeviceGetCount: {decode.error_name(error.value)}") from None
        if count != self._seen.count:
            raise SessionEnded(f"NVML counts {count} GPUs instead of {self._seen.count}")

    def rescan(self) -> gpu.Scan:
        """Look at every GPU again. Raises Over if there are others than before."""
        try:
            discovered = discovery.discover_gpus(
                self._nvml, self._files, previous_gpus=self._seen.gpus
            )
            # one that was lost meanwhile gets no new handle, and is polled by its old one
            kept = {u: self._seen.handles[u] for u in discovered.lost if u in self._seen.handles}
            handles = {**discovered.handles, **kept}
            if handles.keys() != self._seen.handles.keys():
                raise SessionEnded("other GPUs answer than before")
            silent = {u: error for u, error in discovered.lost.items() if u not in kept}
            self._seen = msgspec.structs.replace(discovered, handles=handles, lost=silent)
            self.scan = self._told()
        except self._nvml.NVMLError as error:
            raise SessionEnded(f"look: {decode.error_name(error.value)}") from None
        return self.scan

    def end(self) -> None:
        """Give NVML up; nothing may be in flight."""
        library.shut_down(self._nvml)

    def _told(self) -> gpu.Scan:
        nvml = self._nvml
        cuda = library.call_if_supported(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        return gpu.Scan(
            problem="; ".join(self._seen.problems),
            driver_version=library.call_if_supported(nvml, nvml.nvmlSystemGetDriverVersion),
            cuda_version=None if cuda is None else decode.cuda_version(cuda),
            machine=self._files.machine(),
            gpus=self._seen.gpus,
            unreadable=self._seen.unreadable,
            polls=tuple(self._poll(device.uuid) for device in self._seen.gpus),
            links=self._joined,
            caps=self._files.capabilities(),
        )

    def _poll(self, uuid: str) -> gpu.Poll:
        discovered = self._seen
        handle = discovered.handles.get(uuid)
        if handle is None:
            return gpu.Poll(gpu=uuid, at=datetime.now(UTC), error=discovered.lost[uuid])
        # a GPU that is divided uses no NVLinks
        links = () if _gpu(discovered, uuid).mig_enabled else self._links.get(uuid, ())
        poll = nvml_poll.poll_gpu(self._nvml, handle, uuid, links=links)
        if not poll.error:
            self._answered.add(uuid)
        return poll

    def _is_divided_anew(self, uuid: str) -> bool:
        try:
            now = mig.uuids(self._nvml, self._seen.handles[uuid])
        except self._nvml.NVMLError as error:
            if library.is_session_ended(self._nvml, error.value):
                raise
            return False
        previous = _gpu(self._seen, uuid)
        return now != (
            tuple(device.uuid for device in previous.mig) if previous.mig_enabled else None
        )


def _gpu(discovered: discovery.DiscoveredGpus, uuid: str) -> vocabulary.Gpu:
    return next(device for device in discovered.gpus if device.uuid == uuid)
