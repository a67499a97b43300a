"""Pure: tracks the alerts about the whole fleet, such as those about mass failures.

Alerts about noisy nodes are among them, although each names a node: a node can be noisy without any
tracked plugin.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from muster import vocabulary, wording
from muster.vocabulary import AlertKind
from muster_health.alerting import alert_lifecycle, evidence
from muster_health.fleet import mass_failure, noisy_nodes, suspension
from muster_health.model import alerts, config, signals, snapshot
from muster_health.plugin import liveness

PLUGIN: Final = "health"
"""The plugin name in events about the whole fleet."""
KEY: Final = f"{vocabulary.FLEET}.{PLUGIN}"
"""The key under which the fleet's state is saved."""

_URGENCY: Final = tuple(vocabulary.Severity)
_SHOWN_MAX: Final = 16
_CAUSES_MAX: Final = 4
_EVENTS_MAX: Final = 64
_EVENT_S: Final = 120.0


class FleetAlerts:
    """The alerts of the fleet, and the last processed position in the stream of events."""

    def __init__(self, context: config.Context) -> None:
        self.position = 0
        self.lifecycle = alert_lifecycle.AlertLifecycle(context.settings, context.bounds)
        self._context = context
        self.held: dict[str, tuple[int, str]] = {}
        self.clock_skew = ""
        """How the clocks of most nodes differ from ours, as evidence."""
        self.noisy = noisy_nodes.NoisyNodes()
        self.evictions: tuple[str, ...] = ()
        """Which streams remove messages too early, as evidence."""
        self._servers: dict[str, tuple[str, float]] = {}
        self._ended: tuple[vocabulary.Evidence, ...] = ()
        self._stored = 0
        self._keep_until = 0.0

    def restore(self, before: snapshot.Snapshot, keep_until: float) -> None:
        """Restore the position and the alerts, which stay open at least until `keep_until`."""
        self._keep_until = keep_until
        self.lifecycle.load(before.firing, before.unpublished_alerts)
        self.position = max(self.position, before.position)
        self._stored = before.position

    def server(self, name: str, what: str, now: float) -> None:
        """Record an event of a NATS server."""
        name = liveness.short_server(name)
        self._servers.pop(name, None)
        self._servers[name] = (what, now)
        while len(self._servers) > _EVENTS_MAX:
            del self._servers[next(iter(self._servers))]

    def hold(self, key: str, held: Iterable[alerts.Alert]) -> bool:
        """Record a plugin's delayed alerts; return whether it began or ceased to have any."""
        waiting = sorted((_URGENCY.index(alert.severity), alert.summary) for alert in held)
        if not waiting:
            return self.held.pop(key, None) is not None
        is_news = key not in self.held
        self.held[key] = waiting[0]
        return is_news

    def held_keys(self) -> list[str]:
        """Return the keys of plugins with delayed alerts: most urgent first, then oldest first."""
        return sorted(self.held, key=lambda key: self.held[key][0])

    def ended(self, over: mass_failure.Ended, now: float) -> None:
        """Record that a mass failure is over."""
        failure = over.failure
        back = failure.peak - len(over.left)
        seconds = now - failure.began_at
        text = (
            f"{back} of {failure.peak} plugins had recovered or had a verdict after {seconds:.0f} s"
        )
        left = f"; the other {len(over.left)} are now diagnosed one by one" if over.left else ""
        self._ended = (evidence.of("health", text + left),)

    def commit(
        self, failures: mass_failure.SuspectCounts, plugins: int, now: float, at: datetime
    ) -> tuple[list[signals.Output], float | None]:
        """Return the outputs for all changes, in order, and when to evaluate again."""
        quiet_at = self.noisy.expire(now)
        leader = self._context.leader
        if leader is None:
            return [], quiet_at
        wanted = {alert.key: alert for alert in self.lifecycle.published.values()}
        if now >= self._keep_until:
            wanted.clear()
        now_wanted = [
            *self._mass_failure(failures, plugins, now, at),
            *self._more(at),
            *self._clock(at),
            *self._evictions(at),
            *self.noisy.alerts(at),
        ]
        wanted |= {alert.key: alert for alert in now_wanted}
        due, _ = self.lifecycle.follow(
            wanted.values(), now=now, at=at, may_open=lambda _: True, why_ended=self._why_ended
        )
        dues = [each for each in (due, quiet_at) if each is not None]
        due = min(dues, default=None)
        events: list[signals.Publish] = []
        for alert in self.lifecycle.pending:
            event = self._event(alert)
            events.append(signals.Publish(event=event, event_id=alerts.event_id(event)))
        if not events:
            return [], due
        before = self.store(leader)
        self.lifecycle.pending = ()
        return [before, *events, self.store(leader)], due

    def has_moved(self) -> bool:
        """Return whether events after the saved position have been processed."""
        return self.position > self._stored

    def store(self, leader: int) -> signals.Store:
        """Return the output that saves the fleet's state."""
        self._stored = self.position
        stored = snapshot.Snapshot(
            node=vocabulary.FLEET,
            plugin=PLUGIN,
            state=snapshot.State.UNKNOWN,
            interval_s=0.0,
            position=self.position,
            firing=tuple(self.lifecycle.published.values()),
            unpublished_alerts=self.lifecycle.pending,
            leader=leader,
        )
        return signals.Store(key=KEY, value=snapshot.encode(stored))

    def view(self) -> tuple[vocabulary.AlertChanged, ...]:
        """Return the open alerts."""
        return tuple(map(self._event, self.lifecycle.published.values()))

    def _event(self, alert: alerts.Alert) -> vocabulary.AlertChanged:
        return alerts.changed(
            alert,
            node=vocabulary.FLEET,
            plugin=PLUGIN,
            runbook_url=self._context.runbook_url,
            leader=self._context.leader or 0,
        )

    def _mass_failure(
        self, failures: mass_failure.SuspectCounts, plugins: int, now: float, at: datetime
    ) -> Iterable[alerts.Alert]:
        if not failures.active:
            return
        running = sorted(failures.active.values(), key=lambda each: (-each.peak, each.cause))
        peak = sum(failure.peak for failure in running)
        causes = [self._words(failure.cause, now) for failure in running]
        common = ", ".join(list(dict.fromkeys(causes))[:_CAUSES_MAX])
        manners = " or ".join(dict.fromkeys(failure.manner.value for failure in running))
        summary = f"{peak} of {plugins} plugins {manners} at the same time; in common: {common}"
        most_s = suspension.most_s(self._context.settings)
        text = (
            f"{peak} plugins were suspected; each verdict is suspended until the mass failure ends "
            f"or the plugin's pod or node is gone, for at most {most_s:g} s; then the plugins are "
            "diagnosed in turn"
        )
        yield alerts.Alert(
            kind=AlertKind.STORM,
            summary=summary,
            evidence=(
                evidence.of("health", text),
                evidence.of("health", mass_failure.suspicions_by_node(running)),
                evidence.of("bus", f"in common: {common}"),
            ),
            starts_at=at,
            changed_at=at,
        )

    def _words(self, cause: str, now: float) -> str:
        if not cause:
            return "nothing known"
        what, happened_at = self._servers.get(cause.removeprefix("server="), ("", 0.0))
        if what and now - happened_at < _EVENT_S:
            return f"{cause} ({what})"
        return cause

    def _more(self, at: datetime) -> Iterable[alerts.Alert]:
        if not self.held:
            return
        shown = [self.held[key][1] for key in self.held_keys()[:_SHOWN_MAX]]
        plugins = wording.counted(len(self.held), "more plugin")
        verb = "has" if len(self.held) == 1 else "have"
        yield alerts.Alert(
            kind=AlertKind.MORE_ALERTS,
            summary=f"{plugins} {verb} alerts, which the rate limit delays",
            evidence=tuple(evidence.of("health", text) for text in shown),
            starts_at=at,
            changed_at=at,
        )

    def _clock(self, at: datetime) -> Iterable[alerts.Alert]:
        if not self.clock_skew:
            return
        yield alerts.Alert(
            kind=AlertKind.CLOCK_SKEW,
            summary="the clock of health's node is probably wrong: most others differ from it",
            evidence=(evidence.of("heartbeat", self.clock_skew),),
            starts_at=at,
            changed_at=at,
        )

    def _evictions(self, at: datetime) -> Iterable[alerts.Alert]:
        if not self.evictions:
            return
        yield alerts.Alert(
            kind=AlertKind.EVICTIONS,
            summary="a full stream removes messages before all consumers have read them",
            evidence=tuple(evidence.of("bus", text) for text in self.evictions),
            starts_at=at,
            changed_at=at,
        )

    def _why_ended(self, key: alerts.Key) -> tuple[vocabulary.Evidence, ...]:
        if key[0] == AlertKind.STORM and self._ended:
            return self._ended
        if key[0] == AlertKind.EVICTIONS:
            return (evidence.of("bus", "every stream retains its messages long enough"),)
        if key[0] == AlertKind.CLOCK_SKEW:
            return (evidence.of("heartbeat", "the clocks of most nodes agree with health's"),)
        if key[0] == AlertKind.NOISY_NODE:
            return noisy_nodes.why_ended()
        return (evidence.of("health", "no alert is held back, and there is no mass failure"),)
