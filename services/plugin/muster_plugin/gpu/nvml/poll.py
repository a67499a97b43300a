"""Adapter: the state of one GPU: what NVML answers when asked how it is.

Runs in threads. What product or driver lacks is None. A poll fails as a whole only where the GPU is
lost, or where nothing at all was answered: one failed question is no proof of a bad GPU.
"""

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Final, TypeVar

from muster_plugin.gpu.nvml import decode, discovery, library
from muster_plugin.model import gpu

Answer = TypeVar("Answer")

# nvml.h, NVML_FI_*
_RECOVERY_ACTION: Final = 230
_RETIRED_PENDING: Final = 31
_REMAP_PENDING: Final = 144
_REMAP_FAILED: Final = 145
_FIELDS: Final = (_RECOVERY_ACTION, _RETIRED_PENDING, _REMAP_PENDING, _REMAP_FAILED)


class _Lost(Exception):
    """The GPU cannot be asked; the text is NVML's name of the reason."""


def poll_gpu(
    nvml: library.Binding,
    handle: library.Handle,
    uuid: str,
    *,
    links: Collection[int],
) -> gpu.Poll:
    """Ask a GPU how it is. `links` are the NVLinks that should be up.

    Raises NVMLError if NVML has to be initialised again.
    """
    at = datetime.now(UTC)
    query = _Asked(nvml)
    try:
        fields = query.fields(handle)
        rows = None
        if _REMAP_PENDING not in fields or _REMAP_FAILED not in fields:
            rows = query(nvml.nvmlDeviceGetRemappedRows, handle)
        retired = fields.get(_RETIRED_PENDING)
        if retired is None:
            retired = query(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        reasons = query(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is None:  # what drivers before 535 call it
            reasons = query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        fabric = query(discovery.fabric_info, nvml, handle)
        poll = gpu.Poll(
            gpu=uuid,
            at=at,
            recovery_action=fields.get(_RECOVERY_ACTION),
            ecc_uncorrected=query(
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            remap_pending=_truth(fields.get(_REMAP_PENDING, rows[2] if rows else None)),
            remap_failed=_truth(fields.get(_REMAP_FAILED, rows[3] if rows else None)),
            retired_pending=_truth(retired),
            slowdowns=decode.slowdowns(reasons or 0),
            temperature_c=query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            slowdown_c=query(
                nvml.nvmlDeviceGetTemperatureThreshold,
                handle,
                nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
            ),
            nvlinks_down=tuple(
                link
                for link in sorted(links)
                if query(discovery.nvlink_is_up, nvml, handle, link) is False
            ),
            fabric=decode.fabric(fabric.state, fabric.status) if fabric else None,
        )
    except _Lost as lost:
        return gpu.Poll(gpu=uuid, at=at, error=str(lost))
    if query.answers == 0 and query.failed:
        return gpu.Poll(gpu=uuid, at=at, error=query.failed)
    return poll


def is_lost(nvml: library.Binding, handle: library.Handle) -> str:
    """Return NVML's name of why nothing can be asked of a GPU; empty if it answers."""
    query = _Asked(nvml)
    try:
        # the one is kept by the library, the others need the hardware
        query(nvml.nvmlDeviceGetUUID, handle)
        query(nvml.nvmlDeviceGetMemoryInfo, handle)
        query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    except _Lost as lost:
        return str(lost)
    return ""


class _Asked:
    """Asks question after question, and remembers whether any was answered."""

    def __init__(self, nvml: library.Binding) -> None:
        self._nvml = nvml
        self.answers = 0
        self.failed = ""
        """NVML's name of the first failure."""

    def __call__(self, call: Callable[..., Answer], *arguments: object) -> Answer | None:
        """Return the answer, or None where there is none."""
        try:
            answer = library.call_if_supported(self._nvml, call, *arguments)
        except self._nvml.NVMLError as error:
            self._judge(error.value)
            self.failed = self.failed or decode.error_name(error.value)
            return None
        self.answers += answer is not None
        return answer

    def fields(self, handle: library.Handle) -> Mapping[int, int]:
        """Return the values of those fields that have one."""
        values: dict[int, int] = {}
        for value in self(self._nvml.nvmlDeviceGetFieldValues, handle, _FIELDS) or ():
            # each has a return code of its own; the call as a whole succeeds
            self._judge(value.nvmlReturn)
            if value.nvmlReturn == decode.Code.SUCCESS:
                values[value.fieldId] = int(
                    getattr(value.value, decode.value_member(value.valueType))
                )
        return values

    def _judge(self, code: int) -> None:
        if library.is_session_ended(self._nvml, code):
            raise self._nvml.NVMLError(code)
        if code in decode.LOST:
            raise _Lost(decode.error_name(code))


def _truth(number: int | None) -> bool | None:
    return None if number is None else bool(number)
