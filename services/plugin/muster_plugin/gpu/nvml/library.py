"""Adapter: loads libnvidia-ml, initialises NVML, explains failures and polls one GPU.

Everything here may block for minutes, so it runs in threads, never on the event loop. `pynvml` and
`ctypes` (3 MiB, 10 ms) are imported only if there is a library to load. A library stays loaded:
when the driver is replaced, a new process is needed.

The interface for sources of observations is `evaluation.Source`; `simulated` is another source.

A value that the product or driver does not support is None. A poll fails as a whole only if the GPU
is lost or no query was answered: one failed query does not prove a bad GPU.
"""

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from muster_plugin.config import gpus
from muster_plugin.gpu.nvml import decode
from muster_plugin.model import gpu

Binding: TypeAlias = Any
"""The module pynvml, which has no type annotations."""
Handle: TypeAlias = Any
"""NVML's handle of a device, or of an event set."""
EventData: TypeAlias = Any
Error: TypeAlias = Any
"""A pynvml.NVMLError; its `value` is the return code."""
Answer = TypeVar("Answer")

_loaded: Final[list[object]] = []
# nvml.h, NVML_FI_*
_RECOVERY_ACTION: Final = 230
_RETIRED_PENDING: Final = 31
_REMAP_PENDING: Final = 144
_REMAP_FAILED: Final = 145
_FIELDS: Final = (_RECOVERY_ACTION, _RETIRED_PENDING, _REMAP_PENDING, _REMAP_FAILED)


class NvmlUnavailable(Exception):
    """NVML cannot be used; the message gives the reason."""

    def __init__(self, driver: gpu.Driver, problem: str) -> None:
        super().__init__(problem)
        self.driver = driver
        self.problem = problem


def initialise(rules: gpus.Gpus) -> Binding:
    """Load the library, initialise NVML and return the binding. Raises NvmlUnavailable.

    Each call must be matched by one call of `shut_down`, when no other call is in flight.
    """
    _load(rules.library, rules.given.driver_root)
    import pynvml  # noqa: PLC0415  # too heavy for nodes without a driver

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == decode.Code.LIBRARY_NOT_FOUND:
            problem = f"the loaded library is not named {decode.LIBRARY}"
            raise NvmlUnavailable(gpu.Driver.NO_LIBRARY, problem) from None
        raise NvmlUnavailable(*decode.init_failure(error.value)) from None
    return pynvml


def shut_down(nvml: Binding) -> None:
    """Shut NVML down, even if the driver has been unloaded in the meantime."""
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return


def call_if_supported(
    nvml: Binding, call: Callable[..., Answer], *arguments: object
) -> Answer | None:
    """Return the call's answer; None if the product, driver or permissions do not allow the call.

    A string that is not UTF-8 also counts as None. Raises NVMLError for any other failure.
    """
    try:
        return call(*arguments)
    except UnicodeDecodeError:
        return None
    except nvml.NVMLError as error:
        if error.value in decode.UNSUPPORTED:
            return None
        raise


def raise_if_ended(nvml: Binding, error: Error) -> str:
    """Return NVML's name for an error that concerns one GPU; raise an error that concerns all.

    An error with a code in SESSION_ENDED concerns all GPUs if NVML cannot count them now.
    """
    if error.value in decode.SESSION_ENDED:
        try:
            nvml.nvmlDeviceGetCount()
        except nvml.NVMLError:
            raise error from None
    return decode.error_name(error.value)


def handle_address(handle: Handle) -> int:
    """Return the address of a handle, which identifies a device while NVML is initialised."""
    import ctypes  # noqa: PLC0415  # loaded with the library

    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _load(library: str, driver_root: str) -> None:
    """Load the library from the first path that works. Raises NvmlUnavailable.

    pynvml then finds the library by its SONAME.
    """
    if _loaded:
        return
    import ctypes  # noqa: PLC0415  # only if needed

    paths = decode.library_paths(library, driver_root)
    candidates = [path for path in paths if library or Path(path).exists()]
    if not library:
        candidates.append(decode.LIBRARY)
    failures = []
    for candidate in candidates:
        try:
            _loaded.append(ctypes.CDLL(candidate))
        except OSError as error:
            failures.append(str(error))
        else:
            return
    problem = decode.library_problem(library, driver_root, "; ".join(failures))
    raise NvmlUnavailable(gpu.Driver.NO_LIBRARY, problem)


class _Lost(Exception):
    """The GPU cannot be queried; the message is NVML's error name."""


def poll_gpu(
    nvml: Binding,
    handle: Handle,
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
            slowdowns=None if reasons is None else decode.slowdowns(reasons),
            temperature_c=query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            slowdown_c=query(
                nvml.nvmlDeviceGetTemperatureThreshold,
                handle,
                nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
            ),
            nvlinks_down=decode.links_down(
                {link: query(nvlink_is_up, nvml, handle, link) for link in sorted(links)}
            ),
            fabric=decode.fabric(fabric.state, fabric.status) if fabric else None,
        )
    except _Lost as lost:
        return gpu.Poll(gpu=uuid, at=at, error=str(lost))
    if query.answers == 0 and query.failed:
        return gpu.Poll(gpu=uuid, at=at, error=query.failed)
    return poll


def is_lost(nvml: Binding, handle: Handle) -> str:
    """Return NVML's name for the error if a GPU is lost; empty if it is not."""
    query = _Query(nvml)
    try:
        # the library caches the uuid; the two other queries need the hardware
        query(nvml.nvmlDeviceGetUUID, handle)
        query(nvml.nvmlDeviceGetMemoryInfo, handle)
        query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    except _Lost as lost:
        return str(lost)
    return ""


def fabric_info(nvml: Binding, handle: Handle) -> Any | None:
    """Return NVML's structure for a GPU's NVLink fabric; None if it is not supported."""
    import ctypes  # noqa: PLC0415  # loaded with the library

    info = nvml.c_nvmlGpuFabricInfoV_t()
    call = nvml.nvmlDeviceGetGpuFabricInfoV
    answer = call_if_supported(nvml, call, handle, ctypes.byref(info))
    return None if answer is None else info


def nvlink_is_up(nvml: Binding, handle: Handle, link: int) -> bool | None:
    """Return whether a link is up; None if the link does not exist or cannot be queried."""
    try:
        state = call_if_supported(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
    except nvml.NVMLError as error:
        if error.value in decode.ABSENT:
            return None
        raise
    return None if state is None else bool(state)


class _Query:
    """Makes queries and counts the answers."""

    def __init__(self, nvml: Binding) -> None:
        self._nvml = nvml
        self.answers = 0
        self.failed = ""
        """NVML's name for the first error; empty if there was none."""

    def __call__(self, call: Callable[..., Answer], *arguments: object) -> Answer | None:
        """Return the answer to a query; None if it failed or is not supported. Raises _Lost."""
        try:
            answer = call_if_supported(self._nvml, call, *arguments)
        except self._nvml.NVMLError as error:
            name = self._check(error)
            self.failed = self.failed or name
            return None
        self.answers += answer is not None
        return answer

    def fields(self, handle: Handle) -> Mapping[int, int]:
        """Query the fields in `_FIELDS`; return the known values by field id."""
        values: dict[int, int] = {}
        for value in self(self._nvml.nvmlDeviceGetFieldValues, handle, _FIELDS) or ():
            # each field has its own return code; the call as a whole succeeds
            self._check(self._nvml.NVMLError(value.nvmlReturn))
            if value.nvmlReturn == decode.Code.SUCCESS:
                values[value.fieldId] = int(
                    getattr(value.value, decode.value_member(value.valueType))
                )
        return values

    def _check(self, error: Error) -> str:
        name = raise_if_ended(self._nvml, error)
        if error.value in decode.LOST:
            raise _Lost(name)
        return name


def _as_bool(number: int | None) -> bool | None:
    return None if number is None else bool(number)
