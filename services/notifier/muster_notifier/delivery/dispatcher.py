"""Adapter: runs a worker with a queue for each receiver; all share the outbox and the ledger."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

from muster import vocabulary
from muster.nats import bus, jetstream, storage, streams
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
_CLEAR_S: Final = 30.0
_STORED_AT_ONCE_MAX: Final = 100
_READ_AT_ONCE: Final = 32
_SETTLED_MAX: Final = 100


class Dispatcher:
    """Runs a worker for each receiver; `report` is called with each notification's result."""

    def __init__(
        self,
        settings: schema.Settings,
        connected: bus.Bus,
        *,
        report: Callable[[grouping.Outcome], Awaitable[None]],
        may_act: Callable[[], Awaitable[None]],
        firing: Callable[[Iterable[str]], frozenset[str]],
        is_left_out: Callable[[str], bool],
    ) -> None:
        """Raise CannotStart if a receiver is unusable. `may_act` waits until we are the leader.

        Notifications to receivers for which `is_left_out` is true stay in the outbox.
        """
        self._settings = settings
        self._bus = connected
        self._report = report
        self._may_act = may_act
        self._firing = firing
        self._is_left_out = is_left_out
        # the subjects of dead letters by receiver and group
        self._dead: dict[str, dict[str, None]] = {}
        delivery_metrics.forget()
        self.receivers: list[without_nats.Receiver] = []
        """All receivers, each with the function that sends to it directly, bypassing its queue."""
        self._workers = {r.name: self._worker(r) for r in settings.receivers}

    def names(self) -> list[str]:
        """Return the names of all receivers."""
        return list(self._workers)

    def failing(self) -> list[str]:
        """Return the receivers that have failed several times in a row."""
        return [each.name for each in self._workers.values() if each.queue.is_failing()]

    def paused_s(self, now: float) -> dict[str, float]:
        """Return for how many more seconds each paused queue stays paused, by receiver."""
        paused = {each.name: round(each.queue.paused_s(now), 1) for each in self._workers.values()}
        return {name: seconds for name, seconds in paused.items() if seconds}

    def enqueue(self, notification: notifications.Notification) -> None:
        """Enqueue a notification for sending, without waiting."""
        self._workers[notification.receiver].enqueue(notification)

    async def work(self) -> None:
        """Send all notifications that are enqueued or in the outbox, forever."""
        async with asyncio.TaskGroup() as tasks:
            for each in self._workers.values():
                tasks.create_task(each.work())
            tasks.create_task(self._keep_clear())

    async def restore(self) -> list[notifications.LedgerEntry]:
        """Restore the workers and the list of dead letters; return the ledger's readable entries.

        Unreadable entries are logged; each of them may cause a repeated message.
        """
        for subject in await storage.waiting_subjects(
            self._bus.link, streams.DEAD_LETTERS, dead_letters.SUBJECTS
        ):
            self._note_dead(subject)
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
        """Return the notifications in the outbox to our receivers, except replays and tests.

        Messages whose receiver does not exist are removed first.
        """
        await self._remove_unknown()
        pending = []
        async for subject, body, headers in self._waiting(lambda name: name in self._workers):
            try:
                notification = notifications.decode(body)
            except notifications.Malformed:
                continue  # its receiver's worker logs it
            if notification.receiver not in self._workers:
                await self._store_as_dead_letter(subject, body)
            elif dead_letters.REPLAY not in headers and not notification.is_test:
                pending.append(notification)
        return pending

    async def _keep_clear(self) -> None:
        """Remove messages whose receiver does not exist, periodically, forever.

        Otherwise, they would fill the outbox.
        """
        while True:
            await asyncio.sleep(_CLEAR_S)
            await self._may_act()
            await self._remove_unknown()

    async def _remove_unknown(self) -> None:
        """Turn messages whose receiver does not exist into dead letters.

        At most `_STORED_AT_ONCE_MAX` are stored at a time; the others are deleted.
        """
        count = 0
        async for subject, body, _ in self._waiting(
            lambda name: name not in self._workers and not self._is_left_out(name)
        ):
            count += 1
            if count <= _STORED_AT_ONCE_MAX:
                await self._store_as_dead_letter(subject, body)
            else:
                await storage.remove_waiting(self._bus.link, streams.OUTBOX, subject)
        if count > _STORED_AT_ONCE_MAX:
            logs.logger().error(
                "undeliverable_notifications_deleted",
                count=count - _STORED_AT_ONCE_MAX,
                reason=f"no such receiver; only {_STORED_AT_ONCE_MAX} are stored at a time",
            )

    async def _store_as_dead_letter(self, subject: str, body: bytes) -> None:
        """Turn a message whose receiver does not exist into a dead letter."""
        try:
            dead = dead_letters.dead_letter(
                notifications.decode(body),
                dead_letters.NO_SUCH_RECEIVER,
                attempts=0,
                at=datetime.now(UTC),
            )
        except notifications.Malformed as error:
            dead = dead_letters.unreadable(subject.split(".")[2], body, str(error))
        await self._put(*dead)
        await storage.remove_waiting(self._bus.link, streams.OUTBOX, subject)

    async def _waiting(
        self, is_wanted: Callable[[str], bool]
    ) -> AsyncIterator[tuple[str, bytes, Mapping[str, str]]]:
        """Yield the selected receivers' outbox messages, reading a few at a time to save memory."""
        every = await storage.waiting_subjects(self._bus.link, streams.OUTBOX, "muster.outbox.>")
        wanted = [subject for subject in every if is_wanted(subject.split(".")[2])]
        for start in range(0, len(wanted), _READ_AT_ONCE):
            part = wanted[start : start + _READ_AT_ONCE]
            messages = await storage.newest_messages(self._bus.link, streams.OUTBOX, part)
            for subject, body, headers, _ in messages:
                yield subject, body, headers

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
                store=self._store,
                settle=self._settle,
                publish=self._publish,
                instance=self._bus.instance,
            ),
            report=self._report,
        )

    async def _put(self, subject: str, body: bytes, key: str, headers: Mapping[str, str]) -> None:
        await storage.enqueue(self._bus.link, subject, body, key=key, headers=headers)
        if dead_letters.is_dead(subject):
            self._note_dead(subject)

    def _note_dead(self, subject: str) -> None:
        """Store the subject of a dead letter under its receiver and group."""
        group, _, _ = subject.rpartition(".")
        self._dead.setdefault(group, {})[subject] = None

    async def _settle(self, entry: notifications.LedgerEntry) -> None:
        """Remove the dead letters that a delivered notification covers."""
        for group in dead_letters.groups_of(entry):
            if not (dead := self._dead.get(group)):
                continue
            names = list(dead)[-_SETTLED_MAX:]
            for name in names:
                del dead[name]
            for subject, body, _, number in await storage.newest_messages(
                self._bus.link, streams.DEAD_LETTERS, names
            ):
                if not _is_covered(body, entry) or not await storage.remove_waiting(
                    self._bus.link, streams.DEAD_LETTERS, subject, up_to=number
                ):
                    self._note_dead(subject)

    async def _store(self, bucket: streams.Bucket, key: str, value: bytes) -> None:
        # `put` logs a refusal; another attempt would be refused, too
        with contextlib.suppress(jetstream.Refused):
            await storage.put(self._bus.link, bucket, key, value)

    def _take(self, durable: str, subject: str) -> AsyncIterator[storage.Job]:
        return storage.jobs(self._bus.link, streams.OUTBOX, durable=durable, subject=subject)

    async def _publish(self, event: vocabulary.Event, event_id: str) -> None:
        await self._bus.publish(event, event_id=event_id)


def _is_covered(body: bytes, entry: notifications.LedgerEntry) -> bool:
    try:
        return dead_letters.is_covered(notifications.decode(body), entry)
    except notifications.Malformed:
        return False
