"""Adapter: the alerts that the notifier raises itself, and its ping to an outside watcher.

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
from muster_notifier.receivers import endpoint, result
from muster_notifier.self_monitoring import watchdog

PLUGIN = "notifier"


class Voice:
    """Makes alerts as the bus would bring them."""

    def __init__(self, *, instance: str, runbook_url: str) -> None:
        self._instance = instance
        self._runbook_url = runbook_url
        self._count = itertools.count(1)
        self._since: dict[vocabulary.AlertKind, datetime] = {}

    def fires(
        self, kind: vocabulary.AlertKind, *, summary: str, seen: str, at: datetime
    ) -> codec.CloudEvent:
        """Say that something is wrong, since when we first said so."""
        self._since.setdefault(kind, at)
        evidence = vocabulary.Evidence(source="notifier", observed=seen)
        return self._event(kind, summary=summary, evidence=evidence, at=at, ends_at=None)

    def ends(
        self, kind: vocabulary.AlertKind, *, summary: str, seen: str, at: datetime
    ) -> codec.CloudEvent:
        """Say that it is over; also after a restart, when only the ledger knows that it began."""
        evidence = vocabulary.Evidence(source="notifier", observed=seen)
        event = self._event(kind, summary=summary, evidence=evidence, at=at, ends_at=at)
        self._since.pop(kind, None)
        return event

    def _event(
        self,
        kind: vocabulary.AlertKind,
        *,
        summary: str,
        evidence: vocabulary.Evidence,
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
            evidence=(evidence,),
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


_LOOK_S: Final = 10.0

_DEAD = prometheus_client.Gauge("muster_dead_letters", "Notifications that reached nobody.")
_PINGS = prometheus_client.Counter(
    "muster_notifier_pings_total", "Signs of life to somebody outside, by answer.", ["answer"]
)


class Vigil:
    """Gives its alerts to `hear`."""

    def __init__(self, voice: Voice, hear: Callable[[codec.CloudEvent], Awaitable[None]]) -> None:
        self._voice = voice
        self._hear = hear

    async def count_dead(self, subjects: Callable[[], Awaitable[list[str]]]) -> None:
        """Raise an alert while there are dead letters that are about something else; for ever."""
        kind = vocabulary.AlertKind.DEAD_LETTERS
        while True:
            found = await subjects()
            _DEAD.set(len(found))
            count = sum(1 for subject in found if not dead_letters.is_about_dead(subject))
            at = datetime.now(UTC)
            if count:
                event = self._voice.fires(
                    kind,
                    summary="notifications could not be delivered: muster dlq list",
                    seen=f"{count} dead letters",
                    at=at,
                )
            else:
                event = self._voice.ends(
                    kind, summary="no notification is undelivered", seen="no dead letters", at=at
                )
            await self._hear(event)
            await asyncio.sleep(_LOOK_S)

    async def tell(self, output: watchdog.Output) -> None:
        """Raise an alert when health is silent, and end it when it is heard."""
        kind, at = vocabulary.AlertKind.HEALTH_SILENT, datetime.now(UTC)
        match output:
            case watchdog.Silent(seconds=seconds, holder=holder):
                who = f", last led by {holder}" if holder else ""
                event = self._voice.fires(
                    kind,
                    summary="the health service is silent: nobody watches the plugins",
                    seen=f"no watchdog tick for {seconds:.0f} s{who}",
                    at=at,
                )
            case watchdog.Heard(seconds=seconds, holder=holder):
                event = self.well(f"{holder} ticks, after {seconds:.0f} s")
        await self._hear(event)

    def well(self, seen: str) -> codec.CloudEvent:
        """Return the end of health's silence; what nobody was told of is no news."""
        return self._voice.ends(
            vocabulary.AlertKind.HEALTH_SILENT,
            summary="the health service is heard again",
            seen=seen,
            at=datetime.now(UTC),
        )


async def ping(site: endpoint.Endpoint, *, interval_s: float, alive: Callable[[], bool]) -> None:
    """Ask a URL every `interval_s` while we are well; whoever waits for it in vain can tell."""
    was_taken = True
    while True:
        if alive():
            answer = await site.request("GET", read=http.Read.NOTHING)
            if not isinstance(answer, result.Result):
                answer = result.of_status(answer.status, answer.headers)
            _PINGS.labels(answer.kind).inc()
            is_taken = answer.kind is result.Kind.TAKEN
            if was_taken and not is_taken:
                logs.logger().warning("ping_not_taken", where=site.where, error=answer.detail)
            was_taken = is_taken
        await asyncio.sleep(interval_s)
