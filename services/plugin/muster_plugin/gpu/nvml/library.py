"""Adapter: libnvidia-ml: finds and loads it, begins and ends NVML, says why it cannot be asked.

Everything here blocks, and may do so for minutes: it runs in threads, never on the event loop.
`pynvml` and `ctypes` are loaded only where there is a library to load (3 MiB, 10 ms). What has been
loaded stays loaded: a driver that is replaced underneath needs a new process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from muster import lean
from muster_plugin.config import gpus
from muster_plugin.gpu.nvml import decode
from muster_plugin.model import gpu

Binding: TypeAlias = Any
"""The module pynvml, which has no types."""
Handle: TypeAlias = Any
"""A device of NVML's, or an event set."""
EventData: TypeAlias = Any
Error: TypeAlias = Any
"""A pynvml.NVMLError; its `value` is the return code."""
Answer = TypeVar("Answer")

_loaded: Final[list[object]] = []


class NvmlUnavailable(Exception):
    """NVML cannot be asked at all, and why not."""

    def __init__(self, driver: gpu.Driver, problem: str) -> None:
        super().__init__(problem)
        self.driver = driver
        self.problem = problem


def initialise(rules: gpus.Gpus) -> Binding:
    """Load the library, initialise NVML, return the binding. Raises Unusable.

    Each beginning needs an end; nothing may be in flight then.
    """
    _load(rules.library, rules.given.driver_root)
    lean.load("pynvml")
    import pynvml  # noqa: PLC0415  # too heavy for nodes without a driver

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == decode.Code.LIBRARY_NOT_FOUND:
            what = f"what was loaded does not call itself {decode.LIBRARY}"
            raise NvmlUnavailable(gpu.Driver.NO_LIBRARY, what) from None
        raise NvmlUnavailable(*decode.init_failure(error.value)) from None
    return pynvml


def shut_down(nvml: Binding) -> None:
    """Give NVML up. A driver that has gone meanwhile does not matter."""
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return


def call_if_supported(
    nvml: Binding, call: Callable[..., Answer], *arguments: object
) -> Answer | None:
    """Return what a function answers; None where the product, the driver or our rights lack it.

    A text that is no UTF-8 is no answer either. Raises NVMLError for any other failure.
    """
    try:
        return call(*arguments)
    except UnicodeDecodeError:
        return None
    except nvml.NVMLError as error:
        if error.value in decode.UNSUPPORTED:
            return None
        raise


def is_session_ended(nvml: Binding, code: int) -> bool:
    """Tell whether an answer about one GPU concerns all: then they cannot be counted either."""
    if code not in decode.SESSION_ENDED:
        return False
    try:
        nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:
        return True
    return False


def handle_address(handle: Handle) -> int:
    """Return what tells handles apart; a device keeps its address while NVML is initialised."""
    import ctypes  # noqa: PLC0415  # loaded with the library

    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _load(library: str, driver_root: str) -> None:
    """Load the library from where it is told to be; pynvml then finds it by its SONAME."""
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
    raise NvmlUnavailable(
        gpu.Driver.NO_LIBRARY,
        decode.library_problem(library, driver_root, "; ".join(failures)),
    )
