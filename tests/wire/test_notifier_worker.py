"""One receiver's notifications, from the outbox to what became of them."""

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from muster import vocabulary
from muster.service import runtime
from muster_notifier.delivery import queue, worker
from muster_notifier.receivers import results
from muster_notifier.routing import grouping, notifications

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


async def nothing() -> None:
    """Have nothing to do."""


@dataclass
class Job:
    number: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    done: Callable[[], Awaitable[None]] = nothing
    hold: Callable[[], Awaitable[None]] = nothing


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

    async def story() -> None:  # noqa: C901  # the same
        inbox: asyncio.Queue[runtime.Delivery[queue.Input]] = asyncio.Queue()
        ended = asyncio.Semaphore(0)

        async def send(
            notification: notifications.Notification, _: Mapping[str, str]
        ) -> results.Result:
            if notification.group == "bad":
                raise UnicodeError("what nobody had thought of")
            return results.Result(outcome=results.Outcome.TAKEN, detail="")

        async def put(_: str, body: bytes, __: str, headers: Mapping[str, str]) -> None:
            given_up.append(f"{notifications.decode(body).group}: {headers['Muster-Outcome']}")

        async def take(_: str, __: str) -> AsyncIterator[Job]:
            for number, group in enumerate(("bad", "good"), start=1):
                yield Job(number, notifications.encode(notification(group)))

        async def publish(event: vocabulary.Event, _: str) -> None:
            assert isinstance(event, vocabulary.NotificationEvent)
            published.append(f"{event.group}: {event.TYPE}")

        async def remember(*_: object) -> None:
            pass

        async def enqueue_input(event: queue.Input) -> None:
            await inbox.put(runtime.Delivery(event))

        async def report(_: grouping.Outcome) -> None:
            ended.release()

        dependencies = worker.Dependencies(
            may_act=nothing,
            firing=lambda _: frozenset(),
            put=put,
            take=take,
            hold_s=60,
            store=remember,
            publish=publish,
            instance="1",
        )
        deliveries = queue.DeliveryQueue(rate_per_s=1000, burst=1000, retry_for_s=60)
        made = worker.ReceiverWorker(
            "ops",
            send,
            queue=deliveries,
            dependencies=dependencies,
            enqueue_input=enqueue_input,
            report=report,
        )
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(made.work()),
                tasks.create_task(runtime.drive(deliveries, inbox, made.act)),
            ]
            for _ in ("bad", "good"):
                await ended.acquire()
            for task in running:
                task.cancel()

    asyncio.run(story())
    assert given_up == ["bad: broken"]
    assert sorted(published) == ["bad: notification.failed", "good: notification.delivered"]
