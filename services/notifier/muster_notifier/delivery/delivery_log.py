"""Adapter: reports the result of each notification in log, metrics and events, with equal names."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypedDict

import prometheus_client

from muster import vocabulary
from muster.service import logs
from muster_notifier.receivers import results
from muster_notifier.routing import notifications

_NOTIFICATIONS = prometheus_client.Counter(
    "muster_notifier_notifications_total",
    "Notifications, by what became of them.",
    ["receiver", "reason", "outcome"],
)
_ATTEMPTS = prometheus_client.Counter(
    "muster_notifier_attempts_total",
    "Attempts to send, by what they came to.",
    ["receiver", "result", "outcome"],
)
_SECONDS = prometheus_client.Histogram(
    "muster_notifier_delivery_seconds",
    "From the decision to notify until the receiver took the notification.",
    ["receiver"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300),
)


class _About(TypedDict):
    node: str
    receiver: str
    group: str
    reason: vocabulary.NotificationReason
    firing: tuple[str, ...]
    resolved: tuple[str, ...]


class DeliveryLog:
    """Reports the deliveries of one receiver; `publish` publishes each event only once per id."""

    def __init__(
        self, name: str, publish: Callable[[vocabulary.Event, str], Awaitable[object]]
    ) -> None:
        self._name = name
        self._publish = publish
        self._is_unavailable = False

    def attempted(self, result: results.Result) -> None:
        """Count an attempt."""
        _ATTEMPTS.labels(self._name, result.kind, result.outcome).inc()

    def log_availability(self, result: results.Result | None) -> None:
        """Log once when a receiver starts to fail, and once when it works again."""
        if result is not None and not self._is_unavailable:
            logs.logger().warning(
                "receiver_unavailable",
                receiver=self._name,
                outcome=result.outcome,
                error=result.detail,
            )
        elif result is None and self._is_unavailable:
            logs.logger().info("receiver_available", receiver=self._name)
        self._is_unavailable = result is not None

    async def delivered(
        self,
        notification: notifications.Notification,
        result: results.Result,
        *,
        attempts: int,
        number: int,
    ) -> None:
        """Report that the receiver accepted it; `number` distinguishes replays."""
        at = datetime.now(UTC)
        _SECONDS.labels(self._name).observe(max(0.0, (at - notification.at).total_seconds()))
        _NOTIFICATIONS.labels(self._name, notification.reason, "delivered").inc()
        logs.logger().info(
            "delivered", **log_fields(notification), attempts=attempts, result=result.detail
        )
        event = vocabulary.NotificationDelivered(
            **self._about(notification), at=at, attempts=attempts
        )
        await self._publish(event, f"{notification.id}:delivered:{number}")

    async def failed(
        self,
        notification: notifications.Notification,
        result: results.Result,
        *,
        attempts: int,
        at: datetime,
    ) -> None:
        """Report that a notification failed, and is now a dead letter."""
        _NOTIFICATIONS.labels(self._name, notification.reason, f"failed_{result.outcome}").inc()
        logs.logger().error(
            "not_delivered",
            **log_fields(notification),
            attempts=attempts,
            outcome=result.outcome,
            error=result.detail,
        )
        event = vocabulary.NotificationFailed(
            **self._about(notification),
            at=at,
            attempts=attempts,
            outcome=result.outcome,
            error=result.detail[:2048],
        )
        await self._publish(event, f"{notification.id}:failed:{at.isoformat()}")

    def _about(self, notification: notifications.Notification) -> _About:
        return {
            "node": notification.node,
            "receiver": self._name,
            "group": notification.group[:2048],
            "reason": notification.reason,
            "firing": notification.firing_ids,
            "resolved": notification.resolved_ids if notification.send_resolved else (),
        }


def log_fields(notification: notifications.Notification) -> dict[str, str]:
    """Return the fields that identify a notification in the log."""
    return {
        "id": notification.id,
        "receiver": notification.receiver,
        "group": notification.group,
        "reason": notification.reason,
    }
