"""Door to a receiver, whatever it is: sends one notification until it is taken, refused, or late.

Then the ledger learns it, then the bus, then the machine, in this order: a crash between sending
and remembering costs one repeat, under the same `Idempotency-Key`, and never a loss.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import prometheus_client

from muster import logs, streams, vocabulary
from muster_notifier import answers, grouping, ledger, message
from muster_notifier import notification as notifications

Send = Callable[[message.Message], Awaitable[answers.Answer]]

GOODBYE_S: Final = 1.0
"""At the end, a message already on its way has this long to be answered and remembered."""

_TOLD = prometheus_client.Counter(
    "muster_notifications_total",
    "Notifications, by what became of them.",
    ["receiver", "reason", "outcome"],
)
_ATTEMPTS = prometheus_client.Counter(
    "muster_notification_attempts_total",
    "Attempts to send, by what was answered.",
    ["receiver", "answer"],
)
_SECONDS = prometheus_client.Histogram(
    "muster_notification_seconds",
    "From the decision to tell until the receiver took it.",
    ["receiver"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """What a receiver needs of the bus: two of its methods."""

    remember: Callable[[streams.Bucket, str, bytes], Awaitable[None]]
    publish: Callable[[vocabulary.Event, str], Awaitable[None]]


class Receiver:
    """One addressee with its own queue and its own workers, so that it delays no other."""

    def __init__(self, name: str, send: Send, *, retry_for_s: float, bus: Bus) -> None:
        self.name = name
        self._send = send
        self._retry_for_s = retry_for_s
        self._bus = bus
        # the machine gives no more than this before it hears an outcome
        self._queue: asyncio.Queue[notifications.Notification] = asyncio.Queue(
            grouping.IN_FLIGHT_MAX
        )

    def give(self, notification: notifications.Notification) -> None:
        """Take one to send; never waits."""
        self._queue.put_nowait(notification)

    async def work(
        self, report: Callable[[grouping.Delivered | grouping.Failed], Awaitable[None]]
    ) -> None:
        """Send what is given, several at once, and report what became of each; for ever."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(grouping.IN_FLIGHT_MAX):
                workers.create_task(self._work(report))

    async def _work(
        self, report: Callable[[grouping.Delivered | grouping.Failed], Awaitable[None]]
    ) -> None:
        while True:
            sending = asyncio.ensure_future(self._deliver(await self._queue.get()))
            try:
                outcome = await asyncio.shield(sending)
            except asyncio.CancelledError:
                await asyncio.wait([sending], timeout=GOODBYE_S)
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                raise
            await report(outcome)

    async def _deliver(
        self, notification: notifications.Notification
    ) -> grouping.Delivered | grouping.Failed:
        if notification.is_silent:
            await self._remember(notification, attempts=0)
            return grouping.Delivered(notification)
        clock = asyncio.get_running_loop().time
        composed = message.compose(notification, at=datetime.now(UTC))
        began = clock()
        attempts = 0
        while True:
            attempts += 1
            answer = await self._send(composed)
            _ATTEMPTS.labels(self.name, answer.kind).inc()
            if answer.kind is answers.Kind.TAKEN:
                _SECONDS.labels(self.name).observe(clock() - notification.decided_at)
                await self._tell_delivered(notification, attempts=attempts)
                return grouping.Delivered(notification)
            chance = random.random()  # noqa: S311  # jitter, not a secret
            delay_s = answers.delay_s(attempts, answer, chance=chance)
            is_late = clock() + delay_s > began + self._retry_for_s
            if answer.kind is answers.Kind.REFUSED or is_late:
                await self._tell_failed(notification, answer, attempts=attempts)
                return grouping.Failed(notification)
            await asyncio.sleep(delay_s)

    async def _tell_delivered(
        self, notification: notifications.Notification, *, attempts: int
    ) -> None:
        _TOLD.labels(self.name, notification.reason, "delivered").inc()
        logs.logger().info("delivered", **_facts(notification), attempts=attempts)
        at = await self._remember(notification, attempts=attempts)
        await self._bus.publish(
            vocabulary.NotificationDelivered(
                node=notification.node,
                at=at,
                receiver=notification.receiver,
                group=notification.group,
                reason=notification.reason,
                firing=_fingerprints(notification.firing),
                resolved=_fingerprints(notification.told_resolved),
                attempts=attempts,
            ),
            f"{notification.id}:delivered",
        )

    async def _tell_failed(
        self, notification: notifications.Notification, answer: answers.Answer, *, attempts: int
    ) -> None:
        _TOLD.labels(self.name, notification.reason, f"failed_{answer.kind}").inc()
        logs.logger().error(
            "not_delivered", **_facts(notification), attempts=attempts, error=answer.detail
        )
        at = datetime.now(UTC)
        await self._bus.publish(
            vocabulary.NotificationFailed(
                node=notification.node,
                at=at,
                receiver=notification.receiver,
                group=notification.group,
                reason=notification.reason,
                firing=_fingerprints(notification.firing),
                resolved=_fingerprints(notification.told_resolved),
                attempts=attempts,
                error=answer.detail[:2048],
            ),
            f"{notification.id}:failed:{at.isoformat()}",
        )

    async def _remember(
        self, notification: notifications.Notification, *, attempts: int
    ) -> datetime:
        at = datetime.now(UTC)
        entry = ledger.entry_of(notification, at=at, attempts=attempts)
        key = ledger.key_of(notification.receiver, notification.group)
        await self._bus.remember(streams.LEDGER, key, ledger.encode(entry))
        return at


def _facts(notification: notifications.Notification) -> dict[str, str]:
    return {
        "id": notification.id,
        "receiver": notification.receiver,
        "group": notification.group,
        "reason": notification.reason,
    }


def _fingerprints(alerts: tuple[vocabulary.AlertChanged, ...]) -> tuple[str, ...]:
    return tuple(alert.fingerprint for alert in alerts)
