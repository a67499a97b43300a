"""Pure: defines advertised devices and the response for a container; validates resource names.

Names are within the limits of Kubernetes and Linux: Kubernetes v1.36 pkg/apis/core/v1/helper
IsExtendedResourceName and apimachinery's validation; Linux unix(7) for socket paths.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.model import gpu

SOCKET_PATH_BYTES_MAX: Final = 107
"""The longest path of a socket in Linux: sun_path holds 108 bytes, including the final zero."""
WILDCARD: Final = "*"
"""Stands for the name of each match in a resource's name, as in `example.com/*`."""
LABEL_MAX: Final = 63
_DOMAIN_MAX: Final = 244
_SHORT = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*")
_UNUSABLE = re.compile(r"[^A-Za-z0-9_-]")
_UNIQUE: Final = 8
_ID_MAX: Final = 63
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A device node of the host, and its path in a container."""

    host_path: str
    container_path: str
    permissions: str


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A file or directory of the host, and its path in a container."""

    host_path: str
    container_path: str
    read_only: bool


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One device as the kubelet sees it. Replicas of one device have the same `physical`.

    `identity` maps the index of an entry in the resource's configured group to the identity of the
    device that it matched. The indexes may change with the configuration.
    """

    id: vocabulary.DeviceId
    physical: str
    identity: Mapping[int, str]
    devices: tuple[DeviceSpec, ...] = ()
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[str, ...] = ()
    """The host paths of the device nodes, with links resolved."""
    numa: int | None = None
    gpu: "gpu.Device | None" = None
    """The GPU or MIG device of this replica; None for device nodes."""

    def is_same(self, other: "Unit") -> bool:
        """Return whether one unit has all devices of the other; optional devices may be absent."""
        ours, theirs = {*self.identity.values()}, {*other.identity.values()}
        return ours <= theirs or theirs <= ours


class AllocationError(Exception):
    """A request that cannot or must not be allocated; the pod's event shows the message."""


class ContainerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response for one container; `cdi_devices` are names that CDI specs resolve."""

    devices: tuple[DeviceSpec, ...] = ()
    mounts: tuple[Mount, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


def name_problems(name: str, *, per_match: bool = False) -> Iterator[str]:
    """Yield the reasons to refuse a resource name; `per_match` requires a final `/*`."""
    domain, slash, short = name.partition("/")
    if not slash:
        yield f"{name!r} has no domain; write it as example.com/{name}"
        return
    if "kubernetes.io/" in name:
        yield f"{name!r} is in Kubernetes' own domain"
    if name.startswith("requests."):
        yield f"{name!r} starts with 'requests.', which quotas use"
    if len(domain) > _DOMAIN_MAX or not _DOMAIN.fullmatch(domain):
        yield f"{domain!r} is not a lower-case DNS name of at most {_DOMAIN_MAX} characters"
    if per_match and short != WILDCARD:
        yield f"{name!r} is a single name, but perMatch needs {domain}/{WILDCARD}"
    elif not per_match and short == WILDCARD:
        yield f"{name!r} needs perMatch: true"
    elif not per_match and not _SHORT.fullmatch(short):
        yield (
            f"{short!r} must have 1 to {LABEL_MAX} of A-Z a-z 0-9 - _ . "
            "and begin and end with a letter or digit"
        )


def derived_name(rule: str, path_below_dev: str) -> str:
    """Return a match's resource name: `example.com/net_tun` for `example.com/*` and `net/tun`.

    The same path always gives the same name. A name that the kubelet would refuse (too long, or
    beginning or ending with `-` or `_`) is shortened or trimmed, and made unique again.
    """
    domain = rule.removesuffix(WILDCARD)
    plain = _UNUSABLE.sub("_", path_below_dev)
    if _SHORT.fullmatch(plain):
        return domain + plain
    unique = hashlib.sha256(path_below_dev.encode(errors="surrogateescape")).hexdigest()[:_UNIQUE]
    trimmed = plain[: LABEL_MAX - _UNIQUE - 1].strip("-_")
    return f"{domain}{trimmed}-{unique}" if trimmed else domain + unique


def environment_variable(resource: str) -> str:
    """Return the name of the variable that lists a container's device paths.

    For `a.example/b` it is `MUSTER_DEVICES_A_EXAMPLE_B`.
    """
    return "MUSTER_DEVICES_" + re.sub(r"[^A-Z0-9]", "_", resource.upper())


def socket_problems(path: str, *, resource: str) -> Iterator[str]:
    """Yield a problem if the path of a resource's socket is too long for Linux."""
    length = len(path.encode(errors="surrogateescape"))
    if length > SOCKET_PATH_BYTES_MAX:
        yield (
            f"the path of the socket of {resource} can have {length} bytes ({path}), and Linux "
            f"allows {SOCKET_PATH_BYTES_MAX}; shorten the directory or the name of the resource"
        )


def device_id(key: str, number: int) -> str:
    """Return the device id of one replica of `key`, such as the path of a device node.

    It is the same after every restart, unique, and at most 63 characters long.
    """
    short = key.removeprefix("/dev/")
    tail = f"-{number}"
    if _PLAIN.fullmatch(short) and len(short + tail) <= _ID_MAX:
        return short + tail
    unique = f".{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:_UNIQUE]}{tail}"
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", short).strip("-")
    return readable[-(_ID_MAX - len(unique)) :] + unique


def gpu_uuid(node: str, index: int) -> str:
    """Return the uuid of a simulated GPU: unique in the cluster, the same after a restart."""
    digits = hashlib.sha256(f"{node}/{index}".encode()).hexdigest()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"
