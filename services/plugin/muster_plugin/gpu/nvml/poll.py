"""Adapter: polls the state of one GPU through NVML.

Runs in threads. A value that product or driver does not support is None. A poll fails as a whole
only if the GPU is lost, or if no query was answered: one failed query does not prove a bad GPU.
"""

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from muster_plugin.gpu.nvml import decode, library
from muster_plugin.model import gpu

# nvml.h, NVML_FI_*
_RECOVERY_ACTION: Final = 230
_RETIRED_PENDING: Final = 31
_REMAP_PENDING: Final = 144
_REMAP_FAILED: Final = 145
_FIELDS: Final = (_RECOVERY_ACTION, _RETIRED_PENDING, _REMAP_PENDING, _REMAP_FAILED)


class _Lost(Exception):
    """The GPU cannot be queried; the text is NVML's error name."""


def poll_gpu(
    nvml: library.Binding,
    handle: library.Handle,
    uuid: str,
    *,
    links: Collection[int],
) -> gpu.Poll:
    """Return the state of a GPU. `links` are the NVLinks that should be up.

    Raises NVMLError if NVML has to be initialised again.
    """
    at = datetime.now(UTC)
    query = _Query(nvml)
    try:
        fields = query.fields(handle)
        rows = None
        if _REMAP_PENDING not in fields or _REMAP_FAILED not in fields:
            rows = query(nvml.nvmlDeviceGetRemappedRows, handle)
        retired = fields.get(_RETIRED_PENDING)
        if retired is None:
            retired = query(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        reasons = query(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is None:  # the name before driver 535
            reasons = query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        fabric = query(fabric_info, nvml, handle)
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
            remap_pending=_as_bool(fields.get(_REMAP_PENDING, rows[2] if rows else None)),
            remap_failed=_as_bool(fields.get(_REMAP_FAILED, rows[3] if rows else None)),
            retired_pending=_as_bool(retired),
            slowdowns=decode.slowdowns(reasons or 0),
            temperature_c=query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            slowdown_c=query(
                nvml.nvmlDeviceGetTemperatureThreshold,
                handle,
                nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
            ),
            nvlinks_down=tuple(
                link for link in sorted(links) if query(nvlink_is_up, nvml, handle, link) is False
            ),
            fabric=decode.fabric(fabric.state, fabric.status) if fabric else None,
        )
    except _Lost as lost:
        return gpu.Poll(gpu=uuid, at=at, error=str(lost))
    if query.answers == 0 and query.failed:
        return gpu.Poll(gpu=uuid, at=at, error=query.failed)
    return poll


def is_lost(nvml: library.Binding, handle: library.Handle) -> str:
    """Return NVML's name of the error that prevents querying a GPU; empty without one."""
    query = _Query(nvml)
    try:
        # the library caches the uuid; the other two need the hardware
        query(nvml.nvmlDeviceGetUUID, handle)
        query(nvml.nvmlDeviceGetMemoryInfo, handle)
        query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    except _Lost as lost:
        return str(lost)
    return ""


def fabric_info(nvml: library.Binding, handle: library.Handle) -> Any | None:
    """Return NVML's structure about a GPU's NVLink fabric, where driver and product support it."""
    import ctypes  # noqa: PLC0415  # loaded with the library

    info = nvml.c_nvmlGpuFabricInfoV_t()
    call = nvml.nvmlDeviceGetGpuFabricInfoV
    answer = library.call_if_supported(nvml, call, handle, ctypes.byref(info))
    return None if answer is None else info


def nvlink_is_up(nvml: library.Binding, handle: library.Handle, link: int) -> bool | None:
    """Return whether a link is up; None where there is no such link."""
    try:
        state = library.call_if_supported(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
    except nvml.NVMLError as error:
        if error.value in decode.ABSENT:
            return None
        raise
    return None if state is None else bool(state)


class _Query:
    """Makes queries, and counts those that were answered."""

    def __init__(self, nvml: library.Binding) -> None:
        self._nvml = nvml
        self.answers = 0
        self.failed = ""
        """NVML's name of the first error."""

    def __call__(self, call: Callable[..., library.Answer], *arguments: object) -> library.Answer | None:
        """Return the answer of a query, or None without one."""
        try:
            answer = library.call_if_supported(self._nvml, call, *arguments)
        except self._nvml.NVMLError as error:
            name = self._check(error)
            self.failed = self.failed or name
            return None
        self.answers += answer is not None
        return answer

    def fields(self, handle: library.Handle) -> Mapping[int, int]:
        """Query several fields; return the values of those that have one."""
        values: dict[int, int] = {}
        for value in self(self._nvml.nvmlDeviceGetFieldValues, handle, _FIELDS) or ():
            # each has a return code of its own; the call as a whole succeeds
            self._check(self._nvml.NVMLError(value.nvmlReturn))
            if value.nvmlReturn == decode.Code.SUCCESS:
                values[value.fieldId] = int(
                    getattr(value.value, decode.value_member(value.valueType))
                )
        return values

    def _check(self, error: library.Error) -> str:
        name = library.raise_if_ended(self._nvml, error)
        if error.value in decode.LOST:
            raise _Lost(name)
        return name


def _as_bool(number: int | None) -> bool | None:
    return None if number is None else bool(number)
