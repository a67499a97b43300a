"""Adapter: runs all receivers: each has its own queue, all share the outbox and the ledger."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime

from muster import vocabulary
from muster.nats import bus, storage, streams
from muster.service import entry, logs, metrics
from muster_notifier.config import receiver_settings, schema
from muster_notifier.delivery import dead_letters, queue, without_nats, worker
from muster_notifier.delivery import metrics as delivery_metrics
from muster_notifier.receivers import factory
from muster_notifier.routing import grouping, notifications

UNREADABLE = metrics.counter(
    "muster_notifier_unreadable_total",
    "Stored ledger entries and silences that cannot be read.",
    "what",
    ("ledger", "silence"),
)


class Dispatcher:
    """Runs all receivers; `report` is called with the result of each notification."""

    def __init__(
        self,
        settings: schema.Settings,
        connected: bus.Bus,
        *,
        report: Callable[[grouping.Outcome], Awaitable[None]],
        may_act: Callable[[], Awaitable[None]],
        firing: Callable[[Iterable[str]], frozenset[str]],
        left_out: Collection[str] = (),
    ) -> None:
        """Raise CannotStart if a receiver is unusable. `may_act` returns once we are the leader.

        Notifications to receivers that are left out for now stay in the outbox.
        """
        self._settings = settings
        self._bus = connected
        self._report = report
        self._may_act = may_act
        self._firing = firing
        self._left_out = frozenset(left_out)
        delivery_metrics.forget()
        self.receivers: list[without_nats.Receiver] = []
        """The receivers, for sending without outbox and queue."""
        self._workers = {r.name: self._worker(r) for r in settings.receivers}

    def names(self) -> list[str]:
        """Return the names of all receivers."""
        return list(self._workers)

    def failing(self) -> list[str]:
        """Return the receivers that have failed several times in a row."""
        return [each.name for each in self._workers.values() if each.queue.is_failing()]

    def paused_s(self, now: float) -> dict[str, float]:
        """Return the paused queues, with the remaining pause of each in seconds."""
        paused = {each.name: round(each.queue.paused_s(now), 1) for each in self._workers.values()}
        return {name: seconds for name, seconds in paused.items() if seconds}

    def enqueue(self, notification: notifications.Notification) -> None:
        """Enqueue a notification for sending, without waiting."""
        self._workers[notification.receiver].enqueue(notification)

    async def work(self) -> None:
        """Send enqueued notifications and those in the outbox, forever."""
        async with asyncio.TaskGroup() as tasks:
            for each in self._workers.values():
                tasks.create_task(each.work())

    async def restore(self) -> list[notifications.LedgerEntry]:
        """Return the ledger; log unreadable entries, each of which may cause a repeated message."""
        entries = []
        for key, value in (await storage.read_all(self._bus.link, streams.LEDGER)).items():
            try:
                ledger_entry = notifications.decode_entry(value)
            except notifications.Malformed as error:
                UNREADABLE.labels("ledger").inc()
                logs.logger().error("ledger_entry_unreadable", key=key, error=str(error)[:500])
                continue
            entries.append(ledger_entry)
            if ledger_entry.receiver in self._workers:
                self._workers[ledger_entry.receiver].restore(ledger_entry)
        return entries

    async def pending(self) -> list[notifications.Notification]:
        """Return the notifications in the outbox; those without a receiver become dead letters."""
        pending = []
        messages = await storage.waiting_messages(self._bus.link, streams.OUTBOX, "muster.outbox.>")
        for subject, body, headers, _ in messages:
            if subject.split(".")[2] in self._left_out:
                continue
            try:
                notification = notifications.decode(body)
            except notifications.Malformed as error:
                name = subject.split(".")[2]
                if name not in self._workers:
                    await self._put(*dead_letters.unreadable(name, body, str(error)))
                    await storage.remove_waiting(self._bus.link, streams.OUTBOX, subject)
                continue  # if the receiver still exists, its worker logs it
            if notification.receiver not in self._workers:
                dead = dead_letters.dead_letter(
                    notification, dead_letters.NO_SUCH_RECEIVER, attempts=0, at=datetime.now(UTC)
                )
                await self._put(*dead)
                await storage.remove_waiting(self._bus.link, streams.OUTBOX, subject)
            elif dead_letters.REPLAY not in headers and not notification.is_test:
                pending.append(notification)
        return pending

    def _worker(self, settings: receiver_settings.Receiver) -> worker.ReceiverWorker:
        try:
            sender = factory.make(settings, self._settings)
        except factory.Unusable as error:
            raise entry.CannotStart(str(error)) from None
        for problem in sender.problems:
            logs.logger().error("template_unusable", receiver=settings.name, error=problem)
        self.receivers.append(
            without_nats.Receiver(settings.name, sender.send, settings.send_resolved)
        )
        limits = settings.limits
        return worker.ReceiverWorker(
            settings.name,
            sender.send,
            queue=queue.DeliveryQueue(
                rate_per_s=limits.rate_per_s or sender.rate_per_s,
                burst=limits.burst,
                retry_for_s=limits.retry_for_s,
                parallel_max=1 if sender.shows_repeats else queue.PARALLEL_MAX,
                shows_repeats=sender.shows_repeats,
            ),
            dependencies=worker.Dependencies(
                may_act=self._may_act,
                firing=self._firing,
                put=self._put,
                take=self._take,
                store=functools.partial(storage.put, self._bus.link),
                publish=self._publish,
                instance=self._bus.instance,
            ),
            report=self._report,
        )

    async def _put(self, subject: str, body: bytes, key: str, headers: Mapping[str, str]) -> None:
        await storage.enqueue(self._bus.link, subject, body, key=key, headers=headers)

    def _take(self, durable: str, subject: str) -> AsyncIterator[storage.Job]:
        return storage.jobs(self._bus.link, streams.OUTBOX, durable=durable, subject=subject)

    async def _publish(self, event: vocabulary.Event, event_id: str) -> None:
        await self._bus.publish(event, event_id=event_id)
