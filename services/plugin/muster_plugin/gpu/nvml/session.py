"""Adapter: runs an NVML session: initialises NVML, scans everything once, then polls each GPU.

Everything here blocks and runs in threads. A session may be closed only when no call is in flight.
"""

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime

import msgspec

from muster import vocabulary, wording
from muster_plugin.config import gpus
from muster_plugin.gpu.nvml import decode, discovery, events, library
from muster_plugin.gpu.nvml import library as nvml_poll
from muster_plugin.model import gpu


class SessionEnded(Exception):
    """NVML has to be initialised again; the message gives the reason."""


class PreviousScan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an earlier scan: the GPUs, and the NVLinks that should be up, by uuid."""

    gpus: tuple[vocabulary.Gpu, ...] = ()
    links: Mapping[str, Collection[int]] = {}


class PollAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a GPU, and whether its MIG devices differ from the last scan."""

    poll: gpu.Poll
    mig_changed: bool = False


class Session:
    """A session of NVML with its last `scan`.

    Creation initialises NVML and scans the GPUs; it raises NvmlUnavailable if that fails.
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
            self._discovered = discovery.discover_gpus(nvml, files, previous.gpus)
            self._links, active = discovery.discover_links(nvml, self._discovered)
            products = {device.uuid: device.product for device in self._discovered.gpus}
            self._expected_links = decode.expected_links(active, products, previous.links)
            handles = self._discovered.handles
            self.events = events.EventListener(nvml, handles, on_event, slice_s=slice_s)
            # from here on faults arrive as events; the polls of the scan show earlier faults
            self.events.arm()
            self.scan = self._make_scan()
        except nvml.NVMLError as error:
            library.shut_down(nvml)
            raise library.NvmlUnavailable(*decode.scan_failure(error.value)) from None

    @property
    def as_previous_scan(self) -> PreviousScan:
        """The GPUs and the expected NVLinks, for the next session."""
        return PreviousScan(gpus=self._discovered.gpus, links=self._expected_links)

    @property
    def is_complete(self) -> bool:
        """Whether every GPU that NVML counts was read without a problem."""
        discovered = self._discovered
        return not (discovered.lost or discovered.unreadable or discovered.problems)

    def poll(self, uuid: str) -> PollAnswer:
        """Poll one GPU. Raises SessionEnded if NVML has to be initialised again."""
        try:
            poll = self._poll(uuid)
            if poll.error == decode.Code.INVALID_ARGUMENT.name and uuid in self._answered:
                # the handle was valid, but is stale now
                raise SessionEnded(f"a poll failed with {poll.error}")
            return PollAnswer(poll=poll, mig_changed=not poll.error and self._mig_changed(uuid))
        except self._nvml.NVMLError as error:
            raise SessionEnded(f"a poll failed with {decode.error_name(error.value)}") from None

    def check_gpu_count(self) -> None:
        """Raise SessionEnded if the kernel's GPUs or the number of NVML's GPUs have changed."""
        now = self._files.kernel_gpus()
        if now != self._kernel_gpus:
            came, went = sorted(now - self._kernel_gpus), sorted(self._kernel_gpus - now)
            raise SessionEnded(f"the kernel's GPUs changed: {came} added, {went} removed")
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            name = decode.error_name(error.value)
            raise SessionEnded(f"nvmlDeviceGetCount failed with {name}") from None
        if count != self._discovered.count:
            raise SessionEnded(
                f"NVML counts {wording.counted(count, 'GPU')} instead of {self._discovered.count}"
            )

    def rescan(self) -> gpu.Scan:
        """Scan every GPU again, and return the scan.

        Raises SessionEnded if the GPUs that answer have changed, except by a loss, or if NVML
        failed.
        """
        before = self._discovered
        try:
            discovered = discovery.discover_gpus(self._nvml, self._files, before.gpus)
            # a GPU lost in the meantime gets no new handle, and is polled with its old handle
            kept = {u: before.handles[u] for u in discovered.lost if u in before.handles}
            handles = {**discovered.handles, **kept}
            if handles.keys() != before.handles.keys():
                raise SessionEnded("the GPUs that answer have changed")
            lost = {u: error for u, error in discovered.lost.items() if u not in kept}
            self._discovered = msgspec.structs.replace(discovered, handles=handles, lost=lost)
            self.scan = self._make_scan()
        except self._nvml.NVMLError as error:
            raise SessionEnded(f"a rescan failed with {decode.error_name(error.value)}") from None
        return self.scan

    def close(self) -> None:
        """Shut NVML down; no call may be in flight."""
        library.shut_down(self._nvml)

    def _make_scan(self) -> gpu.Scan:
        nvml = self._nvml
        cuda = library.call_if_supported(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        return gpu.Scan(
            problem="; ".join(self._discovered.problems),
            driver_version=library.call_if_supported(nvml, nvml.nvmlSystemGetDriverVersion),
            cuda_version=None if cuda is None else decode.cuda_version(cuda),
            machine=self._files.machine(),
            gpus=self._discovered.gpus,
            unreadable=self._discovered.unreadable,
            polls=tuple(self._poll(device.uuid) for device in self._discovered.gpus),
            links=self._links,
            caps=self._files.capabilities(),
        )

    def _poll(self, uuid: str) -> gpu.Poll:
        handle = self._discovered.handles.get(uuid)
        if handle is None:
            return gpu.Poll(gpu=uuid, at=datetime.now(UTC), error=self._discovered.lost[uuid])
        # a GPU in MIG mode does not use NVLinks
        links = () if self._gpu(uuid).mig_enabled else self._expected_links.get(uuid, ())
        poll = nvml_poll.poll_gpu(self._nvml, handle, uuid, links=links)
        if not poll.error:
            self._answered.add(uuid)
        return poll

    def _mig_changed(self, uuid: str) -> bool:
        try:
            now = discovery.mig_uuids(self._nvml, self._discovered.handles[uuid])
        except self._nvml.NVMLError as error:
            library.raise_if_ended(self._nvml, error)
            return False
        before = self._gpu(uuid)
        return now != (tuple(device.uuid for device in before.mig) if before.mig_enabled else None)

    def _gpu(self, uuid: str) -> vocabulary.Gpu:
        return next(device for device in self._discovered.gpus if device.uuid == uuid)
