"""Adapter: lets commands query and use the running notifier, through NATS and Kubernetes.

The notifier publishes its receivers. A test message goes through its outbox, like any other
notification, and the result is published as an event. So a test uses the notifier's network and
secrets, not the user's.
"""

import asyncio
import contextlib
import os
from datetime import datetime, timedelta
from typing import Final

from muster import vocabulary
from muster.cli import events
from muster.kubernetes import installation
from muster.nats import bus, consumers, storage, streams
from muster.service import settings
from muster_notifier import sample_message
from muster_notifier.config import receiver_settings, schema
from muster_notifier.delivery import queue
from muster_notifier.receivers import results
from muster_notifier.routing import notifications

LIMIT_S: Final = 90.0
"""The time limit of a command."""
_ANSWER_S: Final = 30.0
_CLOCKS_S: Final = 600.0
"""The tolerated difference between this machine's clock and the NATS server's, in seconds."""


class Unusable(Exception):
    """The running notifier cannot do what the command requests; the message gives the reason."""


def connected() -> contextlib.AbstractAsyncContextManager[bus.Bus]:
    """Connect to NATS at `$NATS_URL`, or else on this machine. Raises ConnectionError."""
    return events.connect("notify", os.environ.get("NATS_URL"))


async def settings_in(context: str, namespace: str) -> schema.Settings:
    """Return the settings of the notifier in a cluster. Raises Unreachable and BadSettings."""
    from muster.cli import cluster as clusters  # noqa: PLC0415  # the client, only where it is used

    async with clusters.opened(context=context, namespace=namespace) as cluster:
        text = await cluster.settings(installation.NOTIFIER, "notifier.yaml")
    source = "the notifier's ConfigMap"
    documents = settings.parse(text.encode(), source=source)
    tree = settings.only(documents, schema.Settings, source=source)
    return settings.validate(schema.Settings, tree or {}, source=source)


async def configured_names(context: str, namespace: str) -> list[str]:
    """Return the names of the receivers in the settings of the notifier in a cluster.

    Raises Unreachable and Unusable.
    """
    try:
        configured = await settings_in(context, namespace)
    except settings.BadSettings as error:
        raise Unusable(str(error)) from None
    return [receiver.name for receiver in configured.receivers]


async def more_receivers(
    link: bus.Bus, configured: schema.Settings
) -> tuple[receiver_settings.Receiver, ...]:
    """Return the running notifier's receivers that are not in the settings `configured`.

    The notifier publishes only names and kinds, so a receiver of any kind except console is
    returned as a file receiver.
    """
    announced = await _announced(link)
    known = {receiver.name for receiver in configured.receivers}
    log, other = receiver_settings.Console(), receiver_settings.File(path="?")
    return tuple(
        receiver_settings.Receiver(name=name, console=log)
        if kind == vocabulary.CONSOLE
        else receiver_settings.Receiver(name=name, file=other)
        for name, kind in announced.receivers.items()
        if name not in known
    )


async def test(name: str, *, at: datetime) -> list[sample_message.Attempt]:
    """Make the notifier send a test message, dated `at`; return the attempts.

    Raises Unusable and ConnectionError.
    """
    async with connected() as link:
        announced = await _announced(link)
        if name in announced.refused:
            raise Unusable(f"the notifier ignores {name}; its log explains why")
        try:
            sample_message.check(name, announced.receivers)
        except ValueError as error:
            raise Unusable(str(error)) from None

        async def deliver(notification: notifications.Notification) -> sample_message.Attempt:
            return await _deliver(link, notification)

        way = announced.receivers[name]
        return await sample_message.send_by(deliver, name, way, at=at)


async def _announced(link: bus.Bus) -> vocabulary.ReceiversConfigured:
    announced = await consumers.receivers(link.link)
    if announced is None:
        raise Unusable(
            "no notifier has published its receivers; is one running and connected to NATS?"
        )
    return announced


async def _deliver(
    link: bus.Bus, notification: notifications.Notification
) -> sample_message.Attempt:
    """Put a test message into the outbox, wait for its result, and return that."""
    name = notification.receiver
    subject = f"muster.outbox.{name}.test"
    period = int(notification.at.timestamp()) // queue.TEST_EVERY_S
    key = f"test {name} {notification.reason} {period}"
    body = notifications.encode(notification)
    if not await storage.enqueue(link.link, subject, body, key=key):
        raise Unusable(f"{name} has just been tested: wait {queue.TEST_EVERY_S} s")
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await _answer(link, notification)
    except TimeoutError:
        await storage.remove_waiting(link.link, streams.OUTBOX, subject)
        detail = f"the notifier has not sent the message for {_ANSWER_S:g} s; see its log"
        outcome = results.Outcome.TIMED_OUT
        return sample_message.Attempt([], outcome.kind, outcome, detail, None)


async def _answer(
    link: bus.Bus, notification: notifications.Notification
) -> sample_message.Attempt:
    filters = [f"muster.notification.*.{notification.receiver}.notification.*"]
    since = notification.at - timedelta(seconds=_CLOCKS_S)
    following = consumers.follow(link.link, streams.NOTIFICATIONS, filters=filters, since=since)
    async for event in following:
        match event.data:
            case vocabulary.NotificationDelivered() as done if _is_about(done, notification):
                outcome, detail = results.Outcome.ACCEPTED, done.answer
            case vocabulary.NotificationFailed() as failed if _is_about(failed, notification):
                outcome, detail = _outcome(failed.outcome), failed.error
            case _:
                continue
        return sample_message.Attempt([], outcome.kind, outcome, detail, None)
    raise AssertionError("following never ends")


def _is_about(
    event: vocabulary.NotificationEvent, notification: notifications.Notification
) -> bool:
    return (event.group, event.reason) == (notification.group, notification.reason)


def _outcome(word: str) -> results.Outcome:
    """Return the outcome with this name; REJECTED for a name that only newer notifiers use."""
    is_known = word in set(results.Outcome)
    return results.Outcome(word) if is_known else results.Outcome.REJECTED
