"""Adapter: sends a marked test message to a receiver, and records its requests and answers."""

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from muster import vocabulary
from muster.cli import output
from muster_notifier.config import receiver_settings, schema
from muster_notifier.delivery import dead_letters
from muster_notifier.receivers import endpoint, factory, message, results
from muster_notifier.routing import notifications


class Attempt(msgspec.Struct, frozen=True):
    """One message of a test: the requests, without secrets, and the result."""

    requests: list[str]
    kind: results.Kind
    outcome: results.Outcome
    detail: str
    retry_after_s: float | None

    @property
    def answer(self) -> str:
        """Return what the receiver answered."""
        retry = f"; retry after {self.retry_after_s:g} s" if self.retry_after_s else ""
        outcome = "" if self.kind is results.Kind.TAKEN else f" ({self.outcome})"
        return f"answered: {self.kind}{outcome}: {self.detail}{retry}"

    def lines(self) -> list[str]:
        """Return the requests and the answer for people."""
        requests = [line for request in self.requests for line in request.splitlines()]
        return ["sent:", *requests, self.answer]


async def send(receiver: receiver_settings.Receiver, configured: schema.Settings) -> list[Attempt]:
    """Send a test message and, if that opens an incident, the message that resolves it.

    Raises factory.Unusable.
    """
    sender = factory.make(receiver, configured)
    for problem in sender.problems:
        output.warn("notify", f"template: {problem}")
    notification: notifications.Notification | None = example(receiver.name, at=datetime.now(UTC))
    attempts: list[Attempt] = []
    data: Mapping[str, str] = {}
    while notification is not None:
        requests: list[str] = []
        endpoint.RECORDED.set(requests)
        result = await sender.send(notification, data)
        data = result.data
        if not requests:
            requests.append(message.compose(notification, receiver.templates).text)
        shown = [sender.mask(request) for request in requests]
        attempts.append(
            Attempt(shown, result.kind, result.outcome, result.detail, result.retry_after_s)
        )
        # a test must leave no incident open
        is_kept_open = receiver.pagerduty is not None or receiver.alertmanager is not None
        is_over = len(attempts) > 1 or result.kind is not results.Kind.TAKEN or not is_kept_open
        notification = (
            None if is_over else dead_letters.as_of_now(notification, fires=set(), notified=())
        )
    return attempts


def example(receiver: str, *, at: datetime) -> notifications.Notification:
    """Return a notification that is marked as a test."""
    alert = vocabulary.AlertChanged(
        node="node-example",
        at=at,
        plugin="device-plugin",
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.INFO,
        state=vocabulary.AlertState.FIRING,
        fingerprint="0" * 16,
        summary="this is a test message from muster notify test",
        starts_at=at,
        evidence=(vocabulary.Evidence(source="muster", observed="somebody requested a test"),),
    )
    notification = notifications.create(
        after=at.isoformat(),
        receiver=receiver,
        group='{}:{kind="test"}',
        labels={"kind": "test"},
        reason=vocabulary.NotificationReason.FIRST,
        firing=[alert],
        resolved=[],
        send_resolved=True,
        at=at,
    )
    return msgspec.structs.replace(notification, is_test=True)
