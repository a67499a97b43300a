"""Pure: what mutes an alert now: inhibition, silences, maintenance, mute times.

Inhibition: an alert that fires mutes others that only follow from it. A rule has matchers for the
source, matchers for the target, and labels in which both must be equal; a label that neither has is
equal. An alert that is on both sides of a rule is not inhibited by another that is on both sides,
and so never by itself (prometheus/alertmanager inhibit/inhibit.go).
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from muster import matchers as matching
from muster import silences, vocabulary
from muster_notifier.routing import intervals, routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule."""

    name: str
    source: tuple[matching.Matcher, ...]
    target: tuple[matching.Matcher, ...]
    equal: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inhibited:
    """By which alert that fires, and which rule."""

    fingerprint: str
    rule: str


class Inhibition:
    """Knows the alerts that fire and are the source of a rule."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        # for each rule: values of its equal labels -> fingerprint -> whether it is a target as well
        self._sources: list[dict[tuple[str, ...], dict[str, bool]]] = [{} for _ in rules]
        self._known: dict[str, Mapping[str, str]] = {}

    def fires(self, fingerprint: str, labels: Mapping[str, str]) -> None:
        """Take an alert that fires, or fires with other labels than before."""
        if self._known.get(fingerprint) == labels:
            return
        self.ends(fingerprint)
        is_source = False
        for rule, sources in zip(self._rules, self._sources, strict=True):
            if matching.all_hold(rule.source, labels):
                is_target = matching.all_hold(rule.target, labels)
                sources.setdefault(_values(rule, labels), {})[fingerprint] = is_target
                is_source = True
        if is_source:
            self._known[fingerprint] = labels

    def ends(self, fingerprint: str) -> None:
        """Forget an alert that fires no more."""
        labels = self._known.pop(fingerprint, None)
        if labels is None:
            return
        for rule, sources in zip(self._rules, self._sources, strict=True):
            values = _values(rule, labels)
            held = sources.get(values, {})
            held.pop(fingerprint, None)
            if not held:
                sources.pop(values, None)

    def inhibits(self, labels: Mapping[str, str]) -> Inhibited | None:
        """Return what keeps an alert with these labels quiet, if anything does."""
        for rule, sources in zip(self._rules, self._sources, strict=True):
            if not matching.all_hold(rule.target, labels):
                continue
            is_source = matching.all_hold(rule.source, labels)
            for fingerprint, is_target in sources.get(_values(rule, labels), {}).items():
                if not (is_source and is_target):
                    return Inhibited(fingerprint, rule.name)
        return None


def _values(rule: Rule, labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in rule.equal)


class Cause(enum.StrEnum):
    """Why an alert, or a whole group, is not told now."""

    INHIBITED = "inhibited"
    SILENCED = "silenced"
    MAINTENANCE = "maintenance"
    MUTE_TIME = "mute_time"
    NOT_ACTIVE_TIME = "not_active_time"


_MATCHING_MAX: Final = 20_000

BY_PEOPLE: Final = frozenset({Cause.SILENCED, Cause.MAINTENANCE})
"""Somebody knows, and works on it."""


class Muted(msgspec.Struct, frozen=True):
    """Why, and by what: a fingerprint and a rule, a silence, a plugin, a time interval."""

    cause: Cause
    by: str


@dataclass(frozen=True, slots=True)
class SilenceChanged:
    """A silence is new, is another, or is gone."""

    id: str
    silence: silences.Silence | None


class Muting:
    """Everything that can mute; see the module."""

    def __init__(
        self,
        rules: Sequence[Rule],
        times: Mapping[str, Sequence[intervals.Interval]],
    ) -> None:
        """Start without silences; `times` are the time intervals that routes name."""
        self._inhibition = Inhibition(rules)
        self._times = dict(times)
        self._silences: dict[str, tuple[silences.Silence, tuple[matching.Matcher, ...]]] = {}
        self._matching: dict[tuple[tuple[str, str], ...], Sequence[silences.Silence]] = {}
        self._maintained: set[tuple[str, str]] = set()

    def hear_alert(self, alert: vocabulary.AlertChanged, labels: Mapping[str, str]) -> None:
        """Take an alert: what fires may inhibit others."""
        if alert.state is vocabulary.AlertState.FIRING:
            self._inhibition.fires(alert.fingerprint, labels)
        else:
            self._inhibition.ends(alert.fingerprint)

    def hear_verdict(self, verdict: vocabulary.VerdictChanged) -> None:
        """Take a verdict: planned work on a plugin silences it by itself."""
        who = verdict.node, verdict.plugin
        if verdict.verdict is vocabulary.Verdict.MAINTENANCE:
            self._maintained.add(who)
        else:
            self._maintained.discard(who)

    def hear_silence(self, change: SilenceChanged) -> None:
        """Take a silence."""
        self._matching.clear()
        if change.silence is None:
            self._silences.pop(change.id, None)
        else:
            parsed = matching.parse_all(change.silence.matchers)
            self._silences[change.id] = (change.silence, parsed)

    def mutes(self, labels: Mapping[str, str], at: datetime) -> Muted | None:
        """Return what keeps an alert quiet at this time."""
        inhibited = self._inhibition.inhibits(labels)
        if inhibited is not None:
            return Muted(Cause.INHIBITED, f"{inhibited.fingerprint} by {inhibited.rule}")
        for silence in self._about(labels):
            if silence.is_active(at):
                return Muted(Cause.SILENCED, silence.id)
        who = labels.get("node", ""), labels.get("plugin", "")
        overdue = labels.get("kind") == vocabulary.AlertKind.MAINTENANCE_OVERDUE
        if who in self._maintained and not overdue:
            return Muted(Cause.MAINTENANCE, f"{who[1]} on {who[0]}")
        return None

    def mutes_route(self, route: routes.Route, at: datetime) -> Muted | None:
        """Return what keeps a whole route quiet at this time."""
        for name in route.mute_times:
            if self._contains(name, at):
                return Muted(Cause.MUTE_TIME, name)
        if route.active_times and not any(self._contains(n, at) for n in route.active_times):
            return Muted(Cause.NOT_ACTIVE_TIME, ", ".join(route.active_times))
        return None

    def active(self, at: datetime) -> list[silences.Silence]:
        """Return the silences of this time."""
        return [silence for silence, _ in self._silences.values() if silence.is_active(at)]

    def _about(self, labels: Mapping[str, str]) -> Sequence[silences.Silence]:
        """Return the silences that match, whenever they last; the same labels come often."""
        key = tuple(sorted(labels.items()))
        found = self._matching.get(key)
        if found is None:
            if len(self._matching) >= _MATCHING_MAX:
                self._matching.clear()
            found = tuple(
                silence
                for silence, matchers in self._silences.values()
                if matching.all_hold(matchers, labels)
            )
            self._matching[key] = found
        return found

    def _contains(self, name: str, at: datetime) -> bool:
        return any(one.contains(at) for one in self._times[name])
