"""Fuzz targets for data from a node: NVML, kernel files, product names, fault scripts and NRI."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pynvml

from muster.pb import nri_pb2
from muster_fuse.nri import session
from muster_labeler.naming import accelerators
from muster_plugin.gpu import simulated
from muster_plugin.gpu.nvml import decode, discovery, library
from tests.fuzz.target import target
from tests.worlds import nri_runtime

_CODES: Final = tuple(int(code) for code in decode.Code)
_TEXTS: Final = (
    "GPU-1",
    "GPU-2",
    "NVIDIA H100 80GB HBM3",
    "H100 MIG 1g.10gb",
    "00000000:1A:00.0",
    "",
)
_CALLS_MAX: Final = 3_000


class _Bytes:
    """Numbers from the input; zeros after its end."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)
        self.calls = 0

    def number(self, size: int = 1) -> int:
        return int.from_bytes(bytes(next(self._data, 0) for _ in range(size)), "little")


class _Nvml:
    """A stand-in for pynvml whose answers come from the input.

    An answer has the type that NVML declares, and any value; any call may fail.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, data: bytes) -> None:
        self._input = _Bytes(data)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return getattr(pynvml, name)

        def call(*arguments: Any) -> Any:
            self._input.calls += 1
            assert self._input.calls < _CALLS_MAX, "the same question again and again"
            choice = self._input.number()
            if choice > 200:
                code = _CODES[choice % len(_CODES)] or 999
                raise pynvml.NVMLError(code)
            if choice > 190:
                bytes([0xFF]).decode("utf-8")
            answer: Callable[..., Any] = _ANSWERS.get(name, _number)
            return answer(self._input, *arguments)

        call.__name__ = name
        return call


def _number(source: _Bytes, *_: Any) -> int:
    return source.number(source.number() % 5)


def _text(source: _Bytes, *_: Any) -> str:
    return _TEXTS[source.number() % len(_TEXTS)]


def _filled(kind: Any) -> Callable[..., Any]:
    """Return a function that makes a structure from bytes of the input."""

    def make(source: _Bytes, *_: Any) -> Any:
        length = source.number()
        return kind.from_buffer_copy(
            bytes(source.number() for _ in range(length)).ljust(ctypes.sizeof(kind), b"\0")[
                : ctypes.sizeof(kind)
            ]
        )

    return make


def _pci(source: _Bytes, *_: Any) -> Any:
    info = pynvml.nvmlPciInfo_t()
    info.busId = _text(source).encode()
    return info


def _fields(source: _Bytes, _: Any, wanted: Any) -> Any:
    return [_filled(pynvml.c_nvmlFieldValue_t)(source) for _ in wanted]


def _fabric(source: _Bytes, _: Any, reference: Any) -> int:
    info = reference._obj  # what byref() points at
    ctypes.memmove(ctypes.addressof(info), bytes(source.number() for _ in range(40)), 40)
    return 0


_ANSWERS: Final[dict[str, Callable[..., Any]]] = {
    "nvmlDeviceGetHandleByIndex": lambda _, index: ctypes.c_void_p(index + 1),
    "nvmlDeviceGetMigDeviceHandleByIndex": lambda _, __, index: ctypes.c_void_p(index + 99),
    "nvmlDeviceGetGpuInstanceById": lambda *_: ctypes.c_void_p(1),
    "nvmlGpuInstanceGetComputeInstanceById": lambda *_: ctypes.c_void_p(1),
    "nvmlDeviceGetUUID": _text,
    "nvmlDeviceGetName": _text,
    "nvmlDeviceGetSerial": _text,
    "nvmlDeviceGetPciInfo": _pci,
    "nvmlDeviceGetNvLinkRemotePciInfo": _pci,
    "nvmlDeviceGetMemoryInfo": _filled(pynvml.c_nvmlMemory_t),
    "nvmlDeviceGetAttributes": _filled(pynvml.c_nvmlDeviceAttributes),
    "nvmlDeviceGetCudaComputeCapability": lambda source, _: (source.number(), source.number()),
    "nvmlDeviceGetMigMode": lambda source, _: [source.number() % 2, 0],
    "nvmlDeviceGetRemappedRows": lambda source, _: tuple(source.number() for _ in range(4)),
    "nvmlDeviceGetFieldValues": _fields,
    "nvmlDeviceGetGpuFabricInfoV": _fabric,
    "nvmlGpuInstanceGetInfo": _filled(pynvml.c_nvmlGpuInstanceInfo_t),
    "nvmlComputeInstanceGetInfo": _filled(pynvml.c_nvmlComputeInstanceInfo_t),
    "nvmlDeviceGetGpuInstanceProfileInfo": _filled(pynvml.c_nvmlGpuInstanceProfileInfo_v2_t),
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": _filled(
        pynvml.c_nvmlComputeInstanceProfileInfo_v2_t
    ),
}


def _answers() -> Iterator[bytes]:
    yield b"\x00\x01\x02"
    yield bytes(range(64)) * 4
    yield b"\x00\x01\x02" + b"\x00\x00" * 200
    yield b"\x00\x01\x01" + b"\x00\x01\xc9\x0f" * 60


@target(seeds=_answers)
def nvml_answers(data: bytes) -> None:
    """Check that GPUs are listed and polled whatever NVML answers, or raise an error of pynvml."""
    nvml = _Nvml(data)
    files = discovery.KernelFiles(sysfs=Path("/nonexistent"), proc=Path("/nonexistent"))
    with contextlib.suppress(pynvml.NVMLError, UnicodeDecodeError):
        discovered = discovery.discover_gpus(nvml, files, ())
        msgspec.json.encode(discovered.gpus)
        _, active = discovery.discover_links(nvml, discovered)
        for uuid, handle in discovered.handles.items():
            msgspec.json.encode(
                library.poll_gpu(nvml, handle, uuid, links=active.get(uuid, frozenset()))
            )


@target(
    seeds=lambda: iter((b"gpu0/gi3/access 30\ngpu0/gi3/ci0/access 31\nconfig 1\n",)),
    words=("gpu", "/gi", "/ci", "/access ", "\\xc2\\xb2", "\\xd9\\xa3"),
    long=lambda size: b"gpu0/gi3/access 30\n" * size,
)
def kernel_files(data: bytes) -> None:
    """Check that the kernel's list of MIG capabilities is read, and other lines are ignored."""
    for number in decode.capabilities(data.decode("utf-8", "replace")).values():
        assert number >= 0
    decode.sysfs_name(data.decode("utf-8", "replace"))
    decode.named_profile(data.decode("utf-8", "replace"))


@target(
    seeds=lambda: iter(
        (b'{"device":0,"xid":79}\n{"device":0,"clear":79}\n', b'{"device":7,"xid":48}\nx\n')
    ),
    words=('"device":', '"xid":', '"clear":'),
    long=lambda size: b'{"device":0,"xid":79}\n' * size,
)
def fault_scripts(data: bytes) -> None:
    """Check that a fault script is read, with at most one fault or bad line for each line."""
    script = simulated.parse_script(data, {})
    assert len(script.active) + len(script.bad_lines) <= len(data.splitlines())


_PRODUCTS: Final = (
    *(
        "NVIDIA H100 80GB HBM3",
        "Tesla V100-SXM2-16GB",
        "NVIDIA GeForce RTX 4090",
        "Quadro RTX 6000",
    ),
    *("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GH200 480GB", "GRID T4-8Q", "nvidia-tesla-t4"),
)


@target(
    seeds=lambda: (name.encode() for name in _PRODUCTS),
    words=("NVIDIA ", "Tesla ", "RTX ", "GB", "MIG ", "Ti", "SUPER", "-SXM", "PCIe"),
)
def product_names(data: bytes) -> None:
    """Check that a product's name becomes a valid value of a label, or None."""
    text = data.decode("utf-8", "replace")
    for name in (
        accelerators.name(text),
        *(
            reading.name
            for reading in accelerators.read_labels(dict.fromkeys(accelerators.KEYS, text))
        ),
    ):
        assert name.value is None or accelerators.is_name(name.value)


def _nri_requests() -> Iterator[bytes]:
    pod = nri_runtime.pod(nri_runtime.ANNOTATED)
    container = nri_runtime.container(pod)
    yield nri_runtime.registered()
    yield nri_runtime.registered(code=3, text="no")
    yield nri_runtime.request("Configure", nri_pb2.ConfigureRequest(runtime_name="containerd"))
    listed = nri_pb2.SynchronizeRequest(pods=[pod], containers=[container])
    yield nri_runtime.request("Synchronize", listed)
    yield _nri_creation()


def _nri_creation() -> bytes:
    pod = nri_runtime.pod(nri_runtime.ANNOTATED)
    created = nri_pb2.CreateContainerRequest(pod=pod, container=nri_runtime.container(pod))
    return nri_runtime.request("CreateContainer", created)


@target(
    seeds=_nri_requests,
    words=("CreateContainer", "Synchronize", "fuse.muster.dev/device", "true", "/dev/fuse"),
    long=lambda size: _nri_creation() * size,
)
def nri_messages(data: bytes) -> None:
    """Check that bytes of a container runtime are answered, or end the connection."""
    current = session.Session(["default"])
    with contextlib.suppress(session.Refused):
        answer, observed = current.receive(data)
        assert len(observed) <= len(list(nri_runtime.responses(answer)))
