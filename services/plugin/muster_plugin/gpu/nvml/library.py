"""Adapter: libnvidia-ml: loads the library, initialises NVML and shuts it down, explains failures.

Everything here blocks, and may do so for minutes: it runs in threads, never on the event loop.
`pynvml` and `ctypes` are loaded only where there is a library to load (3 MiB, 10 ms). A library
that was loaded stays loaded: a driver that is replaced underneath needs a new process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from muster_plugin.config import gpus
from muster_plugin.gpu.nvml import decode
from muster_plugin.model import gpu

Binding: TypeAlias = Any
"""The module pynvml, which has no types."""
Handle: TypeAlias = Any
"""NVML's handle of a device, or of an event set."""
EventData: TypeAlias = Any
Error: TypeAlias = Any
"""A pynvml.NVMLError; its `value` is the return code."""
Answer = TypeVar("Answer")

_loaded: Final[list[object]] = []


class NvmlUnavailable(Exception):
    """NVML cannot be used at all, and why not."""

    def __init__(self, driver: gpu.Driver, problem: str) -> None:
        super().__init__(problem)
        self.driver = driver
        self.problem = problem


def initialise(rules: gpus.Gpus) -> Binding:
    """Load the library, initialise NVML, return the binding. Raises NvmlUnavailable.

    Each call needs a `shut_down`, with no other call in flight.
    """
    _load(rules.library, rules.given.driver_root)
    import pynvml  # noqa: PLC0415  # too heavy for nodes without a driver

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == decode.Code.LIBRARY_NOT_FOUND:
            problem = f"the library that was loaded is not named {decode.LIBRARY}"
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
    """Return the call's answer; None if product, driver or our permissions do not support it.

    A text that is not UTF-8 is no answer either. Raises NVMLError for any other failure.
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
    """Return NVML's name of an error that concerns one GPU; raise errors that concern all.

    That is so if the GPUs cannot be counted either.
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
    """Load the library from its configured place; pynvml then finds it by its SONAME."""
    if _loaded:
        return
    import ctypes  # noqa: PLC0415  # not without need

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
