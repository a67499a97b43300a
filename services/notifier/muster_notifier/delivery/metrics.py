"""Adapter: Prometheus metrics of the notifications sent to each receiver."""

from collections.abc import Callable
from typing import Final

import prometheus_client

from muster import vocabulary
from muster_notifier.receivers import results

_QUEUED: Final = prometheus_client.Gauge(
    "muster_notifier_queued_notifications",
    "Notifications in a receiver's queue, including those being sent.",
    ["receiver"],
)
NOTIFICATIONS: Final = prometheus_client.Counter(
    "muster_notifier_notifications_total",
    "Notifications, by result: delivered, or failed permanently.",
    ["receiver", "reason", "outcome"],
)
ATTEMPTS: Final = prometheus_client.Counter(
    "muster_notifier_attempts_total",
    "Attempts to send, by outcome.",
    ["receiver", "result", "outcome"],
)
SECONDS: Final = prometheus_client.Histogram(
    "muster_notifier_delivery_seconds",
    "Seconds from the decision to notify until the receiver accepted the notification.",
    ["receiver"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300),
)


def forget() -> None:
    """Stop exporting all queue lengths, because their receivers may no longer exist."""
    _QUEUED.clear()


def begin(receiver: str, waiting: Callable[[], int]) -> None:
    """Export all metrics of a receiver, starting at 0; `waiting` returns its queue's length."""
    _QUEUED.labels(receiver).set_function(waiting)
    SECONDS.labels(receiver)
    for outcome in results.Outcome:
        ATTEMPTS.labels(receiver, outcome.kind, outcome)
    for reason in vocabulary.NotificationReason:
        NOTIFICATIONS.labels(receiver, reason, "delivered")
        NOTIFICATIONS.labels(receiver, reason, "failed")
