"""Adapter: raises the notifier's own alerts, and announces its receivers on the bus.

Alerts are raised while health is silent and while there are dead letters. If a ping URL is
configured, it is requested periodically while the notifier works, and an external monitor can
report missing pings.

The watchdog checks that health sends ticks, because without health, plugins are not monitored.

| state    | input                               | next      | output    |
|----------|-------------------------------------|-----------|-----------|
| waiting  | tick                                | ticking   |           |
| waiting  | `patience_s` after NATS connected   | silent    | Silent    |
| ticking  | tick                                | ticking   |           |
| ticking  | 2.5 intervals without a tick        | silent    | Silent    |
| silent   | tick                                | ticking   | Recovered |
| any      | connection lost                     | unchanged, and the deadline stops |
| any      | connection restored                 | unchanged, and the deadline restarts |
| any      | the notifier stalled                | unchanged, and the deadline restarts |

A tick from an earlier term than the newest is ignored. An earlier term is accepted again once the
newest leader has been silent for a whole deadline (if the lock's bucket was lost, terms restart at
1), and from the first tick after the connection was restored (NATS may have lost its data).
"""

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import prometheus_client

from muster import codec, http, vocabulary, wording
from muster.service import logs, metrics
from muster_notifier.config import receiver_settings
from muster_notifier.delivery import dead_letters
from muster_notifier.receivers import endpoint, results
from muster_notifier.routing import notifications

PLUGIN = "notifier"
_COUNT_S: Final = 10.0
_ANNOUNCE_S: Final = 60.0
_NAMES_MAX: Final = 64
_DEAD_LETTERS: Final = "notifications could not be delivered"
ADVICE: Final = {
    vocabulary.AlertKind.DEAD_LETTERS: (
        "`muster dlq list` shows why; when the receiver works again, `muster dlq replay all` sends "
        "the notifications"
    ),
    vocabulary.AlertKind.HEALTH_SILENT: (
        "run `muster doctor`, then read the logs of the muster-health pods; delete a pod that hangs"
    ),
}
"""What to do first about the notifier's own alerts."""
_SILENT: Final = "the health service is silent: plugins are not monitored"
_DEAD = prometheus_client.Gauge(
    "muster_notifier_dead_letters", "Notifications that could not be delivered."
)
_RECEIVERS = prometheus_client.Gauge(
    "muster_notifier_receivers", "Configured receivers, by kind.", ["kind"]
)
_REFUSED = prometheus_client.Gauge(
    "muster_notifier_refused_receivers",
    "Receivers in receivers_directory that are left out, because they cannot be used.",
)
_PINGS = metrics.counter(
    "muster_notifier_pings_total",
    "Pings to the external monitor, by result.",
    "result",
    results.Kind,
)


_INTERVALS: Final = 2.5
_LATE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class BusLost:
    """Our connection to NATS is down, so missing ticks do not show that health is silent."""


@dataclass(frozen=True, slots=True)
class BusRestored:
    """Our connection to NATS is up, for the first time or again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """No watchdog tick arrived for `seconds`; `holder` sent the last one, empty if none did."""

    seconds: float
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Health sends ticks again, after `seconds` of silence; `holder` sent the first one."""

    seconds: float
    holder: str


Input = vocabulary.WatchdogTicked | BusLost | BusRestored
Output = Silent | Recovered


class Watchdog:
    """Watches health's ticks; the first must come within `patience_s` after NATS is connected."""

    def __init__(self, *, patience_s: float) -> None:
        self.term = 0
        """The newest leader's term; 0 before the first tick."""
        self.is_silent = False
        self._wait_s = patience_s
        self._holder = ""
        self._is_certain = False
        self._ticked_at: float | None = None
        self._began_at: float | None = None
        self._deadline: float | None = None

    def receive(self, event: Input, now: float) -> Sequence[Output]:
        """Process a tick or a change of our connection."""
        match event:
            case BusLost():
                self._deadline = None
                return ()
            case BusRestored():
                self._is_certain = False
                if self._began_at is None:
                    self._began_at = now
                self._wait(now)
                return ()
            case vocabulary.WatchdogTicked():
                return self._tick(event, now)

    def tick(self, now: float) -> Sequence[Output]:
        """Report silence at the deadline; if this process itself stalled, restart the deadline."""
        if self._deadline is None or now < self._deadline:
            return ()
        if now > self._deadline + _LATE_S:
            self._wait(now)
            return ()
        self._deadline = None
        if self.is_silent:
            return ()
        self.is_silent = True
        return (Silent(seconds=self._silence_s(now), holder=self._holder),)

    def next_deadline(self) -> float | None:
        """Return the time at which health counts as silent; None if no deadline runs."""
        return self._deadline

    def is_stale(self, term: int) -> bool:
        """Return whether `term` is certainly the term of a former leader of health."""
        return term < self.term and not self.is_silent and self._is_certain

    def _tick(self, event: vocabulary.WatchdogTicked, now: float) -> Sequence[Output]:
        if self.is_stale(event.leader):
            return ()
        silence_s = self._silence_s(now)
        self._is_certain = True
        self.term, self._holder, self._ticked_at = event.leader, event.holder, now
        self._wait_s = _INTERVALS * event.interval_s
        self._wait(now)
        if not self.is_silent:
            return ()
        self.is_silent = False
        return (Recovered(seconds=silence_s, holder=self._holder),)

    def _wait(self, now: float) -> None:
        self._deadline = now + self._wait_s

    def _silence_s(self, now: float) -> float:
        since = self._ticked_at if self._ticked_at is not None else self._began_at
        return 0.0 if since is None else now - since


class OwnAlerts:
    """Raises the notifier's own alerts; passes them to `emit` as events like those on the bus."""

    def __init__(
        self,
        emit: Callable[[codec.CloudEvent], Awaitable[None]],
        *,
        instance: str,
        runbook_url: str,
    ) -> None:
        self._emit = emit
        self._instance = instance
        self._runbook_url = runbook_url
        self._count = itertools.count(1)
        self._since: dict[vocabulary.AlertKind, datetime] = {}
        self._last: dict[vocabulary.AlertKind, vocabulary.AlertChanged] = {}
        self._changed = asyncio.Event()

    @property
    def firing(self) -> tuple[vocabulary.AlertChanged, ...]:
        """The notifier's own alerts that fire now."""
        alerts = self._last.values()
        return tuple(each for each in alerts if each.state is vocabulary.AlertState.FIRING)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until an alert begins, changes or ends, but not longer than the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()

    def restore(self, entries: Iterable[notifications.LedgerEntry]) -> None:
        """Restore the start times of the alerts about which an earlier process notified people."""
        for entry in sorted(entries, key=lambda entry: entry.at):
            for kind in ADVICE:
                if entry.firing == (_fingerprint(kind),) and entry.starts_at is not None:
                    self._since[kind] = entry.starts_at

    async def watch_dead_letters(self, subjects: Callable[[], Awaitable[list[str]]]) -> None:
        """Check for dead letters periodically, forever; raise an alert while there are any."""
        while True:
            await self.count_dead_letters(await subjects(), at=datetime.now(UTC))
            await asyncio.sleep(_COUNT_S)

    async def count_dead_letters(self, dead: Sequence[str], *, at: datetime) -> None:
        """Raise or resolve the alert about dead letters; ignore dead letters about this alert."""
        _DEAD.set(len(dead))
        about_this = sum(map(dead_letters.is_about_dead, dead))
        count = len(dead) - about_this
        summary = _DEAD_LETTERS if count else "all notifications are delivered"
        observed = wording.counted(count, "dead letter") if count else "no dead letters"
        observed += f", and {about_this} about this alert" if count and about_this else ""
        kind = vocabulary.AlertKind.DEAD_LETTERS
        await self._report(kind, summary, observed, fires=count > 0, at=at)

    async def on_watchdog(self, output: Output) -> None:
        """Raise an alert when health is silent, and resolve it when health sends ticks again."""
        match output:
            case Silent(seconds=seconds, holder=holder):
                leader = f"; the last leader was {holder}" if holder else ""
                observed = f"no watchdog tick for {seconds:.0f} s{leader}"
                kind = vocabulary.AlertKind.HEALTH_SILENT
                await self._report(kind, _SILENT, observed, fires=True, at=datetime.now(UTC))
            case Recovered(seconds=seconds, holder=holder):
                await self.health_recovered(
                    f"{holder} sends watchdog ticks again after {seconds:.0f} s"
                )

    async def health_recovered(self, observed: str) -> None:
        """Resolve the alert about health's silence, even if an earlier process raised it."""
        kind = vocabulary.AlertKind.HEALTH_SILENT
        await self._report(
            kind, "the health service is back", observed, fires=False, at=datetime.now(UTC)
        )

    async def _report(
        self,
        kind: vocabulary.AlertKind,
        summary: str,
        observed: str,
        *,
        fires: bool,
        at: datetime,
    ) -> None:
        """Emit an alert if it has changed; emit its end only once."""
        event = self.alert(kind, summary, observed, fires=fires, at=at)
        assert isinstance(event.data, vocabulary.AlertChanged), "`alert` returns only these events"
        last = self._last.get(kind)
        if last is not None and last.state is event.data.state:
            is_news = fires and last.evidence != event.data.evidence
            if not is_news:
                return
        self._last[kind] = event.data
        self._changed.set()
        await self._emit(event)

    def alert(
        self,
        kind: vocabulary.AlertKind,
        summary: str,
        observed: str,
        *,
        fires: bool,
        at: datetime,
    ) -> codec.CloudEvent:
        """Return an event with an alert; the alert's start is when it began to fire."""
        since = self._since.setdefault(kind, at) if fires else self._since.pop(kind, at)
        number = next(self._count)
        alert = vocabulary.AlertChanged(
            node=vocabulary.FLEET,
            at=at,
            plugin=PLUGIN,
            kind=kind,
            severity=vocabulary.Severity.CRITICAL,
            state=vocabulary.AlertState.FIRING if fires else vocabulary.AlertState.RESOLVED,
            fingerprint=_fingerprint(kind),
            summary=summary,
            starts_at=since,
            ends_at=None if fires else at,
            evidence=(vocabulary.Evidence(source=PLUGIN, observed=observed),),
            advice=ADVICE.get(kind, ""),
            runbook=f"{self._runbook_url}{kind}.html",
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


def _fingerprint(kind: vocabulary.AlertKind) -> str:
    return hashlib.sha256(f"{PLUGIN}|{kind}".encode()).hexdigest()[:16]


def count_receivers(kinds: Mapping[str, str]) -> None:
    """Count and log the receivers; warn if none reaches a person. `kinds` maps names to kinds."""
    for kind in receiver_settings.WAYS:
        _RECEIVERS.labels(kind).set(sum(1 for each in kinds.values() if each == kind))
    if set(kinds.values()) - {vocabulary.CONSOLE}:
        logs.logger().info("receivers_configured", **kinds)
    else:
        logs.logger().warning(
            "no_receiver_for_people", advice="muster notify setup adds a receiver"
        )


def log_refused(refused: Mapping[str, str]) -> None:
    """Count and log the receivers that are left out; `refused` maps their names to the reasons."""
    _REFUSED.set(len(refused))
    for name, reason in refused.items():
        logs.logger().error("receiver_unusable", receiver=name, error=reason[:1000])


async def announce(
    publish: Callable[[vocabulary.Event], Awaitable[object]],
    kinds: Mapping[str, str],
    own_alerts: OwnAlerts,
    *,
    refused: Sequence[str] = (),
) -> None:
    """Publish the receivers and our firing alerts periodically, and when an alert changes."""
    while True:
        event = vocabulary.ReceiversConfigured(
            node=vocabulary.FLEET,
            at=datetime.now(UTC),
            receivers=kinds,
            refused=tuple(refused[:_NAMES_MAX]),
            alerts=own_alerts.firing,
            interval_s=_ANNOUNCE_S,
        )
        await publish(event)
        await own_alerts.wait_for_change(_ANNOUNCE_S)


async def ping(to: endpoint.Endpoint, *, interval_s: float, alive: Callable[[], bool]) -> None:
    """Ping a URL every `interval_s` while `alive()` is true; a monitor detects missing pings."""
    was_taken = True
    while True:
        if alive():
            result = await to.request("GET", read=http.Read.NOTHING)
            if not isinstance(result, results.Result):
                result = results.of_status(result.status, result.headers)
            _PINGS.labels(result.kind).inc()
            is_taken = result.kind is results.Kind.ACCEPTED
            if was_taken and not is_taken:
                logs.logger().warning("watchdog_ping_failed", where=to.where, error=result.detail)
            was_taken = is_taken
        await asyncio.sleep(interval_s)
