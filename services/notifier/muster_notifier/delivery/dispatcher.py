"""Adapter: runs all receivers, each with its queue, from one outbox and one ledger."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime

import prometheus_client

from muster import vocabulary
from muster.nats import buckets, bus, streams, work_queue
from muster.service import entry, logs, runtime
from muster_notifier.config import receiver_settings, schema
from muster_notifier.delivery import dead_letters, queue, worker
from muster_notifier.receivers import factory
from muster_notifier.routing import inputs, ledger, notifications

UNREADABLE = prometheus_client.Counter(
    "muster_notifier_unreadable_total", "What was remembered and cannot be read.", ["what"]
)


class Dispatcher:
    """All receivers; `report` hears what became of each letter."""

    def __init__(
        self,
        settings: schema.Settings,
        connected: bus.Bus,
        *,
        report: Callable[[inputs.Outcome], Awaitable[None]],
        may_act: Callable[[], Awaitable[None]],
        firing: Callable[[Iterable[str]], frozenset[str]],
    ) -> None:
        """Raise CannotStart if a receiver cannot be used. `may_act` returns once we may."""
        self._settings = settings
        self._bus = connected
        self._report = report
        self._may_act = may_act
        self._firing = firing
        self._desks: dict[str, asyncio.Queue[runtime.Delivery[queue.Input]]] = {}
        self._receivers = {r.name: self._receiver(r) for r in settings.receivers}

    def names(self) -> list[str]:
        """Return the names of all receivers."""
        return list(self._receivers)

    def away(self) -> list[str]:
        """Return the receivers that have failed again and again."""
        return [one.name for one in self._receivers.values() if one.desk.is_away()]

    def closed_s(self, now: float) -> dict[str, float]:
        """Return for how long receivers have asked us to stay away, of those that have."""
        found = {one.name: round(one.desk.closed_s(now), 1) for one in self._receivers.values()}
        return {name: seconds for name, seconds in found.items() if seconds}

    def give(self, notification: notifications.Notification) -> None:
        """Take one to send; never waits."""
        self._receivers[notification.receiver].give(notification)

    async def work(self) -> None:
        """Send what is given, and what is in the outbox; for ever."""
        async with asyncio.TaskGroup() as tasks:
            for name, receiver in self._receivers.items():
                tasks.create_task(receiver.work())
                tasks.create_task(runtime.drive(receiver.desk, self._desks[name], receiver.act))

    async def recall(self) -> list[ledger.Entry]:
        """Return the ledger; an entry that cannot be read costs one repeat, and is told."""
        found = []
        for key, value in (await buckets.recall(self._bus.link, streams.LEDGER)).items():
            try:
                entry_ = ledger.decode(value)
            except ledger.MalformedEntry as error:
                UNREADABLE.labels("ledger").inc()
                logs.logger().error("ledger_entry_unreadable", key=key, error=str(error)[:500])
                continue
            found.append(entry_)
            if entry_.receiver in self._receivers:
                self._receivers[entry_.receiver].recall(entry_)
        return found

    async def waiting(self) -> list[notifications.Notification]:
        """Return what is in the outbox; what is for nobody any more becomes a dead letter."""
        found = []
        letters = await work_queue.waiting(self._bus.link, streams.OUTBOX, "muster.outbox.>")
        for subject, body, headers, _ in letters:
            try:
                notification = notifications.decode(body)
            except notifications.MalformedLetter as error:
                name = subject.split(".")[2]
                if name not in self._receivers:
                    await self._put(*dead_letters.unreadable(name, body, str(error)))
                    await work_queue.remove(self._bus.link, streams.OUTBOX, subject)
                continue  # else whoever takes it says so
            if notification.receiver not in self._receivers:
                dead = dead_letters.bury(
                    notification, dead_letters.TO_NOBODY, attempts=0, at=datetime.now(UTC)
                )
                await self._put(*dead)
                await work_queue.remove(self._bus.link, streams.OUTBOX, subject)
            elif dead_letters.REPLAY not in headers and not notification.is_test:
                found.append(notification)
        return found

    def _receiver(self, settings: receiver_settings.Receiver) -> worker.ReceiverWorker:
        try:
            sender = factory.make(settings, self._settings)
        except factory.Unusable as error:
            raise entry.CannotStart(str(error)) from None
        for problem in sender.problems:
            logs.logger().error("template_unusable", receiver=settings.name, error=problem)
        inbox: asyncio.Queue[runtime.Delivery[queue.Input]] = asyncio.Queue(runtime.INBOX_MAX)
        self._desks[settings.name] = inbox

        async def hear(event: queue.Input) -> None:
            await inbox.put(runtime.Delivery(event))

        limits = settings.limits
        return worker.ReceiverWorker(
            settings.name,
            sender.send,
            at_desk=queue.DeliveryQueue(
                rate_per_s=limits.rate_per_s or sender.rate_per_s,
                burst=limits.burst,
                retry_for_s=limits.retry_for_s,
                at_once=sender.at_once,
                shows_repeats=sender.at_once == 1,
            ),
            doors=worker.Doors(
                may_act=self._may_act,
                firing=self._firing,
                put=self._put,
                take=self._take,
                hold_s=work_queue.HOLD_S,
                remember=functools.partial(buckets.remember, self._bus.link),
                publish=self._publish,
                instance=self._bus.instance,
            ),
            hear=hear,
            report=self._report,
        )

    async def _put(self, subject: str, body: bytes, key: str, headers: Mapping[str, str]) -> None:
        await work_queue.put(self._bus.link, subject, body, key=key, headers=headers)

    def _take(self, durable: str, subject: str) -> AsyncIterator[work_queue.Job]:
        return work_queue.take(self._bus.link, streams.OUTBOX, durable=durable, subject=subject)

    async def _publish(self, event: vocabulary.Event, event_id: str) -> None:
        await self._bus.publish(event, event_id=event_id)
