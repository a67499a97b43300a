"""Adapter: NVML's MIG devices, their profiles and properties.

A MIG device may vanish between two calls; then it is left out.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from muster import vocabulary
from muster_plugin.gpu.nvml import decode, library

Answer = TypeVar("Answer")

_DEVICES_MAX: Final = 64
_UNKNOWN: Final = "unknown"
_ATTRIBUTES: Final = (
    ("multiprocessors", "multiprocessorCount"),
    ("gi_slices", "gpuInstanceSliceCount"),
    ("ci_slices", "computeInstanceSliceCount"),
    ("copy_engines", "sharedCopyEngineCount"),
    ("decoders", "sharedDecoderCount"),
    ("encoders", "sharedEncoderCount"),
    ("jpeg_engines", "sharedJpegCount"),
    ("ofa_engines", "sharedOfaCount"),
    ("memory_mib", "memorySizeMB"),
)


def is_enabled(nvml: library.Binding, handle: library.Handle) -> bool | None:
    """Return whether MIG mode is on; None where it is not supported."""
    mode = library.call_if_supported(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else bool(mode[0])


def uuids(nvml: library.Binding, handle: library.Handle) -> tuple[str, ...] | None:
    """Return the uuids of a GPU's MIG devices; None where MIG is off or not supported."""
    if not is_enabled(nvml, handle):
        return None
    return tuple(nvml.nvmlDeviceGetUUID(device) for _, device in _handles(nvml, handle))


class MigReader:
    """Reads the MIG devices of one GPU; `problems` name those that could not be read."""

    def __init__(self, nvml: library.Binding, handle: library.Handle, *, total_bytes: int) -> None:
        self._nvml = nvml
        self._handle = handle
        self._total_bytes = total_bytes
        self._gi_profiles: dict[int, tuple[int, int]] | None = None
        self.problems: list[str] = []

    def devices(self) -> Iterator[vocabulary.MigDevice]:
        """Yield every MIG device that can be read, without unused indices and vanished devices."""
        for index, device in _handles(self._nvml, self._handle):
            try:
                yield self._device(index, device)
            except self._nvml.NVMLError as error:
                if error.value in decode.LOST:
                    raise
                name = library.raise_if_ended(self._nvml, error)
                if error.value not in decode.ABSENT:
                    self.problems.append(f"MIG device {index} cannot be read: {name}")

    def _device(self, index: int, device: library.Handle) -> vocabulary.MigDevice:
        nvml = self._nvml
        gi = nvml.nvmlDeviceGetGpuInstanceId(device)
        ci = nvml.nvmlDeviceGetComputeInstanceId(device)
        attributes = library.call_if_supported(nvml, nvml.nvmlDeviceGetAttributes, device)
        return vocabulary.MigDevice(
            uuid=nvml.nvmlDeviceGetUUID(device),
            index=index,
            profile=self._profile(device, gi, ci),
            gi=gi,
            ci=ci,
            **{
                ours: int(getattr(attributes, theirs)) for ours, theirs in _ATTRIBUTES if attributes
            },
        )

    def _profile(self, device: library.Handle, gi: int, ci: int) -> str:
        """Return the profile as NVIDIA's tools derive it, else the one in the device's name."""
        nvml = self._nvml
        ask = functools.partial(library.call_if_supported, nvml)
        instance = ask(nvml.nvmlDeviceGetGpuInstanceById, self._handle, gi)
        compute = instance and ask(nvml.nvmlGpuInstanceGetComputeInstanceById, instance, ci)
        if instance and compute and self._total_bytes:
            gi_id = nvml.nvmlGpuInstanceGetInfo(instance).profileId
            ci_id = nvml.nvmlComputeInstanceGetInfo(compute).profileId
            gi_profile = self._profiles_by_id().get(gi_id)
            ci_profile = self._ci_profile(instance, ci_id)
            if gi_profile is not None and ci_profile is not None:
                return decode.profile(
                    gi_profile[0],
                    ci_profile,
                    memory_mib=gi_profile[1],
                    total_bytes=self._total_bytes,
                )
        return decode.named_profile(ask(nvml.nvmlDeviceGetName, device) or "") or _UNKNOWN

    def _profiles_by_id(self) -> dict[int, tuple[int, int]]:
        """Return NVML's number and the memory of each GPU instance profile, by its id."""
        if self._gi_profiles is None:
            nvml = self._nvml
            profiles: dict[int, tuple[int, int]] = {}
            for number in range(decode.GI_PROFILES):
                info = _profile_info(
                    nvml, nvml.nvmlDeviceGetGpuInstanceProfileInfo, self._handle, number, 1
                )
                if info is not None:
                    profiles.setdefault(info.id, (number, info.memorySizeMB))
            self._gi_profiles = profiles
        return self._gi_profiles

    def _ci_profile(self, instance: library.Handle, profile_id: int) -> int | None:
        nvml = self._nvml
        for number in range(decode.CI_PROFILES):
            info = _profile_info(
                nvml, nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, number, 0, 1
            )
            if info is not None and info.id == profile_id:
                return number
        return None


def _profile_info(
    nvml: library.Binding, call: Callable[..., Answer], *arguments: object
) -> Answer | None:
    """Return a profile; None if the product does not have it, or the driver does not know it."""
    try:
        return library.call_if_supported(nvml, call, *arguments)
    except nvml.NVMLError as error:
        if error.value in decode.ABSENT:
            return None
        raise


def _handles(nvml: library.Binding, handle: library.Handle) -> Iterator[tuple[int, library.Handle]]:
    count = library.call_if_supported(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    for index in range(min(count, _DEVICES_MAX)):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError as error:
            if error.value not in decode.ABSENT:
                raise
        else:
            yield index, device
