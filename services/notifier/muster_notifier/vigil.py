"""Adapter: the clock and to outside watchers: what the notifier notices by itself.

It raises alerts of its own when health is silent and while there are dead letters, and tells
somebody outside, if asked to, that it is alive.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import prometheus_client

from muster import codec, vocabulary
from muster.service import logs
from muster_notifier import answers, deadletters, posting, selfwatch, watchdog

_LOOK_S: Final = 10.0

_DEAD = prometheus_client.Gauge("muster_dead_letters", "Notifications that reached nobody.")
_PINGS = prometheus_client.Counter(
    "muster_notifier_pings_total", "Signs of life to somebody outside, by answer.", ["answer"]
)


class Vigil:
    """Gives its alerts to `hear`."""

    def __init__(
        self, voice: selfwatch.Voice, hear: Callable[[codec.CloudEvent], Awaitable[None]]
    ) -> None:
        self._voice = voice
        self._hear = hear

    async def count_dead(self, subjects: Callable[[], Awaitable[list[str]]]) -> None:
        """Raise an alert while there are dead letters that are about something else; for ever."""
        kind = vocabulary.AlertKind.DEAD_LETTERS
        while True:
            found = await subjects()
            _DEAD.set(len(found))
            count = sum(1 for subject in found if not deadletters.is_about_dead(subject))
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


async def ping(site: posting.Site, *, interval_s: float, alive: Callable[[], bool]) -> None:
    """Ask a URL every `interval_s` while we are well; whoever waits for it in vain can tell."""
    was_taken = True
    while True:
        if alive():
            answer = await site.ask("GET", read=posting.Read.NOTHING)
            if not isinstance(answer, answers.Answer):
                answer = answers.of_status(answer.status, answer.headers)
            _PINGS.labels(answer.kind).inc()
            is_taken = answer.kind is answers.Kind.TAKEN
            if was_taken and not is_taken:
                logs.logger().warning("ping_not_taken", where=site.where, error=answer.detail)
            was_taken = is_taken
        await asyncio.sleep(interval_s)
