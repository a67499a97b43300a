"""Pure: tracks the failed FUSE mounts of one node, with one alert for each kind of failure.

| reported                                             | faults of the mount             |
|------------------------------------------------------|---------------------------------|
| a condition of a mount begins                        | one more                        |
| a condition of a mount ends                          | one fewer                       |
| an inventory lists the mount                         | exactly the conditions it lists |
| an inventory does not list it, or it has no mounts   | none: the mount has ended       |

Events set faults and inventories correct them, because events may be lost.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind, FuseCondition
from muster_health.alerting import evidence
from muster_health.model import alerts, snapshot

_KIND_OF: Final = {
    FuseCondition.HUNG: AlertKind.FUSE_MOUNT_HUNG,
    FuseCondition.DEAD: AlertKind.FUSE_DAEMON_DIED,
    FuseCondition.LINGERING: AlertKind.FUSE_POD_TERMINATING,
}
_WORDS: Final = {
    AlertKind.FUSE_MOUNT_HUNG: ("a FUSE mount hangs", "{} FUSE mounts hang"),
    AlertKind.FUSE_DAEMON_DIED: (
        "the program that served a FUSE mount has ended",
        "the programs that served {} FUSE mounts have ended",
    ),
    AlertKind.FUSE_POD_TERMINATING: (
        "a FUSE mount prevents a pod from terminating",
        "{} FUSE mounts prevent pods from terminating",
    ),
}
FAULTS_MAX: Final = 1024
"""The maximum number of faults of one kind; a node's pods cannot use that many mounts."""
_WHY_MAX: Final = 300
_SHOWN_MAX: Final = 4
_SAVED_MAX: Final = 128
"""The maximum number of mounts saved per kind; the next inventory lists the others again."""
_Faults = dict[AlertKind, dict[str, "Fault"]]


@dataclass(frozen=True, slots=True)
class Fault:
    """The pod of a failed mount, and a description of the failure."""

    pod: str
    why: str


class MountFaults(msgspec.Struct, eq=False, gc=False):
    """The failed mounts of one node, which only its FUSE broker reports."""

    total: int | None = None
    """How many mounts the last inventory lists; None before the first."""
    changes: int = 0
    _own: _Faults | None = None

    @property
    def by_kind(self) -> Mapping[AlertKind, Mapping[str, Fault]]:
        """The faults by kind and id of the mount; kinds without faults are omitted."""
        return self._own or {}

    def restore(self, stored: Iterable[snapshot.KnownFault]) -> None:
        """Restore the faults that a previous process saved, unless newer ones are known."""
        if self.total is not None or self.changes:
            return
        for group in stored:
            if group.kind in alerts.OF_MOUNTS:
                for mount in group.ids:
                    self._put(group.kind, mount, Fault(group.resource, group.why))

    def known(self) -> tuple[snapshot.KnownFault, ...]:
        """Return the faults to save; their `resource` is the name of the pod."""
        return tuple(
            snapshot.KnownFault(kind, fault.pod, fault.why, (mount,))
            for kind, faults in self.by_kind.items()
            for mount, fault in itertools.islice(faults.items(), _SAVED_MAX)
        )

    def apply(self, event: vocabulary.Event) -> bool:
        """Record a broker's event; return False if there are more faults than allowed."""
        match event:
            case vocabulary.FuseMountChanged(mount=mount):
                kind = _KIND_OF[event.condition]
                if event.holds:
                    return self._put(kind, mount.id, _fault(mount, event.text))
                self._drop(kind, mount.id)
            case vocabulary.InventoryReported(fuse_mounts=mounts):
                self.total = len(mounts)
                if mounts or self._own:
                    return self._replace(mounts)
            case _:
                pass
        return True

    def shown(self) -> list[dict[str, str]]:
        """Return the faults as `/state` shows them."""
        return [
            {"kind": kind, "resource": fault.pod, "device": mount, "why": fault.why}
            for kind, faults in sorted(self.by_kind.items())
            for mount, fault in sorted(faults.items())
        ]

    def _replace(self, mounts: Iterable[vocabulary.FuseMount]) -> bool:
        listed = {
            (_KIND_OF[condition], mount.id): mount
            for mount in mounts
            for condition in mount.conditions
        }
        for kind, faults in list(self.by_kind.items()):
            for mount_id in [mount_id for mount_id in faults if (kind, mount_id) not in listed]:
                self._drop(kind, mount_id)
        kept = True
        for (kind, mount_id), mount in listed.items():
            if mount_id not in self.by_kind.get(kind, {}):
                kept &= self._put(kind, mount_id, _fault(mount, ""))
        return kept

    def _put(self, kind: AlertKind, mount: str, fault: Fault) -> bool:
        faults = self.by_kind.get(kind, {})
        if mount not in faults and len(faults) >= FAULTS_MAX:
            return False
        if faults.get(mount) != fault:
            self._own = self._own or {}
            self._own.setdefault(kind, {})[mount] = fault
            self.changes += 1
        return True

    def _drop(self, kind: AlertKind, mount: str) -> None:
        faults = self._own.get(kind, {}) if self._own else {}
        if self._own and faults.pop(mount, None) is not None:
            self.changes += 1
            if not faults:
                del self._own[kind]


def of(faults: MountFaults, *, node: str, at: datetime) -> Iterable[alerts.Alert]:
    """Yield the alerts for the current faults, as if none had been published before."""
    for kind, mounts in sorted(faults.by_kind.items()):
        each = sorted(mounts.values(), key=lambda fault: (fault.pod, fault.why))
        pods = sorted({fault.pod for fault in each})
        word, words = _WORDS[kind]
        what = word if len(each) == 1 else words.format(len(each))
        named = each[0].why if len(each) == 1 else ", ".join(pods[:_SHOWN_MAX])
        more = f" and {len(pods) - _SHOWN_MAX} more" if len(pods) > _SHOWN_MAX else ""
        summary = f"{what} on {node}: {named if len(each) == 1 else f'{named}{more}'}"
        yield alerts.Alert(
            kind=kind,
            summary=summary,
            evidence=tuple(evidence.of("plugin", fault.why) for fault in each[:_SHOWN_MAX]),
            starts_at=at,
            changed_at=at,
        ).naming(pods, len(pods))


def ended() -> tuple[vocabulary.Evidence, ...]:
    """Return the evidence for the end of an alert: no mount has this fault any more."""
    return (evidence.of("plugin", "the mounts work again, or no longer exist"),)


def _fault(mount: vocabulary.FuseMount, text: str) -> Fault:
    program = mount.subtype or "a FUSE file system"
    source = f" {mount.source}" if mount.source else ""
    place = f" on {mount.mount_point}" if mount.mount_point else ""
    pod = alerts.pod_name(mount.pod)
    why = f"{pod}: {program}{source}{place}{f': {text}' if text else ''}"
    return Fault(pod, why if len(why) <= _WHY_MAX else why[: _WHY_MAX - 3] + "...")
