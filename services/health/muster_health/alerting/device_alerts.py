"""Pure: tracks the device faults of one plugin, with one alert for each kind and resource.

Events set faults, and snapshots correct them, because events may be lost: the next inventory lists
the unhealthy devices, and each heartbeat counts the degraded, unmonitored and missing ones.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind, Condition, Health
from muster_health.alerting import evidence
from muster_health.model import alerts, snapshot

Group = tuple[AlertKind, str]
"""The kind of fault and the resource; each group has one alert."""

_WHY_MAX: Final = 300
_FIRST_MAX: Final = 140
_PODS_MAX: Final = 8
_COMPLETE: Final = "the expected number of devices is present again"
_SAVED_MAX: Final = 128
"""The maximum number of devices saved per group; nodes have fewer GPUs and MIG devices."""
_KIND_OF: Final = {
    Condition.DEGRADED: AlertKind.DEVICE_DEGRADED,
    Condition.UNMONITORED: AlertKind.DEVICE_UNMONITORED,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason for a device's fault, and the pods that use the device."""

    why: str
    pods: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Faults:
    """All current and recently ended faults; most plugins share the empty instance."""

    by_group: dict[Group, dict[str, Fault]] = field(default_factory=dict)
    counts: dict[Group, int] = field(default_factory=dict)
    short: dict[str, str] = field(default_factory=dict)
    ended: dict[Group, str] = field(default_factory=dict)
    unlisted: set[tuple[str, str]] = field(default_factory=set)


_NONE: Final = _Faults()
"""The empty instance, which many plugins share; it must never be changed."""
_NOTHING: Final[Mapping[str, int]] = {}


class DeviceFaults(msgspec.Struct, eq=False, gc=False):
    """The faulty devices of one plugin, by group and id."""

    devices_max: int
    totals: Mapping[str, int] = msgspec.field(default_factory=lambda: _NOTHING)
    """Number of devices by resource; empty until the first inventory."""
    changes: int = 0
    """The number of recorded changes of faults whose device id is known."""
    has_any: bool = False
    """Whether any fault has ever been recorded; if not, look-ups can be skipped."""
    _faults: _Faults = msgspec.field(default_factory=lambda: _NONE)
    _count: int = 0

    @property
    def by_group(self) -> Mapping[Group, dict[str, Fault]]:
        """The faulty devices whose ids are known, by group and id."""
        return self._faults.by_group

    @property
    def counts(self) -> Mapping[Group, int]:
        """The number of faulty devices in each group, from heartbeats; some ids may be unknown."""
        return self._faults.counts

    @property
    def short(self) -> Mapping[str, str]:
        """Resources with fewer devices than expected, each with a description."""
        return self._faults.short

    @property
    def ended(self) -> Mapping[Group, str]:
        """The reason why the latest fault of each group ended."""
        return self._faults.ended

    def restore(self, stored: Iterable[snapshot.KnownFault]) -> None:
        """Restore the faults that a previous process saved.

        An inventory that has already arrived takes precedence for unhealthy devices. Shortages of
        devices are not saved: the next heartbeat reports them again.
        """
        is_listed = self.totals is not _NOTHING
        for group in stored:
            is_replaced = is_listed and group.kind is AlertKind.DEVICE_UNHEALTHY
            if is_replaced or group.kind not in _WORDS:
                continue
            where = group.kind, group.resource
            for device in group.ids:
                self._put(where, device, Fault(group.why))
            if group.kind is not AlertKind.DEVICE_UNHEALTHY:
                # if the event that ends the fault was missed, a heartbeat that counts 0 ends it
                self._own.counts[where] = len(self.by_group.get(where, ()))

    def known(self) -> tuple[snapshot.KnownFault, ...]:
        """Return the faults to save; their number is limited, because each save writes all of them.

        After a restart, the next inventory and heartbeat report the omitted faults again.
        """
        alike: dict[tuple[AlertKind, str, str], list[str]] = {}
        for (kind, resource), devices in self.by_group.items():
            for device, bad in itertools.islice(devices.items(), _SAVED_MAX):
                alike.setdefault((kind, resource, bad.why), []).append(device)
        return tuple(snapshot.KnownFault(*group, tuple(ids)) for group, ids in alike.items())

    def apply(self, event: vocabulary.Event, had: Mapping[str, int] = _NOTHING) -> bool:
        """Record a plugin's event; return False if the plugin has more faults than allowed.

        `had` is the expected number of devices by resource. While an inventory lists fewer, an
        unhealthy device that is missing from it does not count as recovered.
        """
        match event:
            case vocabulary.DeviceHealthChanged():
                group = (AlertKind.DEVICE_UNHEALTHY, event.resource)
                holds = event.health is not Health.HEALTHY
                return self._set(group, event.device_id, _bad(event), holds=holds)
            case vocabulary.DeviceConditionChanged():
                group = (_KIND_OF[event.condition], event.resource)
                return self._set(group, event.device_id, _bad(event), holds=event.holds)
            case vocabulary.DeviceAdded(device=device):
                group = (AlertKind.DEVICE_UNHEALTHY, device.resource)
                holds = device.health is not Health.HEALTHY
                return self._set(group, _key(device), Fault(_cut(device.reason)), holds=holds)
            case vocabulary.InventoryReported():
                return self._replace(event.devices, had)
            case vocabulary.DeviceRemoved():
                self._remove(event)
            case vocabulary.ExpectationChanged():
                self._shorten(event.resource, event.short)
            case _:
                pass
        return True

    def observe(self, heartbeat: vocabulary.Heartbeat) -> bool:
        """Record the numbers in a heartbeat; return whether they changed anything."""
        changed, is_unharmed = False, self._faults is _NONE
        for resource in heartbeat.resources:
            reports_any = resource.short or resource.degraded or resource.unmonitored
            if is_unharmed and not reports_any:
                continue
            if resource.short != self.short.get(resource.name, ""):
                changed = True
                self._shorten(resource.name, resource.short)
            for kind, count in (
                (AlertKind.DEVICE_DEGRADED, resource.degraded),
                (AlertKind.DEVICE_UNMONITORED, resource.unmonitored),
            ):
                group = (kind, resource.name)
                if count != self.counts.get(group, 0):
                    changed = True
                    self._number(group, count)
        return changed

    def settle(self, lacks: Callable[[str], bool]) -> bool:
        """End the faults of devices that the inventory no longer lists; return whether any ended.

        These faults remain while their resource has too few devices (`lacks`).
        """
        if not self._faults.unlisted:
            return False
        over = [
            unlisted_device
            for unlisted_device in self._faults.unlisted
            if not lacks(unlisted_device[0])
        ]
        for resource, device in over:
            self._own.unlisted.discard((resource, device))
            unlisted = Fault("the plugin's inventory no longer lists the device")
            self._set((AlertKind.DEVICE_UNHEALTHY, resource), device, unlisted, holds=False)
        return bool(over)

    @property
    def _own(self) -> _Faults:
        """Return the faults as an object that this plugin does not share, so it may be changed."""
        if self._faults is _NONE:
            self._faults, self.has_any = _Faults(), True
        return self._faults

    def _number(self, group: Group, count: int) -> None:
        if count:
            self._own.counts[group] = count
            return
        self._own.counts.pop(group, None)
        self._own.ended[group] = "the plugin's heartbeat reports no such fault"
        self._count -= len(self._own.by_group.pop(group, ()))

    def _remove(self, event: vocabulary.DeviceRemoved) -> None:
        why = f"removed: {event.reason}" if event.reason else "removed"
        gone = event.physical or event.device_id
        for group in [group for group in self.by_group if group[1] == event.resource]:
            self._set(group, gone, Fault(why), holds=False)

    def _shorten(self, resource: str, short: str) -> None:
        if short:
            self._own.short[resource] = _cut(short)
        elif self._own.short.pop(resource, None) is not None:
            self._own.ended[AlertKind.DEVICES_SHORT, resource] = _COMPLETE

    def _set(self, group: Group, device: str, bad: Fault, *, holds: bool) -> bool:
        if holds:
            why = bad.why or "the plugin gives no reason"
            return self._put(group, device, Fault(why, bad.pods))
        devices = self.by_group.get(group)
        if devices is not None and devices.pop(device, None) is not None:
            self._count -= 1
            self.changes += 1
            self._own.ended[group] = bad.why or "the plugin reports the device as Healthy"
            if not devices:
                del self._own.by_group[group]
        return True

    def _put(self, group: Group, device: str, bad: Fault) -> bool:
        devices = self._own.by_group.setdefault(group, {})
        if device not in devices:
            if self._count >= self.devices_max:
                if not devices:
                    del self._own.by_group[group]
                return False
            self._count += 1
        before = devices.get(device)
        if before is not None:
            bad = Fault(_both(before.why, bad.why), bad.pods)
        if before != bad:
            self.changes += 1
        devices[device] = bad
        return True

    def _replace(self, listed: tuple[vocabulary.Device, ...], had: Mapping[str, int]) -> bool:
        totals: dict[str, int] = {}
        present: dict[tuple[str, str], vocabulary.Device] = {}
        for device in listed:
            totals[device.resource] = totals.get(device.resource, 0) + device.count
            other = present.setdefault((device.resource, _key(device)), device)
            if other.health is Health.HEALTHY:
                present[device.resource, _key(device)] = device
        self.totals = totals
        if self._faults.unlisted:
            self._own.unlisted.clear()
        for group, devices in list(self.by_group.items()):
            kind, resource = group
            for gone in [d for d in devices if (resource, d) not in present]:
                is_short = totals.get(resource, 0) < had.get(resource, 0)
                if kind is AlertKind.DEVICE_UNHEALTHY and is_short:
                    self._own.unlisted.add((resource, gone))
                    continue
                unlisted = Fault("the plugin's inventory no longer lists the device")
                self._set(group, gone, unlisted, holds=False)
        kept = True
        for (resource, key), device in present.items():
            group = (AlertKind.DEVICE_UNHEALTHY, resource)
            holds = device.health is not Health.HEALTHY
            why = device.reason if holds else "the plugin's inventory lists the device as Healthy"
            known_bad = self.by_group.get(group, {}).get(key)
            if holds and known_bad is not None:
                continue
            kept &= self._set(group, key, Fault(_cut(why)), holds=holds)
        return kept


def _bad(
    event: vocabulary.DeviceHealthChanged | vocabulary.DeviceConditionChanged,
) -> Fault:
    code = f" ({event.code})" if event.code else ""
    return Fault(_cut(f"{event.reason}{code}"), tuple(map(alerts.pod_name, event.pods[:_PODS_MAX])))


def _both(first: str, now: str) -> str:
    """Return a text with the first reason, which may name an error code, and the latest reason."""
    first = first.partition(alerts.LATEST)[0]
    return first if now == first else f"{first[:_FIRST_MAX]}{alerts.LATEST}{now[:_FIRST_MAX]}"


def _cut(text: str) -> str:
    return text if len(text) <= _WHY_MAX else text[: _WHY_MAX - 3] + "..."


def _key(device: vocabulary.Device) -> str:
    """Return the key under which faults are grouped: the replicas of a GPU share its faults."""
    return device.physical or device.id


_IDS_MAX: Final = 32
_SHOWN_MAX: Final = 4
_NO_TEXTS: Final[Mapping[str, str]] = {}
_LOST: Final = (evidence.of("health", "the plugin did not report that a device was removed"),)
_WORDS: Final = {
    AlertKind.DEVICE_UNHEALTHY: "unhealthy",
    AlertKind.DEVICE_DEGRADED: "degraded",
    AlertKind.DEVICE_UNMONITORED: "unmonitored",
}


def of(
    faults: DeviceFaults,
    *,
    node: str,
    at: datetime,
    missed: Mapping[str, str] = _NO_TEXTS,
) -> Iterable[alerts.Alert]:
    """Yield the alerts for the current faults, as if none had been published before.

    `missed` describes the resources that have fewer devices than before.
    """
    for group in sorted({*faults.by_group, *faults.counts}):
        kind, resource = group
        yield _of_group(
            kind,
            resource,
            faults.by_group.get(group, {}),
            faults.counts.get(group, 0),
            total=faults.totals.get(resource, 0),
            node=node,
            at=at,
        )
    for resource, short in sorted({**missed, **faults.short}.items()):
        source = "plugin" if resource in faults.short else "heartbeat"
        yield alerts.Alert(
            kind=AlertKind.DEVICES_SHORT,
            resource=resource,
            summary=f"{resource} on {node}: {short}",
            evidence=(evidence.of(source, short), *([] if resource in faults.short else _LOST)),
            starts_at=at,
            changed_at=at,
        )


def ended(faults: DeviceFaults, key: alerts.Key) -> tuple[vocabulary.Evidence, ...]:
    """Return the evidence that the faults of a group have ended."""
    slot, resource = key
    otherwise = "the plugin no longer reports the fault"
    if slot == AlertKind.DEVICES_SHORT:
        otherwise = _COMPLETE
    why = faults.ended.get((AlertKind(slot), resource), otherwise)
    return (evidence.of("plugin", why),)


def _of_group(
    kind: AlertKind,
    resource: str,
    faults: dict[str, Fault],
    counted: int,
    *,
    total: int,
    node: str,
    at: datetime,
) -> alerts.Alert:
    ids = sorted(faults)
    count = max(len(ids), counted)
    adjective = _WORDS[kind]
    shown = [f"{device}: {faults[device].why}" for device in ids[:_SHOWN_MAX]]
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    if count == 1 and ids:
        summary = f"{resource} {ids[0]} on {node} is {adjective}: {faults[ids[0]].why}"
    else:
        of_all = f" of {total}" if total >= count else ""
        named = f": {', '.join(ids[:_SHOWN_MAX])}{more}" if ids else ""
        summary = f"{count}{of_all} {resource} on {node} are {adjective}{named}"
    pods = sorted({pod for device in faults.values() for pod in device.pods})
    observed = [evidence.of("plugin", text) for text in shown]
    return alerts.Alert(
        kind=kind,
        resource=resource,
        summary=summary[:2000],
        evidence=tuple(observed) or (evidence.of("heartbeat", f"{count} {adjective}"),),
        starts_at=at,
        changed_at=at,
        devices=tuple(ids[:_IDS_MAX]),
        devices_total=count,
    ).naming(pods, len(pods))
