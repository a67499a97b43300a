"""Pure: shows the fleet as the health service sees it, for people and for programs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from muster import matching, vocabulary, wording
from muster.cli import texts
from muster.fleet import health_state, usage

UNKNOWN: Final = "UNKNOWN"
"""Shown for a plugin that has no verdict yet."""

_SHOWN_MAX: Final = 200


def at(time: datetime | None) -> str:
    """Return a time as text in the local time zone; `-` if there is none."""
    return "-" if time is None else f"{time.astimezone():%Y-%m-%d %H:%M:%S}"


Silences = Mapping[str, matching.Silence]
"""The silence of each silenced alert, by fingerprint."""
_NO_SILENCES: Final[Silences] = {}


def summary(
    state: health_state.State, *, source: str, everything: bool, silences: Silences = _NO_SILENCES
) -> dict[str, object]:
    """Return the state as an object for programs; with `everything`, well plugins are included."""
    shown = [plugin for plugin in state.plugins if everything or not plugin.is_well]
    return {
        "health": source,
        "service": state.service,
        "plugins_total": len(state.plugins),
        "nodes_total": len({plugin.node for plugin in state.plugins}),
        "verdicts": dict(_verdicts(state)),
        "suspects": state.fleet.suspects,
        "storms": state.fleet.mass_failures,
        "held": state.fleet.held,
        "alerts": state.alerts,
        "silenced": silences,
        "plugins": sorted(shown, key=_position),
    }


def lines(
    state: health_state.State,
    *,
    source: str,
    everything: bool,
    now: datetime | None = None,
    silences: Silences = _NO_SILENCES,
) -> list[str]:
    """Return the state as lines for people; `now` is when health answered."""
    most = None if everything else _SHOWN_MAX
    shown = sorted((p for p in state.plugins if everything or not p.is_well), key=_position)
    text = _overview(state, source, len(silences))
    if shown:
        names = ("NODE", "PLUGIN", "VERDICT", "SINCE", "DEVICES", "ALERTS")
        text += _table(names, [_row(plugin, now) for plugin in shown], most)
    elif state.plugins and all(p.verdict == vocabulary.Verdict.HEALTHY for p in state.plugins):
        count = len(state.plugins)
        healthy = f"all {count} plugins are" if count > 1 else "the only plugin is"
        text += ["", f"{healthy} HEALTHY; --all lists {'them' if count > 1 else 'it'}"]
    reported = [(p.node, p.name, problem) for p in shown for problem in p.problems]
    if reported:
        text += _table(("NODE", "PLUGIN", "PROBLEM"), reported, most)
    if state.alerts:
        loud_first = sorted(state.alerts, key=lambda alert: alert.fingerprint in silences)
        alerts = [
            (at(a.starts_at), a.severity, a.kind, _said(a, now, silences.get(a.fingerprint)))
            for a in loud_first
        ]
        text += _table(("FIRING SINCE", "SEVERITY", "KIND", "SUMMARY"), alerts, most)
    return text


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], most: int | None) -> list[str]:
    """Return an empty line and at most `most` aligned rows, then the number of omitted rows."""
    left = len(rows) - len(rows[:most])
    more = [f"and {left} more; --all shows them"] if left else []
    return ["", *texts.aligned([names, *rows[:most]]), *more]


def _overview(state: health_state.State, source: str, silenced: int) -> list[str]:
    nodes = wording.counted(len({plugin.node for plugin in state.plugins}), "node")
    counted = ", ".join(f"{count} {verdict}" for verdict, count in _verdicts(state)) or "none"
    fleet = state.fleet
    held = (
        f"; the rate limit holds back alerts about {wording.counted(fleet.held, 'plugin')}"
        if fleet.held
        else ""
    )
    failures = wording.counted(fleet.mass_failures, "mass failure")
    return [
        f"health    {texts.plain(source)}",
        *(f"  note    {note}" for note in state.caveats()),
        f"plugins   {len(state.plugins)} on {nodes}: {counted}",
        f"suspects  {fleet.suspects} silent, {failures}",
        f"alerts    {len(state.alerts)} firing{f', {silenced} silenced' if silenced else ''}{held}",
    ]


def _verdicts(state: health_state.State) -> list[tuple[str, int]]:
    names = sorted(texts.plain(plugin.verdict or UNKNOWN) for plugin in state.plugins)
    return Counter(names).most_common()


def _said(alert: health_state.Alert, now: datetime | None, silence: matching.Silence | None) -> str:
    """Return an alert's summary, preceded by notes that it is silenced or recovering."""
    quiet = f"[silenced {silence.text()}] " if silence else ""
    recovering = f"[{alert.recovery.text(now)}] " if alert.recovery else ""
    return f"{quiet}{recovering}{alert.summary}"


def _row(plugin: health_state.Plugin, now: datetime | None) -> tuple[str, str, str, str, str, str]:
    devices = ", ".join(
        f"{name} {usage.of_plugin(plugin, name)}" for name in sorted(plugin.devices)
    )
    if plugin.mounts:
        counted = f"{plugin.mounts} FUSE mount{'s' if plugin.mounts > 1 else ''}"
        devices = f"{devices}, {counted}" if devices else counted
    faulty = f"; {len(plugin.unhealthy)} faulty" if plugin.unhealthy else ""
    verdict = f"{plugin.verdict or UNKNOWN}{' (suspended)' if plugin.is_suspended else ''}"
    verdict += "" if plugin.is_observed else " (not observed)"
    verdict += f" ({plugin.recovery.text(now)})" if plugin.recovery else ""
    kinds = ", ".join(sorted({alert.kind for alert in plugin.alerts})) or "-"
    devices = f"{devices or '-'}{faulty}"
    return (plugin.node, plugin.name, verdict, at(plugin.since), devices, kinds)


def _position(plugin: health_state.Plugin) -> tuple[bool, str, str]:
    return (plugin.is_well, plugin.node, plugin.plugin)
