"""Pure: determines from a socket's file name which resource it serves.

Only the plugin and the kubelet know the resource, and neither publishes it. Well-known plugins name
their sockets after their resources (each pattern below cites its source). For other plugins, the
watcher learns the resource when a resource and a socket appear or disappear together.
"""

import base64
import binascii
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

_CACHED_MAX: Final = 1024
_SERIAL: Final = re.compile(r"[0-9]{6,}|(?<=[-_.])[0-9a-f]{8,}(?=[-_.]|$)")
_DOMAIN: Final = r"(?:[a-z0-9](?:[-a-z0-9]*[a-z0-9])?\.)+[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_NAME: Final = r"[A-Za-z0-9](?:[-\w.]*[A-Za-z0-9])?"
RESOURCE: Final = re.compile(rf"[a-z0-9][-a-z0-9.]{{0,243}}/{_NAME}")


class _Pattern(NamedTuple):
    """A pattern for socket names without `.sock`; `resource` returns the resource of a match."""

    pattern: re.Pattern[str]
    resource: Callable[[re.Match[str]], str | None]


def _decoded(match: re.Match[str]) -> str | None:
    try:
        return base64.b64decode(match[1] + "=" * (-len(match[1]) % 4), altchars=b"-_").decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


_KNOWN: Final = (
    # squat/generic-device-plugin, deviceplugin/plugin.go: base64 of the resource, and the time
    _Pattern(re.compile(r"gdp-(.+)-[0-9]+"), _decoded),
    # GoogleCloudPlatform/container-engine-accelerators, cmd/nvidia_gpu
    _Pattern(re.compile(r"nvidiaGPU-[0-9]+"), lambda _: "nvidia.com/gpu"),
    # NVIDIA/k8s-device-plugin, internal/plugin/server.go
    _Pattern(re.compile(rf"nvidia-({_NAME})"), lambda match: f"nvidia.com/{match[1]}"),
    # smarter-project/smarter-device-manager
    _Pattern(re.compile(rf"smarter-({_NAME})"), lambda match: f"smarter-devices/{match[1]}"),
    # kubevirt/kubevirt, pkg/virt-handler/device-manager
    _Pattern(re.compile(rf"kubevirt-({_NAME})"), lambda match: f"devices.kubevirt.io/{match[1]}"),
    # kubevirt/device-plugin-manager (AMD's plugin), the SR-IOV network device plugin
    _Pattern(re.compile(rf"({_DOMAIN})_({_NAME})"), lambda m: f"{m[1]}/{m[2]}"),
    # intel/intel-device-plugins-for-kubernetes, pkg/deviceplugin/server.go
    _Pattern(re.compile(rf"([a-z]+\.intel\.com)-({_NAME})"), lambda m: f"{m[1]}/{m[2]}"),
)
_ON_DEMAND: Final = "devices.kubevirt.io/"


@functools.lru_cache(_CACHED_MAX)
def resource(socket: str) -> str | None:
    """Return the resource that a well-known plugin's socket serves; None for other sockets."""
    for known in _KNOWN:
        match = known.pattern.fullmatch(socket.removesuffix(".sock"))
        if match is not None:
            name = known.resource(match)
            return name if name and RESOURCE.fullmatch(name) else None
    return None


def by_last_part(resources: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Group resources by the last part of their names, for `resource_among`."""
    by_part: dict[str, list[str]] = {}
    for name in resources:
        by_part.setdefault(name.rpartition("/")[2], []).append(name)
    return by_part


def resource_among(socket: str, grouped: Mapping[str, Sequence[str]]) -> str | None:
    """Return the resource whose last part is the socket's name; None unless exactly one matches."""
    matching = grouped.get(socket.removesuffix(".sock"), ())
    return matching[0] if len(matching) == 1 else None


def is_on_demand(name: str) -> bool:
    """Return whether the plugin registers this resource on demand and removes its own socket."""
    return name.startswith(_ON_DEMAND)


@functools.lru_cache(_CACHED_MAX)
def stem(socket: str) -> str:
    """Return a socket's name with `*` for the numbers that change whenever its plugin starts."""
    return _SERIAL.sub("*", socket)
