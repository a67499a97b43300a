"""Adapter: what became of each notification, in log, metrics and events, under the same names."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import prometheus_client

from muster import vocabulary
from muster.service import logs
from muster_notifier.receivers import result
from muster_notifier.routing import notifications

_TOLD = prometheus_client.Counter(
    "muster_notifications_total",
    "Notifications, by what became of them.",
    ["receiver", "reason", "outcome"],
)
_ATTEMPTS = prometheus_client.Counter(
    "muster_notification_attempts_total",
    "Attempts to send, by what was answered.",
    ["receiver", "answer", "outcome"],
)
_SECONDS = prometheus_client.Histogram(
    "muster_notification_seconds",
    "From the decision to tell until the receiver took it.",
    ["receiver"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300),
)


class DeliveryLog:
    """Those of one receiver; `publish` tells everybody, once for each id."""

    def __init__(
        self, name: str, publish: Callable[[vocabulary.Event, str], Awaitable[object]]
    ) -> None:
        self._name = name
        self._publish = publish
        self._is_away = False

    def attempted(self, answer: result.Result) -> None:
        """Count an attempt."""
        _ATTEMPTS.labels(self._name, answer.kind, answer.outcome).inc()

    def note(self, answer: result.Result | None) -> None:
        """Log once when a receiver goes away, and once when it is back."""
        if answer is not None and not self._is_away:
            logs.logger().warning(
                "receiver_away", receiver=self._name, outcome=answer.outcome, error=answer.detail
            )
        elif answer is None and self._is_away:
            logs.logger().info("receiver_back", receiver=self._name)
        self._is_away = answer is not None

    async def delivered(
        self,
        notification: notifications.Notification,
        answer: result.Result,
        *,
        attempts: int,
        number: int,
    ) -> None:
        """Say that it was taken; `number` tells repeats by hand apart."""
        at = datetime.now(UTC)
        _SECONDS.labels(self._name).observe(max(0.0, (at - notification.at).total_seconds()))
        _TOLD.labels(self._name, notification.reason, "delivered").inc()
        logs.logger().info(
            "delivered", **facts(notification), attempts=attempts, answer=answer.detail
        )
        await self._publish(
            vocabulary.NotificationDelivered(
                node=notification.node,
                at=at,
                receiver=self._name,
                group=notification.group[:2048],
                reason=notification.reason,
                firing=notification.firing_ids,
                resolved=notification.resolved_ids if notification.send_resolved else (),
                attempts=attempts,
            ),
            f"{notification.id}:delivered:{number}",
        )

    async def failed(
        self,
        notification: notifications.Notification,
        answer: result.Result,
        *,
        attempts: int,
        at: datetime,
    ) -> None:
        """Say that it reached nobody, and is kept."""
        _TOLD.labels(self._name, notification.reason, f"failed_{answer.outcome}").inc()
        logs.logger().error(
            "not_delivered",
            **facts(notification),
            attempts=attempts,
            outcome=answer.outcome,
            error=answer.detail,
        )
        await self._publish(
            vocabulary.NotificationFailed(
                node=notification.node,
                at=at,
                receiver=self._name,
                group=notification.group[:2048],
                reason=notification.reason,
                firing=notification.firing_ids,
                resolved=notification.resolved_ids if notification.send_resolved else (),
                attempts=attempts,
                outcome=answer.outcome,
                error=answer.detail[:2048],
            ),
            f"{notification.id}:failed:{at.isoformat()}",
        )


def facts(notification: notifications.Notification) -> dict[str, str]:
    """Return what names a notification in the log."""
    return {
        "id": notification.id,
        "receiver": notification.receiver,
        "group": notification.group,
        "reason": notification.reason,
    }
