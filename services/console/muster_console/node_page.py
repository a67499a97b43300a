"""Pure: the page of one node: its verdicts with evidence, devices, pods, alerts and timeline."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster.cli import event_texts, why
from muster.fleet import health_state, model
from muster_console import (
    alert_groups,
    alert_history,
    device_detail,
    device_names,
    moments,
    node_devices,
    steps,
    timeline,
)

DEVICES_MAX: Final = 200
CHANGES_MAX: Final = 40
_RANK: Final = {level: rank for rank, level in enumerate(model.Level)}
_OF_DRAWING: Final = {level.value: level for level in model.Level}


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A resource of a plugin, and how many of its devices pods may use."""

    name: str
    usable: int
    total: int
    is_certain: bool
    """Whether the plugin works; otherwise, pods may not get the devices in the node's status."""


class PluginView(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin: its verdict with the evidence, its alerts, and its devices."""

    name: str
    plugin: str
    level: model.Level
    verdict: str
    verdict_level: model.Level
    """The level of the verdict; `level` also includes alerts, such as those about devices."""
    faulty: tuple[str, ...]
    """For each resource with faulty devices, a text such as `1 of 8 GPUs Unhealthy`."""
    since: datetime | None
    rule: str
    evidence: tuple[health_state.Evidence, ...]
    evidence_at: datetime | None
    """When the evidence of a problem was observed; None if unknown, or if the plugin is HEALTHY."""
    past: tuple[health_state.Evidence, ...]
    facts: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    unhealthy: tuple[health_state.Device, ...]
    alerts: tuple[alert_groups.ShownAlert, ...]
    usages: tuple[Usage, ...]

    @property
    def is_silenced(self) -> bool:
        """Whether the plugin has alerts, and all of them are silenced."""
        return bool(self.alerts) and all(alert.silence for alert in self.alerts)

    @property
    def silenced_at(self) -> datetime | None:
        """The time from which all alerts of the plugin are silenced.

        None if an alert is not silenced, if there is no alert, or if the verdict's level is OK.
        """
        if not self.is_silenced or self.verdict_level is model.Level.OK:
            return None
        return max(each.silence.starts_at for each in self.alerts if each.silence)


class PodView(msgspec.Struct, frozen=True, kw_only=True):
    """A pod and its devices from the last inventory; `why` is the reason for listing the pod."""

    name: str
    devices: tuple[node_devices.DeviceView, ...]
    why: str

    @property
    def is_hurt(self) -> bool:
        """Whether any device of the pod is not Healthy."""
        return not all(device.is_healthy for device in self.devices)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One entry in the list of the latest changes."""

    at: datetime
    type: str
    text: str
    id: str


class NodePage(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page of a node shows."""

    name: str
    level: model.Level
    plugins: tuple[PluginView, ...]
    alerts: tuple[alert_groups.ShownAlert, ...]
    """The alerts about the node itself."""
    devices: tuple[node_devices.DeviceView, ...]
    devices_total: int
    broken: Mapping[str, str]
    """By resource: the label of the plugin that serves it, if that plugin does not work."""
    silenced: int
    """How many of the node's alerts are silenced."""
    labels: Mapping[str, str]
    """The short names of the devices of the last inventory, by the id of the physical device."""
    pods: tuple[PodView, ...]
    mounts: tuple[vocabulary.FuseMount, ...]
    deliveries: tuple[alert_history.Delivery, ...]
    timeline: timeline.Timeline
    moment: moments.Moment | None
    detail: device_detail.DeviceDetail | None
    """The device to which the timeline and the changes are limited, if any."""
    of_device: tuple[node_devices.DeviceView, ...]
    """The entries of the inventory for that device, such as its replicas."""
    changes: tuple[Change, ...]
    pool: str
    zone: str
    problems: tuple[str, ...]
    """Which sources of the page did not answer, and why."""
    unknown: str
    """Why the node is unknown; empty if it is known."""


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """The data that was read for the page; `state` or `events` is None if it could not be read."""

    state: health_state.State | None
    events: Sequence[codec.CloudEvent] | None
    problems: tuple[str, ...] = ()


def page(
    name: str,
    sources: Sources,
    fleet: model.FleetModel,
    history: alert_history.AlertHistory,
    *,
    shown: timedelta,
    at: datetime,
    device: str = "",
    then: datetime | None = None,
) -> NodePage:
    """Return the page of a node; the timeline begins `shown` ago, and `then` is shown in detail.

    With `device`, the timeline and the latest changes are limited to that device, its replicas and
    its GPU.
    """
    view = why.NodeView(
        node=name,
        source=None,
        state=sources.state,
        events=sources.events,
        since="",
        now=at,
    )
    devices = node_devices.devices(sources.events or ())
    plugins = sorted(
        (_plugin(each, fleet, devices, at) for each in view.plugins),
        key=lambda each: (_RANK[each.level], each.name),
    )
    alerts = tuple(alert_groups.show(alert, fleet, at) for alert in view.alerts)
    prints = {alert.fingerprint for p in view.plugins for alert in p.alerts}
    prints |= {alert.fingerprint for alert in view.alerts} | _fingerprints(sources.events or ())
    deliveries = alert_history.about(history.deliveries(at), prints)
    summary = fleet.nodes.get(name)
    its = [each for each in devices if device in {each.id, each.physical}]
    names = frozenset({device, *(each.id for each in its), *(each.physical for each in its)})
    own = [
        event
        for event in sources.events or ()
        if not device or device_detail.concerns(event.data, names)
    ]
    changes = [event for event in own if not isinstance(event.data, event_texts.PERIODIC)]
    labels = {each.physical: each.label for each in devices}
    detail = (
        device_detail.detail(device, own, node_devices.gpus(sources.events or ()))
        if device
        else None
    )
    line = timeline.timeline(
        own,
        view.plugins,
        () if device else deliveries,
        start=at - shown,
        end=at,
        device=(detail.label, steps.of_device(sources.events or (), names)) if detail else None,
        labels=labels,
        silenced={
            each.plugin: each.silenced_at for each in plugins if each.silenced_at is not None
        },
    )
    levels = [each.level for each in plugins] + [each.level for each in alerts]
    return NodePage(
        name=name,
        level=summary.level if summary else min(levels, key=_rank, default=model.Level.UNKNOWN),
        plugins=tuple(plugins),
        alerts=alerts,
        devices=tuple(devices[:DEVICES_MAX]),
        devices_total=len(devices),
        broken={
            resource: plugin.label
            for plugin in view.plugins
            if not plugin.is_confirmed
            for resource in plugin.devices
        },
        silenced=summary.silenced if summary else 0,
        labels=labels,
        detail=detail,
        of_device=tuple(its[:DEVICES_MAX]),
        pods=tuple(_pods(view.pods, devices)),
        mounts=view.mounts,
        deliveries=alert_history.outcomes(deliveries, most=20),
        timeline=line,
        moment=moments.moment(own, () if device else view.plugins, line, at=then, labels=labels)
        if then
        else None,
        changes=tuple(map(_change, reversed(changes[-CHANGES_MAX:]))),
        pool=summary.pool if summary else "",
        zone=summary.zone if summary else "",
        problems=sources.problems,
        unknown=why.unknown_name(view),
    )


def _rank(level: model.Level) -> int:
    return _RANK[level]


def _plugin(
    plugin: health_state.Plugin,
    fleet: model.FleetModel,
    devices: Sequence[node_devices.DeviceView],
    at: datetime,
) -> PluginView:
    alerts = tuple(alert_groups.show(alert, fleet, at) for alert in plugin.alerts)
    level = _OF_DRAWING[timeline.level_of(plugin.verdict or "")]
    loud = [alert.level for alert in alerts if alert.silence is None]
    if level is model.Level.OK and (plugin.problems or plugin.is_suspected):
        level = model.Level.NOTICE
    elif level in {model.Level.CRITICAL, model.Level.WARNING} and not loud:
        level = model.Level.NOTICE if alerts else model.Level.WARNING
    return PluginView(
        name=plugin.name,
        plugin=plugin.plugin,
        level=min([level, *loud], key=_rank),
        verdict=(plugin.label if plugin.is_suspected else plugin.verdict) or "UNKNOWN",
        verdict_level=level,
        faulty=tuple(node_devices.faulty(devices, plugin)),
        since=plugin.since,
        rule=plugin.rule,
        evidence=plugin.evidence,
        evidence_at=_evidence_at(plugin, at),
        past=plugin.past,
        facts=tuple(_facts(plugin, at)),
        problems=plugin.problems,
        unhealthy=plugin.unhealthy,
        alerts=alerts,
        usages=tuple(
            Usage(
                name=name,
                usable=min(total, plugin.allocatable.get(name, total)),
                total=total,
                is_certain=plugin.is_confirmed,
            )
            for name, total in sorted(plugin.devices.items())
        ),
    )


def _evidence_at(plugin: health_state.Plugin, at: datetime) -> datetime | None:
    if plugin.evidence_age_s is None or plugin.verdict == vocabulary.Verdict.HEALTHY:
        return None
    return at - timedelta(seconds=plugin.evidence_age_s)


def _facts(plugin: health_state.Plugin, at: datetime) -> Iterable[tuple[str, str]]:
    if plugin.recovery:
        yield "recovering", plugin.recovery.text(at).removeprefix("recovering: ")
    if plugin.watched:
        yield "observed", f"by {plugin.agent}" if plugin.agent else "in the Kubernetes API alone"
        if plugin.finding not in {"", "none"}:
            yield "finding", f"{plugin.finding}: {plugin.text}".rstrip(": ")
        if plugin.socket:
            yield "socket", plugin.socket
        if plugin.process:
            yield "process", plugin.process
    elif plugin.beat_age_s is None:
        yield "heartbeat", "none since health started"
    else:
        due = f", due every {plugin.interval_s:g} s" if plugin.interval_s else ""
        yield "heartbeat", f"{plugin.beat_age_s:.1f} s ago{due}; state {plugin.state}"
        if abs(plugin.clock_skew_s) >= 1:
            side = "behind" if plugin.clock_skew_s > 0 else "ahead of"
            yield "clock", f"{abs(plugin.clock_skew_s):.1f} s {side} health's"
    yield from _doubts(plugin)
    if plugin.instance:
        yield "instance", plugin.instance


def _doubts(plugin: health_state.Plugin) -> Iterable[tuple[str, str]]:
    if plugin.is_suspected:
        yield "suspected", "silent, or it reports a problem; no verdict yet"
    if plugin.is_suspended:
        yield "suspended", "many plugins went silent together: no verdict until this ends"


def _fingerprints(events: Iterable[codec.CloudEvent]) -> set[str]:
    return {e.data.fingerprint for e in events if isinstance(e.data, vocabulary.AlertChanged)}


def _pods(
    known: Iterable[tuple[str, str]], devices: Sequence[node_devices.DeviceView]
) -> Iterable[PodView]:
    """Return the pods of a node, those with a faulty device first."""
    pods = [
        PodView(
            name=name,
            devices=tuple(device for device in devices if device.pod == name),
            why=device_names.shortened(reason),
        )
        for name, reason in known
    ]
    return sorted(pods, key=lambda pod: (not pod.is_hurt, pod.name))


def _change(event: codec.CloudEvent) -> Change:
    text = device_names.shortened(event_texts.change_text(event).removeprefix(f"{event.type} "))
    return Change(at=event.time, type=event.type, text=text, id=event.id)
