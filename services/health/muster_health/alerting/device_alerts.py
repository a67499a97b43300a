"""Pure: alerts about a plugin's devices, one for each kind and resource."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from muster import vocabulary
from muster.vocabulary import AlertKind
from muster_health.alerting import device_faults, evidence
from muster_health.model import alerts

_IDS_MAX: Final = 32
_SHOWN_MAX: Final = 4
_NOTHING: Final[Mapping[str, str]] = {}
_LOST: Final = (evidence.of("health", "the plugin did not report that any was removed"),)
_WORDS: Final = {
    AlertKind.DEVICE_UNHEALTHY: "unhealthy",
    AlertKind.DEVICE_DEGRADED: "degraded",
    AlertKind.DEVICE_UNMONITORED: "unmonitored",
}


def of(
    faults: device_faults.DeviceFaults,
    *,
    node: str,
    at: datetime,
    missed: Mapping[str, str] = _NOTHING,
) -> Iterable[alerts.Alert]:
    """Yield the alerts that follow from faults, each as if it were new.

    `missed` says in words which resources have fewer devices than they had.
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
            told_at=at,
        )


def ended(faults: device_faults.DeviceFaults, key: alerts.Key) -> tuple[vocabulary.Evidence, ...]:
    """Return the evidence that ended a group's alert."""
    slot, resource = key
    otherwise = "the plugin no longer reports it"
    if slot == AlertKind.DEVICES_SHORT:
        otherwise = "as many devices as before, or as the changed configuration asks for"
    why = faults.ended.get((AlertKind(slot), resource), otherwise)
    return (evidence.of("plugin", why),)


def _of_group(
    kind: AlertKind,
    resource: str,
    faults: dict[str, device_faults.Fault],
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
        told_at=at,
        devices=tuple(ids[:_IDS_MAX]),
        devices_total=count,
    ).naming(pods, len(pods))
