"""Adapter: sends a marked test message to a receiver, and records its requests and answers."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

import muster
from muster import vocabulary
from muster.cli import event_texts, output
from muster_notifier.config import receiver_settings, schema
from muster_notifier.delivery import dead_letters, queue
from muster_notifier.receivers import endpoint, factory, results
from muster_notifier.routing import notifications

_OPENING: Final = ("pagerduty", "alertmanager")
"""The kinds of receivers that open an incident; a test must leave no incident open."""
_NOT_REACHED: Final = frozenset(
    {
        results.Outcome.FORBIDDEN_ADDRESS,
        results.Outcome.NO_SUCH_HOST,
        results.Outcome.UNREACHABLE,
        results.Outcome.NOT_TRUSTED,
    }
)
"""The outcomes that mean that no part of the message was sent."""


class Attempt(msgspec.Struct, frozen=True):
    """One message of a test: the requests, without secrets, and the result."""

    requests: list[str]
    kind: results.Kind
    outcome: results.Outcome
    detail: str
    retry_after_s: float | None

    @property
    def answer(self) -> str:
        """Return what the receiver answered, or why it was not reached."""
        retry = f"; retry after {self.retry_after_s:g} s" if self.retry_after_s else ""
        outcome = "" if self.kind is results.Kind.ACCEPTED else f" ({self.outcome})"
        detail = self.detail.removeprefix(queue.NOT_SENT)
        is_sent = self.outcome not in _NOT_REACHED and detail == self.detail
        words = "answered" if is_sent else "not sent"
        return f"{words}: {self.kind}{outcome}: {detail}{retry}"

    def lines(self) -> list[str]:
        """Return the requests and the answer for people."""
        requests = [line for request in self.requests for line in request.splitlines()]
        head = "not sent:" if self.outcome in _NOT_REACHED else "sent:"
        return [*([head, *requests] if requests else ()), self.answer]


def check(name: str, names: Collection[str]) -> None:
    """Raise ValueError if there is no receiver of this name."""
    if name not in names:
        raise ValueError(f"no receiver is called {name}; the receivers are: {', '.join(names)}")


Deliver = Callable[[notifications.Notification], Awaitable[Attempt]]


async def send(receiver: receiver_settings.Receiver, configured: schema.Settings) -> list[Attempt]:
    """Send a test message and, if that opens an incident, the message that resolves it.

    Returns the attempts. Raises factory.Unusable.
    """
    sender = factory.make(receiver, configured)
    for problem in sender.problems:
        output.warn("notify", f"template: {problem}")
    data: Mapping[str, str] = {}

    async def deliver(notification: notifications.Notification) -> Attempt:
        nonlocal data
        requests: list[str] = []
        endpoint.RECORDED.set(requests)
        result = await sender.send(notification, data)
        data = result.data
        if not requests:
            requests.append(sender.composer.compose(notification).text)
        shown = [sender.mask(request) for request in requests]
        return Attempt(shown, result.kind, result.outcome, result.detail, result.retry_after_s)

    return await send_by(deliver, receiver.name, receiver.way, at=datetime.now(UTC))


async def send_by(deliver: Deliver, name: str, way: str, *, at: datetime) -> list[Attempt]:
    """Deliver a test message and, if that opens an incident, the message that resolves it."""
    notification = _example(name, at=at)
    attempts = [await deliver(notification)]
    if attempts[0].kind is results.Kind.ACCEPTED and way in _OPENING:
        over = dead_letters.as_of_now(notification, last=None)
        assert over is not None, "the test message fires"
        attempts.append(await deliver(over))
    return attempts


def _example(receiver: str, *, at: datetime) -> notifications.Notification:
    """Return a notification that is marked as a test."""
    alert = vocabulary.AlertChanged(
        node="node-example",
        at=at,
        plugin=vocabulary.TEST_PLUGIN,
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.INFO,
        state=vocabulary.AlertState.FIRING,
        fingerprint="0" * 16,
        summary="this is a test message from muster notify",
        starts_at=at,
        evidence=(vocabulary.Evidence(source="muster", observed="somebody requested a test"),),
        runbook=f"{muster.RUNBOOKS_URL}index.html",
    )
    notification = notifications.create(
        after=at.isoformat(),
        receiver=receiver,
        group=f'{event_texts.TEST_GROUP}"{at.isoformat()}"}}',
        labels={"kind": "test"},
        reason=vocabulary.NotificationReason.FIRST,
        firing=[alert],
        resolved=[],
        send_resolved=True,
        at=at,
    )
    return msgspec.structs.replace(notification, is_test=True)
