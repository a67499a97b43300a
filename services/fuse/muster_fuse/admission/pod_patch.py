"""Pure: computes the JSON patch with which a pod can mount FUSE through the broker.

A pod requests FUSE with the annotation `fuse.muster.dev/mount: "true"`, and declines with
`"false"`. In a namespace with the annotation `fuse.muster.dev/replace: RESOURCE`, a container
requests FUSE by requesting this extended resource. The patch removes the resource, and
CAP_SYS_ADMIN if the container adds it. A requesting pod gets the volume, and its containers get the
volume's four mounts. Whether a container can then use the broker depends on CAP_SYS_ADMIN:

| `/dev/fuse` in the container | without CAP_SYS_ADMIN | with it |
|---|---|---|
| the broker's stub, no device | mount(2): EPERM, the library calls fusermount3 | EINVAL, no mount |
| none | open: ENOENT, no mount | open: ENOENT, no mount |

So a container that keeps CAP_SYS_ADMIN cannot use the broker. If it does not request the resource,
the capability may serve another purpose: the container stays unchanged, without mounts, and the
author gets a warning. The same applies to a privileged container, which has the node's device. A
pod is changed completely or not at all: any conflict, such as a foreign mount at `/dev/fuse`,
leaves the pod unchanged.

Anyone who reaches the webhook's port can send it a pod. So the size of a pod and of its patch is
limited, the work is proportional to the size, and texts quote nothing from the pod except valid
container names, single words and paths of the broker's mounts.
"""

import contextlib
import enum
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

import msgspec

from muster_fuse.admission import pod as pods
from muster_fuse.volume import publication

MOUNT: Final = "fuse.muster.dev/mount"
REPLACE: Final = "fuse.muster.dev/replace"
REPLACED: Final = "fuse.muster.dev/replaced"
"""The annotation that records what was removed from the pod, by container, as JSON."""
VOLUME: Final = "muster-fuse"
MOUNTS: Final = (
    pods.Mount(name=VOLUME, mount_path="/run/muster-fuse", read_only=True),
    pods.Mount(
        name=VOLUME, mount_path="/usr/bin/fusermount3", sub_path="fusermount3", read_only=True
    ),
    pods.Mount(name=VOLUME, mount_path="/bin/fusermount", sub_path="fusermount3", read_only=True),
    pods.Mount(name=VOLUME, mount_path="/dev/fuse", sub_path="dev-fuse"),
)
CONTAINERS_MAX: Final = 250
"""The maximum number of containers, of all kinds, in a pod that is changed.

Each container adds up to 1 KB to the patch. The kubelet runs 110 pods on a node by default, most of
them with one or two containers.
"""
VOLUMES_MAX: Final = 1_000
MOUNTS_MAX: Final = 5_000
"""The maximum number of mounts and block devices in all containers of a pod together."""
PATCH_BYTES_MAX: Final = 256 * 1024
"""The maximum size of the JSON patch; etcd accepts a patched pod of at most 1.5 MiB."""
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_WORD: Final = re.compile(r"[A-Za-z0-9_-]{1,20}")
_AT: Final = {mount.mount_path: mount for mount in MOUNTS}
_MIRROR: Final = "kubernetes.io/config.mirror"
_SYS_ADMIN: Final = frozenset({"SYS_ADMIN", "CAP_SYS_ADMIN"})
_ALL: Final = frozenset({"ALL", "CAP_ALL"})
_RESOURCE: Final = re.compile(
    r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
)


class Outcome(enum.StrEnum):
    """The webhook's decision on a pod."""

    UNASKED = "unasked"
    """Neither the pod nor its namespace requests FUSE, or the pod declines."""
    UNCHANGED = "unchanged"
    """The pod already has the volume and the mounts."""
    MOUNTED = "mounted"
    """The pod got the volume, mounts or annotations that it lacked."""
    REPLACED = "replaced"
    """The extended resource was replaced by the volume."""
    CONFLICT = "conflict"
    """The pod requests FUSE, or may do so, but cannot be changed; this is reported."""


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operation of a JSON patch (RFC 6902)."""

    op: str
    path: str
    value: object = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Plan:
    """The change to a pod, and warnings for its author."""

    outcome: Outcome
    patch: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()


class _Taken(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was removed from a container."""

    requests: dict[str, pods.Quantity] = {}
    limits: dict[str, pods.Quantity] = {}
    capabilities: tuple[str, ...] = ()
    """All capabilities that the container added, in the order of its list."""


_Record = dict[str, _Taken]


def plan(pod: pods.Pod, *, replace: str = "") -> Plan:
    """Return the change to a pod; `replace` is the value of the namespace's annotation."""
    asks = pod.annotations.get(MOUNT)
    if asks == "false":
        return Plan(Outcome.UNASKED)
    if problem := _problem(pod, asks, replace):
        return _conflict([problem])
    placed = list(pods.placed(pod))
    requesting = [each for each in placed if _quantities(each.container, replace)]
    if asks is None and not requesting:
        return Plan(Outcome.UNASKED)
    volume = _volume(pod)
    users = [each for each in placed if not each.is_ephemeral]
    refused = {
        each.pointer: _refusal(each, requests=bool(_quantities(each.container, replace)))
        for each in users
    }
    writable = {each.name for each in pod.volumes if each.empty_dir is not None}
    mounting = [each for each in users if not refused[each.pointer]]
    conflicts = [
        *_pod_conflicts(pod, requesting, volume),
        *(text for each in mounting for text in _mount_conflicts(each, writable, volume)),
        *(text for each in mounting for text in _device_conflicts(each)),
    ]
    warnings = [text for text in refused.values() if text]
    if not mounting and not requesting and REPLACED not in pod.annotations:
        conflicts.append("no container in the pod can use the broker")
    if conflicts:
        return _conflict([*conflicts, *warnings])
    patch = [
        *(_volume_added(pod) if mounting and volume is None else ()),
        *(step for each in mounting for step in _mounts_added(each, volume or VOLUME)),
        *(step for each in requesting for step in _taken(each, replace)),
        *_annotated(pod, _record(pod, requesting, replace)),
    ]
    if (size := len(msgspec.json.encode(patch))) > PATCH_BYTES_MAX:
        return _conflict([f"the patch would be too large: {size} bytes, over {PATCH_BYTES_MAX}"])
    changed = Outcome.REPLACED if requesting else Outcome.MOUNTED
    return Plan(changed if patch else Outcome.UNCHANGED, tuple(patch), tuple(warnings))


def _problem(pod: pods.Pod, asks: str | None, replace: str) -> str:
    """Return which annotation is invalid or which limit a pod exceeds, as text; empty if none."""
    if asks not in {None, "true"}:
        shown = repr(asks) if _WORD.fullmatch(asks) else "its value"
        return f'annotation {MOUNT}: {shown} is neither "true" nor "false"'
    # also if it does not request FUSE, because to find that out takes long in a large pod
    if excess := _excess(pod):
        return f"the pod is too large to be changed: it has {excess}"
    if replace and not _RESOURCE.fullmatch(replace):
        return f"the namespace's annotation {REPLACE}: {replace!r:.60} is not a resource"
    return ""


def may_be_replaced(pod: pods.Pod) -> bool:
    """Return whether the plan for a pod may depend on its namespace."""
    if pod.annotations.get(MOUNT) == "false" or _excess(pod):
        return False
    asks_for = (name for each in pods.placed(pod) for name in _resources(each.container).names)
    return any("/" in name for name in asks_for)


def _excess(pod: pods.Pod) -> str:
    """Return which of its limits a pod exceeds, as text; empty if it exceeds none."""
    counts = (
        (sum(map(len, pod.containers)), CONTAINERS_MAX, "containers"),
        (len(pod.volumes), VOLUMES_MAX, "volumes"),
    )
    for count, most, what in counts:
        if count > most:
            return f"{count} {what}, over {most}"
    mounts = sum(
        len(container.volume_mounts or ()) + len(container.volume_devices or ())
        for containers in pod.containers
        for container in containers
    )
    return f"{mounts} mounts and block devices, over {MOUNTS_MAX}" if mounts > MOUNTS_MAX else ""


def _conflict(texts: Sequence[str]) -> Plan:
    return Plan(Outcome.CONFLICT, warnings=tuple(dict.fromkeys(texts)))


def _quantities(container: pods.Container, resource: str) -> dict[str, pods.Quantity]:
    return _resources(container).of(resource)


def _resources(container: pods.Container) -> pods.Resources:
    return container.resources or pods.Resources()


def _volume(pod: pods.Pod) -> str | None:
    """Return the name of the broker's volume; None if the pod does not have it yet."""
    names = (
        each.name for each in pod.volumes if each.csi and each.csi.driver == publication.DRIVER
    )
    return next(names, None)


def _refusal(each: pods.Placed, *, requests: bool) -> str:
    """Return why a container gets no mounts; empty if it gets them."""
    container = each.container
    who = _who(each)
    if container.is_privileged:
        return f"{who}: privileged, so it mounts with the node's device, without the broker"
    if not requests and {*container.added_capabilities} & (_SYS_ADMIN | _ALL):
        return f"{who}: keeps SYS_ADMIN, so it cannot use the broker and gets no mounts"
    return ""


def _who(each: pods.Placed) -> str:
    """Return a container's name, or its place if Kubernetes would not accept the name."""
    name = each.container.name
    return f"container {name if _LABEL.fullmatch(name) else each.pointer}"


def _pod_conflicts(
    pod: pods.Pod, requesting: Sequence[pods.Placed], volume: str | None
) -> Iterator[str]:
    if pod.spec.os is not None and pod.spec.os.name == "windows":
        yield "a Windows pod cannot use FUSE"
    if _MIRROR in pod.annotations:
        yield "the mirror of a static pod cannot be changed"
    for each in requesting:
        container = each.container
        if not container.is_privileged and {*container.added_capabilities} & _ALL:
            who = _who(each)
            yield f"{who}: adds ALL capabilities, including SYS_ADMIN, so it cannot use the broker"
    if volume is None and any(each.name == VOLUME for each in pod.volumes):
        yield f"volume {VOLUME}: the pod has another volume with this name"
    if volume is not None and not _LABEL.fullmatch(volume):
        yield f"the name of the volume with the driver {publication.DRIVER} is invalid"


def _mount_conflicts(
    each: pods.Placed, writable: AbstractSet[str], volume: str | None
) -> Iterator[str]:
    """Yield the conflicts with the paths of the broker's mounts in a container.

    `writable` has the names of the pod's emptyDir volumes. A text contains a path from the pod only
    if that is one of the broker's paths, or a directory above one.
    """
    for mount in each.container.volume_mounts or ():
        if volume is not None and _ours(mount, volume):
            continue
        path = _absolute(mount.mount_path)
        is_writable = mount.name in writable and not mount.read_only
        for ours in _AT:
            if path == ours:
                yield f"{_who(each)}: mounts {path} itself"
            elif _is_below(path, ours):
                yield f"{_who(each)}: mounts a path below {ours}"
            elif _is_below(ours, path) and not is_writable:
                yield f"{_who(each)}: mounts {path}, above {ours}"


def _device_conflicts(each: pods.Placed) -> Iterator[str]:
    for device in each.container.volume_devices or ():
        path = _absolute(device.device_path)
        for ours in _AT:
            if _is_below(ours, path):
                yield f"{_who(each)}: has a block device at {path}"
            elif _is_below(path, ours):
                yield f"{_who(each)}: has a block device below {ours}"


def _absolute(path: str) -> str:
    """Return a path as the kubelet interprets it: a relative path starts at the root."""
    return posixpath.normpath(posixpath.join("/", path)).replace("//", "/")


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _ours(mount: pods.Mount, volume: str) -> pods.Mount | None:
    """Return the entry of `MOUNTS` with the paths of a pod's mount; None if there is none."""
    if mount.name != volume or mount.sub_path_expr:
        return None
    ours = _AT.get(_absolute(mount.mount_path))
    return ours if ours is not None and (mount.sub_path or None) == ours.sub_path else None


def _volume_added(pod: pods.Pod) -> Iterator[Operation]:
    yield from _appended(
        "/spec/volumes", pod.volumes, [{"name": VOLUME, "csi": {"driver": publication.DRIVER}}]
    )


def _mounts_added(each: pods.Placed, volume: str) -> Iterator[Operation]:
    there = each.container.volume_mounts or ()
    present = {_ours(mount, volume) for mount in there}
    added = [_mount_json(ours, volume) for ours in MOUNTS if ours not in present]
    yield from _appended(f"{each.pointer}/volumeMounts", there, added)


def _mount_json(mount: pods.Mount, volume: str) -> dict[str, object]:
    made: dict[str, object] = {"name": volume, "mountPath": mount.mount_path}
    if mount.sub_path:
        made["subPath"] = mount.sub_path
    if mount.read_only:
        made["readOnly"] = True
    return made


def _appended(
    pointer: str, there: Sequence[object], added: Sequence[Mapping[str, object]]
) -> Iterator[Operation]:
    if there:
        yield from (Operation("add", f"{pointer}/-", value) for value in added)
    elif added:
        yield Operation("add", pointer, list(added))


def _taken(each: pods.Placed, resource: str) -> Iterator[Operation]:
    """Yield the operations that remove the resource, and CAP_SYS_ADMIN if it is to be removed."""
    for field in _quantities(each.container, resource):
        yield Operation("remove", f"{each.pointer}/resources/{field}/{_escaped(resource)}")
    if _loses_capability(each.container):
        added = each.container.added_capabilities
        kept = [capability for capability in added if capability not in _SYS_ADMIN]
        yield Operation("replace", f"{each.pointer}/securityContext/capabilities/add", kept)


def _loses_capability(container: pods.Container) -> bool:
    return not container.is_privileged and bool({*container.added_capabilities} & _SYS_ADMIN)


def _record(pod: pods.Pod, requesting: Sequence[pods.Placed], resource: str) -> _Record:
    """Return the record of all that is or was removed; empty if nothing is removed now."""
    record: _Record = {}
    if not requesting:
        return record
    # a text in another format is not ours and is replaced
    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
        record = msgspec.json.decode(pod.annotations.get(REPLACED, "{}"), type=_Record)
    for each in requesting:
        container = each.container
        quantities = _quantities(container, resource)
        fields = {field: {resource: quantity} for field, quantity in quantities.items()}
        lost = container.added_capabilities if _loses_capability(container) else ()
        record[container.name] = _Taken(**fields, capabilities=lost)
    return record


def _annotated(pod: pods.Pod, record: _Record) -> Iterator[Operation]:
    added = {MOUNT: "true"} if MOUNT not in pod.annotations else {}
    if record:
        added[REPLACED] = msgspec.json.encode(record, order="deterministic").decode()
    if not pod.annotations and added:
        yield Operation("add", "/metadata/annotations", added)
    else:
        for key, value in added.items():
            yield Operation("add", f"/metadata/annotations/{_escaped(key)}", value)


def _escaped(key: str) -> str:
    """Return a key as a token of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
