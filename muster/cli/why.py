"""Pure: shows the state of one node as the health service sees it, and its last events."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from muster import codec, matching, vocabulary
from muster.cli import event_texts, status, texts
from muster.fleet import health_state, usage
from muster.service import validation

_HEALTHY: Final = vocabulary.Verdict.HEALTHY.value
_CHANGES_MAX: Final = 30
_MOUNTS_MAX: Final = 100
_PODS_MAX: Final = 5
"""The maximum number of pods in an alert's line; the list of pods below has all of them."""
_EVENTS_MAX: Final = 10_000
"""The maximum number of past events that `muster.events` returns: the earliest ones."""
_CUT: Final = "  later changes are omitted (too many); use a later --since"


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """The data about a node; `state` and `events` (sorted by time) are None if unavailable."""

    node: str
    source: str | None
    """The URL of health."""
    state: health_state.State | None
    events: Sequence[codec.CloudEvent] | None
    since: str
    """The start of the events, as the user wrote it."""
    now: datetime | None = None
    """When health answered."""
    only: str | None = None
    """The only plugin or resource to show."""
    silences: Mapping[str, matching.Silence] = {}
    """The silence of each silenced alert, by fingerprint."""

    @property
    def plugins(self) -> list[health_state.Plugin]:
        """Return the plugins of the node, or only those that have the requested name."""
        only = self.only
        shown = (p for p in self.all_plugins if only is None or p.is_named(only))
        return sorted(shown, key=lambda p: (bool(p.watched), p.name))

    @property
    def all_plugins(self) -> list[health_state.Plugin]:
        """Return all plugins of the node."""
        of_fleet = self.state.plugins if self.state else ()
        return [plugin for plugin in of_fleet if plugin.node == self.node]

    @property
    def alerts(self) -> list[health_state.Alert]:
        """Return the alerts about the node itself, not about a plugin."""
        of_fleet = self.state.fleet.alerts if self.state else ()
        return [alert for alert in of_fleet if alert.node == self.node]

    @property
    def plugin_alerts(self) -> list[health_state.Alert]:
        """Return the alerts about the shown plugins."""
        return [alert for plugin in self.plugins for alert in plugin.alerts]

    @property
    def changes(self) -> list[codec.CloudEvent]:
        """Return the latest changes, the newest last; see `counted_changes`."""
        return [event for event, _ in self.counted_changes]

    @property
    def counted_changes(self) -> list[tuple[codec.CloudEvent, int]]:
        """Return the latest changes; each repeated failure to notify appears once, with a count."""
        newest: dict[object, codec.CloudEvent] = {}
        times: collections.Counter[object] = collections.Counter()
        for event in reversed(self.events or ()):
            if isinstance(event.data, event_texts.PERIODIC) or not self._is_shown(event.data):
                continue
            key: object = event.id
            if isinstance(failed := event.data, vocabulary.NotificationFailed):
                key = failed.receiver, failed.group, failed.reason, failed.outcome
            newest.setdefault(key, event)
            times[key] += 1
        changes = [(event, times[key]) for key, event in newest.items()]
        return changes[:_CHANGES_MAX][::-1]

    def _is_shown(self, event: vocabulary.Event) -> bool:
        if self.only is None:
            return True
        if isinstance(event, vocabulary.PluginObserved):
            return self.only in {event.watched.name, vocabulary.watched_plugin(event.watched.name)}
        names = {self.only, *(plugin.plugin for plugin in self.plugins)}
        of_event = getattr(event, "plugin", ""), getattr(event, "watched", "")
        return not names.isdisjoint(of_event)

    @property
    def is_cut(self) -> bool:
        """Whether later events may be missing, because too many were received."""
        return len(self.events or ()) >= _EVENTS_MAX

    @property
    def mounts(self) -> tuple[vocabulary.FuseMount, ...]:
        """Return the FUSE mounts in the newest inventory of each plugin, updated by events."""
        listed: dict[str, dict[str, vocabulary.FuseMount]] = {}
        for event in self.events or ():
            match event.data:
                case vocabulary.InventoryReported(plugin=plugin, fuse_mounts=fuse_mounts):
                    listed[plugin] = {mount.id: mount for mount in fuse_mounts}
                case vocabulary.FuseMountChanged(plugin=plugin, mount=mount) as change:
                    known = listed.get(plugin, {})
                    if mount.id in known:
                        known[mount.id] = _changed(known[mount.id], change)
                case _:
                    pass
        mounts = (mount for of_plugin in listed.values() for mount in of_plugin.values())
        return tuple(sorted(mounts, key=lambda mount: (mount.pod, mount.connection)))

    @property
    def pods(self) -> list[tuple[str, str]]:
        """Return the pods named by events or alerts, each with the reason for showing it."""
        reasons: dict[str, str] = {}
        holders: dict[tuple[str, str], str] = {}
        for event in self.events or ():
            if isinstance(event.data, vocabulary.AllocationObserved) and event.data.pod:
                devices = ", ".join(event.data.device_ids)
                at = status.at(event.time)
                reasons[event.data.pod] = f"got {event.data.resource} {devices} at {at}"
                resource = event.data.resource
                holders |= {(resource, id_): event.data.pod for id_ in event.data.device_ids}
        # a device that another pod got later is not held by the earlier one any more
        reasons = {pod: reasons[pod] for pod in dict.fromkeys(holders.values())}
        named = {(pod, alert.kind): None for alert in self.plugin_alerts for pod in alert.pods}
        for pod, kind in named:
            got = f"{reasons[pod]}; " if pod in reasons else ""
            reasons[pod] = f"{got}named by the alert {kind}"
        return sorted(reasons.items())


def unknown_name(view: NodeView) -> str:
    """Return why the requested node or plugin is unknown; empty if it is known.

    It is also empty if a source did not answer, because the names are then unknown.
    """
    if view.state is None or view.events is None or view.plugins or view.changes:
        return ""
    if view.only is not None and view.all_plugins:
        names = sorted({n for p in view.all_plugins for n in (p.watched or p.plugin, *p.resources)})
        near = validation.near(view.only, names)
        name, node = validation.key_name(view.only), validation.key_name(view.node)
        return f"no plugin or resource {name} on node {node}{'; ' if near else ''}{near}"
    if view.alerts and view.only is None:
        return ""
    names = sorted({plugin.node for plugin in view.state.plugins})
    near = _node_of_pod(view) or validation.near(view.node, names)
    name = validation.key_name(view.node)
    # with several fleets on a machine, the wrong one may have answered
    source = f"; according to health at {texts.plain(view.source)}" if view.source else ""
    return f"no plugin and no event from node {name}{'; ' if near else ''}{near}{source}"


def _node_of_pod(view: NodeView) -> str:
    """Return a text with the node of the requested pod, if an alert names that pod; else empty."""
    wanted = view.node.rpartition("/")
    for alert in view.state.alerts if view.state else ():
        for pod in alert.pods:
            namespace, _, name = pod.rpartition("/")
            if name == wanted[2] and wanted[0] in {"", namespace}:
                return texts.plain(f"the pod {pod} is on {alert.node}: muster why {alert.node}")
    return ""


def report(view: NodeView) -> dict[str, object]:
    """Return the node as one object for programs."""
    return {
        "node": view.node,
        "health": view.source,
        "caveats": view.state.caveats() if view.state else None,
        "alerts": view.alerts if view.state else None,
        "silenced": view.silences,
        "plugins": view.plugins if view.state else None,
        "fuse_mounts": view.mounts,
        "pods": [{"pod": pod, "reason": reason} for pod, reason in view.pods],
        "changes": None
        if view.events is None
        else [msgspec.Raw(codec.dump(event)) for event in view.changes],
        "changes_cut": view.is_cut,
    }


def lines(view: NodeView) -> list[str]:
    """Return the node's state as lines for people."""
    text: list[str] = []
    if view.state is not None:
        text.append(f"health    {texts.plain(view.source or '')}")
        text += [f"  note    {note}" for note in view.state.caveats()]
        text += [f"alerts    {_most_urgent(view)}"]
        if not view.plugins:
            text += ["", f"{texts.plain(view.node)}: health tracks no plugin on this node"]
        for alert in view.alerts:
            text += ["", *alert_lines(alert, view=view)]
        for plugin in view.plugins:
            text += ["", *_plugin(plugin, view)]
    if view.mounts:
        text += [
            "",
            "FUSE mounts",
            *(f"  {event_texts.mount_text(mount)}" for mount in view.mounts[:_MOUNTS_MAX]),
        ]
        more = len(view.mounts) - _MOUNTS_MAX
        text += [f"  and {more} more; --json has them all"] if more > 0 else []
    if view.pods:
        text += ["", "pods (some may have ended)"]
        text += [f"  {texts.plain(pod)}: {texts.plain(reason)}" for pod, reason in view.pods]
    if view.events is not None:
        start = "last" if isinstance(texts.since(view.since), timedelta) else "since"
        text += ["", f"latest changes ({start} {texts.plain(view.since)})"]
        text += [
            f"  {status.at(event.time)}  {event_texts.change_text(event)}"
            + (f" ({count} times)" if count > 1 else "")
            for event, count in view.counted_changes
        ]
        text += [] if view.changes else ["  none"]
        text += [_CUT] if view.is_cut else []
    return text[1:] if text[:1] == [""] else text


def _most_urgent(view: NodeView) -> str:
    """Return the most urgent alert with the pods that it names, and the number of all alerts."""
    every = [*view.alerts, *view.plugin_alerts]
    if not every:
        return "0 firing"
    first = min(every, key=lambda alert: (alert.fingerprint in view.silences, alert.urgency))
    silenced = "silenced, " if first.fingerprint in view.silences else ""
    text = f"{len(every)} firing; {silenced}{first.severity}: {first.reason}"
    return texts.plain(text + (f"; {_pods(first)}" if first.pods or first.devices else ""))


def _pods(alert: health_state.Alert) -> str:
    """Return a text that lists the pods named by an alert, or says that none is known."""
    total = max(alert.pods_total, len(alert.pods))
    if not total:
        return "no pod is known to be affected"
    named = alert.pods[:_PODS_MAX]
    more = f" and {total - len(named)} more" if total > len(named) else ""
    return f"used by {', '.join(named)}{more}"


def _plugin(plugin: health_state.Plugin, view: NodeView) -> Iterable[str]:
    now = view.now
    verdict = plugin.verdict or status.UNKNOWN
    rule = f" ({plugin.rule})" if plugin.rule else ""
    since = status.at(plugin.since)
    yield texts.plain(f"{plugin.node} {plugin.name} is {verdict} since {since}{rule}")
    if plugin.watched:
        yield from _observation(plugin)
    else:
        yield f"  heartbeat  {_heartbeat(plugin)}"
    if plugin.is_suspended:
        yield "  suspended  many plugins became silent at the same time: no verdict until this ends"
    if plugin.recovery is not None:
        yield f"  recovering {_recovery(plugin.recovery, now)}"
    dated = _evidence_time(plugin, now)
    for evidence in plugin.evidence:
        past = "past, " if evidence in plugin.past else ""
        yield f"  evidence   {past}{dated}{texts.plain(f'{evidence.source}: {evidence.observed}')}"
    for name in sorted({*plugin.resources, *plugin.devices}):
        # every heartbeat counts the devices of each resource that has any
        if name in plugin.devices or plugin.beat_age_s is None:
            count = usage.of_plugin(plugin, name) if name in plugin.devices else "not reported"
            yield f"  devices    {texts.plain(name)}: {count}"
    for problem in plugin.problems:
        yield f"  problem    {texts.plain(problem)}"
    for device in plugin.unhealthy:
        fault = f"{device.resource} {device.device}: {device.kind}: {device.why}"
        yield f"  faulty     {texts.plain(fault)}"
    for alert in plugin.alerts:
        yield from alert_lines(alert, plugin.evidence, view=view)


def _observation(plugin: health_state.Plugin) -> Iterable[str]:
    """Return the observations of a plugin that muster does not run."""
    by = plugin.agent or "the Kubernetes API alone"
    silent = f"not now, because {by} is silent; the last observation follows"
    observed = f"by {by}" if plugin.is_observed else silent
    socket = f"; socket {plugin.socket}" if plugin.socket else ""
    yield f"  observed   {texts.plain(f'{observed}{socket}')}"
    if plugin.finding not in {"", "none"}:
        yield f"  finding    {texts.plain(f'{plugin.finding}: {plugin.text}'.rstrip(': '))}"
    counts = ((plugin.expected_devices, "expected"), (plugin.allocated, "held by pods"))
    counted = ", ".join(f"{count} {word}" for count, word in counts if count is not None)
    if counted:
        yield f"  counts     {counted}"
    if plugin.process:
        yield f"  process    {texts.plain(plugin.process)}"


def _changed(
    mount: vocabulary.FuseMount, change: vocabulary.FuseMountChanged
) -> vocabulary.FuseMount:
    conditions = {*mount.conditions} - {change.condition}
    if change.holds:
        conditions.add(change.condition)
    return msgspec.structs.replace(mount, conditions=tuple(sorted(conditions)))


def alert_lines(
    alert: health_state.Alert,
    shown: Sequence[health_state.Evidence] = (),
    *,
    view: NodeView | None = None,
) -> Iterable[str]:
    """Return an alert as text; evidence that is already shown is omitted."""
    since = status.at(alert.starts_at)
    text = f"{alert.severity} {alert.kind} since {since}: {alert.summary}"
    yield f"  alert      {texts.plain(text)}"
    silence = view.silences.get(alert.fingerprint) if view else None
    if silence is not None:
        yield f"    silenced   {texts.plain(silence.text())}"
    if alert.recovery is not None:
        yield f"    recovering {_recovery(alert.recovery, view.now if view else None)}"
    past = "past, " if alert.recovery else ""
    for evidence in alert.evidence if alert.evidence != shown else ():
        yield f"    evidence   {past}{texts.plain(f'{evidence.source}: {evidence.observed}')}"
    if alert.pods or alert.devices:
        yield f"    pods       {texts.plain(_pods(alert))}"
    if alert.advice or alert.runbook:
        todo = "; ".join(part for part in (alert.advice, alert.runbook) if part)
        yield f"    what to do {texts.plain(todo)}"


def _recovery(recovery: health_state.Recovery, now: datetime | None) -> str:
    return recovery.text(now).removeprefix("recovering: ")


def _heartbeat(plugin: health_state.Plugin) -> str:
    if plugin.beat_age_s is None:
        expected = "expected, but " if plugin.is_expected else ""
        return f"{expected}none since this health service started"
    skew = ""
    if abs(plugin.clock_skew_s) >= 1:
        side = "behind" if plugin.clock_skew_s > 0 else "ahead of"
        skew = f"; its clock is {abs(plugin.clock_skew_s):.1f} s {side} health's"
    age = f"{plugin.beat_age_s:.1f} s ago, due every {plugin.interval_s:g} s"
    return f"{age}; state {texts.plain(plugin.state)}{skew}"


def _evidence_time(plugin: health_state.Plugin, now: datetime | None) -> str:
    """Return the time of the evidence as text; empty if it is unknown or needs no mention."""
    if now is not None and plugin.evidence_age_s is not None and plugin.verdict != _HEALTHY:
        return f"at {(now - timedelta(seconds=plugin.evidence_age_s)).astimezone():%H:%M:%S}: "
    if plugin.since is None or now is None or plugin.beat_age_s is None:
        return ""
    if plugin.since >= now - timedelta(seconds=plugin.beat_age_s):
        return ""
    return f"at {plugin.since.astimezone():%H:%M:%S}: "
