"""The worker of one receiver: notifications from the outbox to their outcome."""

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Mapping

from muster import vocabulary
from muster.nats import storage
from muster_notifier.delivery import queue, worker
from muster_notifier.receivers import results
from muster_notifier.routing import grouping, notifications

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


async def nothing() -> None:
    """Do nothing."""


def notification(group: str) -> notifications.Notification:
    return notifications.create(
        after="",
        receiver="ops",
        group=group,
        labels={},
        reason=vocabulary.NotificationReason.FIRST,
        firing=[],
        resolved=[],
        send_resolved=True,
        at=T0,
    )


def test_a_bug_of_ours_costs_one_notification_and_no_other() -> None:  # noqa: C901  # its dependencies
    given_up: list[str] = []
    published: list[str] = []

    async def story() -> None:
        ended = asyncio.Semaphore(0)

        async def send(
            notification: notifications.Notification, _: Mapping[str, str]
        ) -> results.Result:
            if notification.group == "bad":
                raise UnicodeError("what nobody had thought of")
            return results.Result(outcome=results.Outcome.ACCEPTED, detail="")

        async def put(_: str, body: bytes, __: str, headers: Mapping[str, str]) -> None:
            given_up.append(f"{notifications.decode(body).group}: {headers['Muster-Outcome']}")

        async def take(_: str, __: str) -> AsyncIterator[storage.Job]:
            for number, group in enumerate(("bad", "good"), start=1):
                body = notifications.encode(notification(group))
                yield storage.Job(number, "", body, {}, done=nothing, hold=nothing)

        async def publish(event: vocabulary.Event, _: str) -> None:
            assert isinstance(event, vocabulary.NotificationEvent)
            published.append(f"{event.group}: {event.TYPE}")

        async def remember(*_: object) -> None:
            pass

        async def report(_: grouping.Outcome) -> None:
            ended.release()

        dependencies = worker.Dependencies(
            may_act=nothing,
            firing=lambda _: frozenset(),
            put=put,
            take=take,
            store=remember,
            settle=remember,
            publish=publish,
            instance="1",
        )
        deliveries = queue.DeliveryQueue(rate_per_s=1000, burst=1000, retry_for_s=60)
        made = worker.ReceiverWorker(
            "ops",
            send,
            queue=deliveries,
            dependencies=dependencies,
            report=report,
        )
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(made.work())
            for _ in ("bad", "good"):
                await ended.acquire()
            running.cancel()

    asyncio.run(story())
    assert given_up == ["bad: internal_error"]
    assert sorted(published) == ["bad: notification.failed", "good: notification.delivered"]
