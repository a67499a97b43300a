"""Pure: What is wrong with a plugin's devices becomes alerts: one for each kind and resource."""

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
_LOST: Final = (evidence.seen("health", "the plugin did not report that any was removed"),)
_WORDS: Final = {
    AlertKind.DEVICE_UNHEALTHY: "unhealthy",
    AlertKind.DEVICE_DEGRADED: "degraded",
    AlertKind.DEVICE_UNMONITORED: "unmonitored",
}


def of(
    known: device_faults.DeviceFaults,
    *,
    node: str,
    at: datetime,
    missed: Mapping[str, str] = _NOTHING,
) -> Iterable[alerts.Alert]:
    """Give the alerts that devices call for, each as if it were new.

    `missed` says in words which resources have fewer devices than they had.
    """
    for group in sorted({*known.bad, *known.counts}):
        kind, resource = group
        yield _of_group(
            kind,
            resource,
            known.bad.get(group, {}),
            known.counts.get(group, 0),
            total=known.totals.get(resource, 0),
            node=node,
            at=at,
        )
    for resource, short in sorted({**missed, **known.short}.items()):
        source = "plugin" if resource in known.short else "heartbeat"
        yield alerts.Alert(
            kind=AlertKind.DEVICES_SHORT,
            resource=resource,
            summary=f"{resource} on {node}: {short}",
            evidence=(evidence.seen(source, short), *([] if resource in known.short else _LOST)),
            starts_at=at,
            told_at=at,
        )


def ended(known: device_faults.DeviceFaults, key: alerts.Key) -> tuple[vocabulary.Evidence, ...]:
    """Return what ended a group's alert."""
    slot, resource = key
    otherwise = "the plugin no longer reports it"
    if slot == AlertKind.DEVICES_SHORT:
        otherwise = "as many devices as before, or as the changed configuration asks for"
    why = known.ended.get((AlertKind(slot), resource), otherwise)
    return (evidence.seen("plugin", why),)


def _of_group(
    kind: AlertKind,
    resource: str,
    bad: dict[str, device_faults.Fault],
    counted: int,
    *,
    total: int,
    node: str,
    at: datetime,
) -> alerts.Alert:
    ids = sorted(bad)
    many = max(len(ids), counted)
    word = _WORDS[kind]
    shown = [f"{device}: {bad[device].why}" for device in ids[:_SHOWN_MAX]]
    more = f" and {many - len(shown)} more" if many > len(shown) else ""
    if many == 1 and ids:
        summary = f"{resource} {ids[0]} on {node} is {word}: {bad[ids[0]].why}"
    else:
        of_all = f" of {total}" if total >= many else ""
        named = f": {', '.join(ids[:_SHOWN_MAX])}{more}" if ids else ""
        summary = f"{many}{of_all} {resource} on {node} are {word}{named}"
    pods = sorted({pod for device in bad.values() for pod in device.pods})
    seen = [evidence.seen("plugin", text) for text in shown]
    return alerts.Alert(
        kind=kind,
        resource=resource,
        summary=summary[:2000],
        evidence=tuple(seen) or (evidence.seen("heartbeat", f"{many} {word}"),),
        starts_at=at,
        told_at=at,
        devices=tuple(ids[:_IDS_MAX]),
        devices_total=many,
    ).naming(pods, len(pods))
