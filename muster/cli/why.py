"""Pure: What is known about one node: what health says of it now, and what happened there last."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster.cli import status
from muster.service import validation

_CHANGES_MAX: Final = 30
_LINE_MAX: Final = 400
_HEARD_MAX: Final = 10_000
"""As many as `muster.events` brings into order; what comes after them is not heard."""
_CUT: Final = "  and later ones: too many; give a later --since"
_PERIODIC: Final = (vocabulary.InventoryReported, vocabulary.WatchdogTicked)
"""Repeated on a period, whether anything changed or not."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What was found about a node; None where nobody answered. `heard` is in order of time."""

    node: str
    source: str | None
    """Where health is."""
    state: status.State | None
    heard: Sequence[codec.CloudEvent] | None
    since: str
    """From when on was heard, as it was asked for."""

    @property
    def plugins(self) -> list[status.Plugin]:
        """Return its plugins."""
        all_of_them = self.state.plugins if self.state else ()
        return sorted((p for p in all_of_them if p.node == self.node), key=lambda p: p.plugin)

    @property
    def changes(self) -> list[codec.CloudEvent]:
        """Return the last changes, the newest last."""
        told = [one for one in self.heard or () if not isinstance(one.data, _PERIODIC)]
        return told[-_CHANGES_MAX:]

    @property
    def is_cut(self) -> bool:
        """Tell whether more has happened than was heard, and later."""
        return len(self.heard or ()) >= _HEARD_MAX

    @property
    def pods(self) -> list[tuple[str, str]]:
        """Return the pods that are told of on this node, each with what is told."""
        found: dict[str, str] = {}
        for one in self.heard or ():
            if isinstance(one.data, vocabulary.AllocationObserved) and one.data.pod:
                given = ", ".join(one.data.device_ids)
                told = f"was given {one.data.resource} {given} at {status.at(one.time)}"
                found[one.data.pod] = told
        for plugin in self.plugins:
            for alert in plugin.alerts:
                found.update((pod, f"named by the alert {alert.kind}") for pod in alert.pods)
        return sorted(found.items())


def stranger(known: Known) -> str:
    """Say that nobody has heard of this node; empty if somebody has, or if not all answered."""
    if known.state is None or known.heard is None or known.plugins or known.changes:
        return ""
    names = sorted({plugin.node for plugin in known.state.plugins})
    near = validation.near(known.node, names)
    return f"nothing is known of node {validation.key_name(known.node)}{'; ' if near else ''}{near}"


def report(known: Known) -> dict[str, object]:
    """Return it as one object for programs."""
    return {
        "node": known.node,
        "health": known.source,
        "caveats": status.caveats(known.state) if known.state else None,
        "plugins": known.plugins if known.state else None,
        "pods": [{"pod": pod, "told": told} for pod, told in known.pods],
        "changes": None
        if known.heard is None
        else [msgspec.Raw(codec.dump(one)) for one in known.changes],
        "changes_cut": known.is_cut,
    }


def lines(known: Known) -> list[str]:
    """Return it for people."""
    found: list[str] = []
    if known.state is not None:
        found.append(f"health   {status.plain(known.source or '')}")
        found += [f"  note   {one}" for one in status.caveats(known.state)]
        if not known.plugins:
            found += ["", f"{status.plain(known.node)}: health knows no plugin here now"]
        for plugin in known.plugins:
            found += ["", *_plugin(plugin)]
    if known.pods:
        found += ["", "pods that are told of (some may have ended)"]
        found += [f"  {status.plain(pod)}: {status.plain(told)}" for pod, told in known.pods]
    if known.heard is not None:
        found += ["", f"last changes (since {status.plain(known.since)})"]
        found += [f"  {status.at(one.time)}  {_change(one)}" for one in known.changes]
        found += [] if known.changes else ["  none"]
        found += [_CUT] if known.is_cut else []
    return found[1:] if found[:1] == [""] else found


def _plugin(one: status.Plugin) -> Iterable[str]:
    verdict = one.verdict or status.UNKNOWN
    rule = f" ({one.rule})" if one.rule else ""
    yield status.plain(f"{one.node} {one.plugin} is {verdict} since {status.at(one.since)}{rule}")
    yield f"  heard      {_heard(one)}"
    if one.frozen:
        yield "  in a storm: many fell silent at once, and it is not judged before that is over"
    for seen in one.evidence:
        yield f"  evidence   {status.plain(f'{seen.source}: {seen.observed}')}"
    for name in sorted({*one.resources, *one.devices}):
        yield f"  devices    {status.plain(name)}: {one.devices.get(name, 'not told')}"
    for problem in one.problems:
        yield f"  problem    {status.plain(problem)}"
    for bad in one.unhealthy:
        yield f"  wrong      {status.plain(f'{bad.resource} {bad.device}: {bad.kind}: {bad.why}')}"
    for alert in one.alerts:
        told = f"{alert.severity} {alert.kind} since {status.at(alert.starts_at)}: {alert.summary}"
        yield f"  alert      {status.plain(told)}"
        for seen in alert.evidence if alert.evidence != one.evidence else ():
            yield f"    evidence   {status.plain(f'{seen.source}: {seen.observed}')}"
        if alert.pods_total > len(alert.pods):
            yield f"    pods       {alert.pods_total}; the first {len(alert.pods)} are named below"
        if alert.advice or alert.runbook:
            todo = "; ".join(part for part in (alert.advice, alert.runbook) if part)
            yield f"    what to do {status.plain(todo)}"


def _heard(one: status.Plugin) -> str:
    if one.beat_age_s is None:
        expected = "expected, and " if one.expected else ""
        return f"{expected}not since this health service started"
    skew = ""
    if abs(one.clock_skew_s) >= 1:
        side = "behind" if one.clock_skew_s > 0 else "ahead of"
        skew = f"; its clock is {abs(one.clock_skew_s):.1f} s {side} health's"
    beats = f"{one.beat_age_s:.1f} s ago; a heartbeat is due every {one.interval_s:g} s"
    return f"{beats}; state {status.plain(one.state)}{skew}"


def _change(one: codec.CloudEvent) -> str:
    match one.data:
        case vocabulary.VerdictChanged() as told:
            before = f"{told.previous} -> " if told.previous else ""
            why = "; ".join(f"{seen.source}: {seen.observed}" for seen in told.evidence)
            text = f"verdict {told.plugin}: {before}{told.verdict} ({told.rule}) {why}"
        case vocabulary.AlertChanged() as told:
            text = f"alert {told.state} {told.severity} {told.kind}: {told.summary}"
        case vocabulary.RemediationDecided() as told:
            text = f"restart {told.outcome} {told.pod}: {told.reason}"
        case vocabulary.DeviceAdded(device=device):
            reason = f" {device.reason}" if device.reason else ""
            text = f"{one.type} {device.resource} {device.id}: {device.health}{reason}"
        case _:
            # without the time and the node, which stand beside and above it
            text = str(one).split(" ", 2)[2]
    text = status.plain(text.rstrip())
    return text if len(text) <= _LINE_MAX else f"{text[: _LINE_MAX - 3]}..."
