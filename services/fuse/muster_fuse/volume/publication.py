"""Pure: checks the kubelet's requests to the driver.

The keys that describe a pod are taken from kubernetes pkg/volume/csi/csi_mounter.go (1.36). A pod's
volume is mounted at `<kubelet>/pods/<uid>/volumes/kubernetes.io~csi/<name>/mount`.
"""

import enum
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from muster_fuse.request import caller

DRIVER: Final = "fuse.muster.dev"
UID_PATTERN: Final = r"^[0-9A-Za-z][0-9A-Za-z-]{0,62}$"
"""Matches the uid of a pod; a static pod's uid is not a UUID."""
_POD: Final = "csi.storage.k8s.io/"
_NAME_MAX: Final = 253
_KEYS: Final = ("uid", "namespace", "name")
_ID_MAX: Final = 128
_TARGET: Final = re.compile(
    rf"/pods/(?P<uid>{UID_PATTERN.strip('^$')})/volumes/kubernetes\.io~csi/[^/.][^/]*/mount"
)


class Reason(enum.StrEnum):
    """Why a request is refused."""

    INVALID = "invalid"
    """A kubelet would not send this request for an inline volume of this driver."""
    NO_POD = "no_pod"
    """The request does not name the volume's pod."""
    NAMESPACE = "namespace"
    """The settings do not allow the pod's namespace."""


class Refused(Exception):
    """A request is refused; the text becomes an event of the pod."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """A volume of a pod, and the kubelet's directory for it."""

    pod_uid: str
    volume_id: str
    target: str


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """A request to provide a volume for a pod."""

    volume: Volume
    pod: caller.Pod


def wanted(
    volume_id: str,
    target: str,
    context: Mapping[str, str],
    *,
    is_mount: bool,
    kubelet: str,
    namespaces: Sequence[str],
) -> Publication:
    """Return the volume that NodePublishVolume requests, and its pod.

    Raises Refused. `namespaces` are shell patterns for the namespaces whose pods may have volumes.
    """
    volume = existing(volume_id, target, kubelet=kubelet)
    if not is_mount:
        raise Refused(Reason.INVALID, "volume_capability: this driver only mounts directories")
    unknown = sorted(key for key in context if not key.startswith(_POD))
    if unknown:
        raise Refused(
            Reason.INVALID, f"volumeAttributes: remove {unknown[0]!r}; {DRIVER} takes no attributes"
        )
    uid, namespace, name = (context.get(f"{_POD}pod.{key}", "") for key in _KEYS)
    if not (uid and 0 < len(namespace) <= _NAME_MAX and 0 < len(name) <= _NAME_MAX):
        raise Refused(
            Reason.NO_POD,
            f"the request does not name the pod; is podInfoOnMount set in CSIDriver {DRIVER}?",
        )
    if context.get(f"{_POD}ephemeral") != "true":
        raise Refused(
            Reason.INVALID, f"{DRIVER} supports only inline volumes of pods, not PersistentVolumes"
        )
    if uid != volume.pod_uid:
        raise Refused(Reason.INVALID, f"target_path: does not belong to pod {uid}")
    if not any(fnmatch.fnmatchcase(namespace, pattern) for pattern in namespaces):
        raise Refused(
            Reason.NAMESPACE,
            f"pods in namespace {namespace} may not mount FUSE file systems: "
            "it matches none of `namespaces` in the settings of muster-fuse",
        )
    return Publication(volume=volume, pod=caller.Pod(uid=uid, namespace=namespace, name=name))


def existing(volume_id: str, target: str, *, kubelet: str) -> Volume:
    """Return the volume with this id and the target path that the kubelet names. Raises Refused."""
    if not 0 < len(volume_id) <= _ID_MAX:
        raise Refused(Reason.INVALID, f"volume_id: expected 1 to {_ID_MAX} characters")
    below = target.removeprefix(kubelet)
    match = _TARGET.fullmatch(below)
    if match is None or below == target:
        raise Refused(
            Reason.INVALID,
            "target_path: expected the directory of an inline volume below "
            f"{kubelet}/pods; is kubelet.directory the kubelet's --root-dir?",
        )
    return Volume(pod_uid=match["uid"], volume_id=volume_id, target=target)
