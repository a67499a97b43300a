"""Adapter: notifies receivers directly when NATS becomes unusable, and when it is usable again.

Alerts, outbox and ledger are in NATS: while it is unavailable, alerts neither arrive nor are sent
in the usual way. The last leading notifier therefore sends one alert itself, to the receivers that
the routes select. A standby, or a notifier that restarts during the outage, sends nothing.

| NATS                                | state that receivers are notified of   |
|-------------------------------------|----------------------------------------|
| unusable for less than `patience_s` | unchanged                              |
| unusable for `patience_s`           | the alert fires, unless it is silenced |
| usable, or another notifier leads   | the alert is resolved                  |

A receiver is notified only if the state differs from its last message, so a receiver that is
unavailable during the whole outage gets no message.
"""

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from muster import vocabulary
from muster.service import logs
from muster_notifier.receivers import results
from muster_notifier.routing import notifications, routes

_CHECK_S: Final = 0.5
_SETTLE_S: Final = 10.0
_SUMMARY: Final = "NATS cannot be used: plugins may be unmonitored, and alerts are not delivered"
_OVER: Final = "NATS can be used again"
_KIND: Final = vocabulary.AlertKind.HEALTH_SILENT
_NOTHING: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Receiver:
    """A receiver's send function, and whether the receiver is notified of resolved alerts."""

    name: str
    send: results.Send
    send_resolved: bool


class OutageAlarm:
    """Notifies receivers when NATS becomes unusable, and again when NATS can be used.

    It works while `run` is running. `problem` returns why NATS cannot be used, or an empty
    text if NATS works or another notifier has to send the alert. `choose` returns the names of an
    alert's receivers.
    """

    def __init__(
        self,
        receivers: Collection[Receiver],
        *,
        problem: Callable[[], str],
        choose: Callable[[vocabulary.AlertChanged], Collection[str]],
        patience_s: float,
        runbook_url: str,
    ) -> None:
        self._receivers = receivers
        self._problem = problem
        self._choose = choose
        self._patience_s = patience_s
        self._runbook = f"{runbook_url}{_KIND}.html"
        self._alert: vocabulary.AlertChanged | None = None
        """The last alert about NATS, firing or resolved; None before the first."""
        self._chosen: Collection[str] = ()
        self._unsettled: set[str] = set()
        """The receivers that have not yet received the last alert."""
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Watch NATS forever; notify receivers when an outage begins and when it ends."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            for receiver in self._receivers:
                tasks.create_task(self._work(receiver))

    async def settle(self) -> None:
        """Wait, at most about 11 s, until receivers are notified that NATS is usable again."""
        if self._alert is None:
            return
        await asyncio.sleep(2 * _CHECK_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S), self._changed:
                await self._changed.wait_for(lambda: not self._unsettled)

    @property
    def _fires(self) -> bool:
        return self._alert is not None and self._alert.state is vocabulary.AlertState.FIRING

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        since: float | None = None
        while True:
            await asyncio.sleep(_CHECK_S)
            problem, now = self._problem(), clock()
            since = None if not problem and not self._fires else now if since is None else since
            if since is None:
                continue
            seconds = now - since
            if not problem:
                await self._set(f"NATS was unusable for {seconds:.0f} s", fires=False)
            elif not self._fires and seconds >= self._patience_s:
                why = f"the leading notifier has been without NATS for {seconds:.0f} s: {problem}"
                await self._set(why, fires=True)

    async def _set(self, observed: str, *, fires: bool) -> None:
        at = datetime.now(UTC)
        alert = vocabulary.AlertChanged(
            node=vocabulary.FLEET,
            at=at,
            plugin="notifier",
            kind=_KIND,
            severity=vocabulary.Severity.CRITICAL,
            state=vocabulary.AlertState.FIRING if fires else vocabulary.AlertState.RESOLVED,
            fingerprint=hashlib.sha256(b"notifier|without nats").hexdigest()[:16],
            summary=_SUMMARY if fires else _OVER,
            starts_at=at if fires or self._alert is None else self._alert.starts_at,
            ends_at=None if fires else at,
            evidence=(vocabulary.Evidence(source="notifier", observed=observed),),
            advice="check the pods and the volumes of NATS, and the network to them",
            runbook=self._runbook,
            change=int(not fires),
        )
        logs.logger().warning("nats_lost" if fires else "nats_restored", observed=observed)
        async with self._changed:
            if fires:
                self._chosen = self._choose(alert)
            self._alert, self._unsettled = alert, {*self._chosen}
            self._changed.notify_all()

    async def _work(self, receiver: Receiver) -> None:
        knows, data, failures = False, _NOTHING, 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: receiver.name in self._unsettled)
            alert, fires = self._alert, self._fires
            assert alert is not None, "a receiver is unsettled only after an alert"
            if fires is not knows and (fires or receiver.send_resolved):
                result = await receiver.send(_notification(receiver, alert), data)
                if result.kind is results.Kind.TEMPORARY:
                    failures += 1
                    delay_s = results.delay_s(failures, result, chance=random.random())  # noqa: S311  # jitter, not a secret
                    await self._wait_for_news(alert, timeout_s=delay_s)
                    continue
                if result.kind is results.Kind.REFUSED:
                    logs.logger().error(
                        "nats_alarm_refused", receiver=receiver.name, error=result.detail
                    )
                data, failures = result.data, 0
            knows = fires
            async with self._changed:
                if self._alert is alert:
                    self._unsettled.discard(receiver.name)
                    self._changed.notify_all()

    async def _wait_for_news(self, alert: vocabulary.AlertChanged, *, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._alert is not alert)


def _notification(receiver: Receiver, alert: vocabulary.AlertChanged) -> notifications.Notification:
    fires = alert.state is vocabulary.AlertState.FIRING
    reasons = vocabulary.NotificationReason
    labels = {"kind": str(alert.kind), "node": alert.node}
    return notifications.create(
        after="",
        receiver=receiver.name,
        group=f"without NATS:{routes.format_labels(labels)}",
        labels=labels,
        reason=reasons.FIRST if fires else reasons.ALL_RESOLVED,
        firing=[alert] if fires else [],
        resolved=[] if fires else [alert],
        send_resolved=receiver.send_resolved,
        at=alert.at,
    )
