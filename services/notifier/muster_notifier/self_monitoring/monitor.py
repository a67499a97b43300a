"""Adapter: the alerts that the notifier raises itself, and its ping to an external monitor.

It raises an alert when health is silent and while there are dead letters, and pings a URL, if one
is configured, as long as the notifier works.
"""

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import prometheus_client

from muster import codec, http, vocabulary
from muster.service import logs
from muster_notifier.delivery import dead_letters
from muster_notifier.receivers import endpoint, results
from muster_notifier.self_monitoring import watchdog

PLUGIN = "notifier"
_COUNT_S: Final = 10.0
_DEAD_LETTERS: Final = "notifications could not be delivered: muster dlq list"
_SILENT: Final = "the health service is silent: plugins are not monitored"
_DEAD = prometheus_client.Gauge(
    "muster_notifier_dead_letters", "Notifications that could not be delivered."
)
_PINGS = prometheus_client.Counter(
    "muster_notifier_pings_total", "Pings to the outside watcher, by what they came to.", ["result"]
)


class OwnAlerts:
    """Creates our own alerts, in the same form as those from the bus."""

    def __init__(self, *, instance: str, runbook_url: str) -> None:
        self._instance = instance
        self._runbook_url = runbook_url
        self._count = itertools.count(1)
        self._since: dict[vocabulary.AlertKind, datetime] = {}

    def firing(
        self, kind: vocabulary.AlertKind, *, summary: str, observed: str, at: datetime
    ) -> codec.CloudEvent:
        """Return a firing alert, dated from when it first fired."""
        self._since.setdefault(kind, at)
        return self._event(kind, summary=summary, observed=observed, at=at, ends_at=None)

    def resolved(
        self, kind: vocabulary.AlertKind, *, summary: str, observed: str, at: datetime
    ) -> codec.CloudEvent:
        """Return the resolved alert; after a restart only the ledger knows that it fired."""
        event = self._event(kind, summary=summary, observed=observed, at=at, ends_at=at)
        self._since.pop(kind, None)
        return event

    def _event(
        self,
        kind: vocabulary.AlertKind,
        *,
        summary: str,
        observed: str,
        at: datetime,
        ends_at: datetime | None,
    ) -> codec.CloudEvent:
        number = next(self._count)
        state = vocabulary.AlertState.RESOLVED if ends_at else vocabulary.AlertState.FIRING
        alert = vocabulary.AlertChanged(
            node=vocabulary.FLEET,
            at=at,
            plugin=PLUGIN,
            kind=kind,
            severity=vocabulary.Severity.CRITICAL,
            state=state,
            fingerprint=hashlib.sha256(f"{PLUGIN}|{kind}".encode()).hexdigest()[:16],
            summary=summary,
            starts_at=self._since.get(kind, at),
            ends_at=ends_at,
            evidence=(vocabulary.Evidence(source=PLUGIN, observed=observed),),
            runbook=f"{self._runbook_url}{kind}.md",
        )
        return codec.CloudEvent(
            id=f"{self._instance}:{kind}:{number}",
            source="/services/notifier",
            type=alert.TYPE,
            time=at,
            instance=self._instance,
            sequence=number,
            boot="",
            data=alert,
        )


class Monitor:
    """Raises our own alerts and passes them to `emit`."""

    def __init__(
        self, alerts: OwnAlerts, emit: Callable[[codec.CloudEvent], Awaitable[None]]
    ) -> None:
        self._alerts = alerts
        self._emit = emit

    async def watch_dead_letters(self, subjects: Callable[[], Awaitable[list[str]]]) -> None:
        """Raise an alert while there are dead letters (other than about this alert), forever."""
        kind = vocabulary.AlertKind.DEAD_LETTERS
        while True:
            dead = await subjects()
            _DEAD.set(len(dead))
            count = sum(1 for subject in dead if not dead_letters.is_about_dead(subject))
            at = datetime.now(UTC)
            if count:
                text, observed = _DEAD_LETTERS, f"{count} dead letters"
                event = self._alerts.firing(kind, summary=text, observed=observed, at=at)
            else:
                text, observed = "all notifications are delivered", "no dead letters"
                event = self._alerts.resolved(kind, summary=text, observed=observed, at=at)
            await self._emit(event)
            await asyncio.sleep(_COUNT_S)

    async def on_watchdog(self, output: watchdog.Output) -> None:
        """Raise an alert when health is silent, and resolve it when health ticks again."""
        kind, at = vocabulary.AlertKind.HEALTH_SILENT, datetime.now(UTC)
        match output:
            case watchdog.Silent(seconds=seconds, holder=holder):
                leader = f", the last leader was {holder}" if holder else ""
                observed = f"no watchdog tick for {seconds:.0f} s{leader}"
                event = self._alerts.firing(kind, summary=_SILENT, observed=observed, at=at)
            case watchdog.Recovered(seconds=seconds, holder=holder):
                event = self.health_recovered(f"{holder} ticks again after {seconds:.0f} s")
        await self._emit(event)

    def health_recovered(self, observed: str) -> codec.CloudEvent:
        """Return the resolved alert about health's silence, for those notified of it."""
        return self._alerts.resolved(
            vocabulary.AlertKind.HEALTH_SILENT,
            summary="the health service is back",
            observed=observed,
            at=datetime.now(UTC),
        )


async def ping(to: endpoint.Endpoint, *, interval_s: float, alive: Callable[[], bool]) -> None:
    """Ping a URL every `interval_s` while we work; its service notices when the pings stop."""
    was_taken = True
    while True:
        if alive():
            result = await to.request("GET", read=http.Read.NOTHING)
            if not isinstance(result, results.Result):
                result = results.of_status(result.status, result.headers)
            _PINGS.labels(result.kind).inc()
            is_taken = result.kind is results.Kind.TAKEN
            if was_taken and not is_taken:
                logs.logger().warning("watchdog_ping_failed", where=to.where, error=result.detail)
            was_taken = is_taken
        await asyncio.sleep(interval_s)
