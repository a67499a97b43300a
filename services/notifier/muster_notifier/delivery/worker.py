"""Adapter: runs one receiver: takes its notifications from the outbox and sends them.

What the receiver took is in the ledger before it leaves the outbox: a crash in between costs one
repeat, under the same `Idempotency-Key`, and never a loss. What it refused, or did not take for too
long, is stored as a dead letter first.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import prometheus_client

from muster import vocabulary
from muster.nats import storage, streams
from muster.service import logs, runtime
from muster_notifier.delivery import dead_letters, delivery_log, queue
from muster_notifier.receivers import results
from muster_notifier.routing import grouping, notifications

_Inbox = asyncio.Queue[runtime.Delivery[queue.Input]]

STOP_S: Final = 1.0
"""When we stop, an attempt in flight has this long to be answered and recorded."""

_QUEUED = prometheus_client.Gauge(
    "muster_notifier_queued_notifications", "Notifications that wait for a receiver.", ["receiver"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What a worker needs; `may_act` returns once this process is the leader.

    `firing` returns which of these alerts fire now. `put` writes to a stream, `take` reads the
    outbox, `store` writes to a bucket, `publish` publishes an event.
    """

    may_act: Callable[[], Awaitable[None]]
    firing: Callable[[Iterable[str]], frozenset[str]]
    put: Callable[[str, bytes, str, Mapping[str, str]], Awaitable[None]]
    take: Callable[[str, str], AsyncIterator[storage.Job]]
    store: Callable[[streams.Bucket, str, bytes], Awaitable[object]]
    publish: Callable[[vocabulary.Event, str], Awaitable[object]]
    instance: str


class ReceiverWorker:
    """One receiver with its own queue, consumer and rate, so that it does not delay others."""

    def __init__(
        self,
        name: str,
        send: results.Send,
        *,
        queue: queue.DeliveryQueue,
        dependencies: Dependencies,
        report: Callable[[grouping.Outcome], Awaitable[None]],
    ) -> None:
        """`report` is called with each notification's result."""
        self.name = name
        self.queue = queue
        self._send = send
        self._dependencies = dependencies
        self._inbox: _Inbox = asyncio.Queue(runtime.INBOX_MAX)
        self._report = report
        self._entries: dict[str, notifications.LedgerEntry] = {}
        self._jobs: dict[int, storage.Job] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._written = 0
        # replays that the receiver does not know of: they count like first deliveries
        self._counted: set[int] = set()
        self._log = delivery_log.DeliveryLog(name, dependencies.publish)
        # one for each group, the newest: the machine bounds how many groups these are
        self._outgoing: dict[str, notifications.Notification] = {}
        self._has_outgoing = asyncio.Event()
        _QUEUED.labels(name).set_function(lambda: self.queue.waiting)

    def restore(self, entry: notifications.LedgerEntry) -> None:
        """Restore the ledger's entry about a group."""
        self._entries[entry.group] = entry

    def enqueue(self, notification: notifications.Notification) -> None:
        """Enqueue a notification for sending; never waits."""
        self._outgoing[notification.group] = notification
        self._has_outgoing.set()

    async def work(self) -> None:
        """Write notifications to the outbox, and deliver those in it, forever."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._write_outbox())
            self._tasks.create_task(self._read_outbox())
            self._tasks.create_task(self._extend_holds())
            self._tasks.create_task(runtime.drive(self.queue, self._inbox, self._act))

    async def _act(self, output: queue.Output) -> None:
        """Carry out an output of the queue."""
        match output:
            case queue.Send():
                assert self._tasks is not None, f"{self.name} has not been started"
                self._tasks.create_task(self._deliver_uninterrupted(output))
            case queue.Done(delivery):
                self._log.log_availability(None)
                if not self._is_untracked(delivery):
                    await self._report(grouping.Delivered(delivery.notification))
            case queue.Postponed(delivery, result):
                self._log.log_availability(result)
                if not self._is_untracked(delivery):
                    await self._report(grouping.Postponed(delivery.notification))
            case queue.Superseded(delivery):
                await self._finish(delivery)
            case queue.GivenUp(delivery, attempts, result):
                await self._give_up(delivery, result, attempts=attempts)
                if not self._is_untracked(delivery):
                    await self._report(grouping.Failed(delivery.notification))

    async def _write_outbox(self) -> None:
        while True:
            await self._has_outgoing.wait()
            if not self._outgoing:
                self._has_outgoing.clear()
                continue
            notification = self._outgoing.pop(next(iter(self._outgoing)))
            self._written += 1
            await self._dependencies.may_act()
            await self._dependencies.put(
                f"muster.outbox.{self.name}.{notifications.token(notification.group)}",
                notifications.encode(notification),
                f"{notification.id}:{self._dependencies.instance}:{self._written}",
                {},
            )

    async def _read_outbox(self) -> None:
        jobs = self._dependencies.take(f"receiver-{self.name}", f"muster.outbox.{self.name}.>")
        async for job in jobs:
            if job.number in self._jobs:
                self._jobs[job.number] = job
                continue
            try:
                notification = notifications.decode(job.body)
            except notifications.Malformed as error:
                logs.logger().error(
                    "notification_unreadable", receiver=self.name, error=str(error)[:500]
                )
                await self._dependencies.put(
                    *dead_letters.unreadable(self.name, job.body, str(error))
                )
                await job.done()
                continue
            delivery = queue.Delivery(
                number=job.number,
                notification=notification,
                is_replay=dead_letters.REPLAY in job.headers,
            )
            entry = self._entries.get(notification.group)
            if (
                not self._is_untracked(delivery)
                and entry is not None
                and entry.id == notification.id
            ):
                # it was sent by a process that ended before it could remove it
                await job.done()
                await self._report(grouping.Delivered(notification))
                continue
            self._jobs[job.number] = job
            await self._inbox.put(runtime.Delivery(delivery))

    async def _extend_holds(self) -> None:
        while True:
            await asyncio.sleep(storage.HOLD_S)
            for job in list(self._jobs.values()):
                await job.hold()

    async def _deliver_uninterrupted(self, sending: queue.Send) -> None:
        """Deliver; when we are stopped, a running attempt gets a moment to finish."""
        delivering = asyncio.ensure_future(self._deliver(sending))
        try:
            await asyncio.shield(delivering)
        except asyncio.CancelledError:
            await asyncio.wait([delivering], timeout=STOP_S)
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)
            raise

    async def _deliver(self, sending: queue.Send) -> None:
        delivery = sending.delivery
        notification = self._current(delivery)
        entry = self._entries.get(delivery.notification.group)
        is_open = entry is not None and entry.firing and not self._is_untracked(delivery)
        if notification is None or (
            notification.is_ledger_only and not self._is_untracked(delivery)
        ):
            result = results.Result(results.Outcome.TAKEN, "nothing to send")
        else:
            await self._dependencies.may_act()
            data = entry.data if entry is not None and is_open else {}
            result = await self._attempt(notification, data)
            self._log.attempted(result)
        if result.kind is results.Kind.TAKEN:
            await self._record(delivery, notification, result, attempts=sending.attempt)
        chance = random.random()  # noqa: S311  # jitter, not a secret
        await self._inbox.put(
            runtime.Delivery(queue.Attempted(delivery=delivery, result=result, chance=chance))
        )

    def _current(self, delivery: queue.Delivery) -> notifications.Notification | None:
        """Return what to send now: for a replayed dead letter, the current state.

        If it still fires and the receiver does not know, it is treated like any other notification
        and recorded in the ledger, so that the receiver will also be notified when it is resolved.
        """
        notification = delivery.notification
        if not delivery.is_replay or notification.is_test:
            return notification
        entry = self._entries.get(notification.group)
        fires = self._dependencies.firing(notification.firing_ids)
        current = dead_letters.as_of_now(
            notification, fires=fires, notified=entry.firing if entry else ()
        )
        if current is not None and current.firing_ids:
            self._counted.add(delivery.number)
        if current is None:
            logs.logger().info("replay_outdated", **delivery_log.log_fields(notification))
        return current

    async def _attempt(
        self, notification: notifications.Notification, data: Mapping[str, str]
    ) -> results.Result:
        """Send once. A bug of ours fails this notification, but not the whole process."""
        try:
            return await self._send(notification, data)
        except Exception as error:  # noqa: BLE001  # it would end the restarted process too
            logs.logger().error(
                "send_failed_by_bug", **delivery_log.log_fields(notification), exc_info=error
            )
            detail = f"a bug of the notifier: {type(error).__name__}"
            return results.Result(results.Outcome.BROKEN, detail)

    async def _record(
        self,
        delivery: queue.Delivery,
        sent: notifications.Notification | None,
        result: results.Result,
        *,
        attempts: int,
    ) -> None:
        """Record the delivery in the ledger before it is removed from the outbox."""
        notification = delivery.notification
        # a process that was suspended meanwhile must not overwrite what its successor wrote
        await self._dependencies.may_act()
        if not self._is_untracked(delivery):
            entry = notifications.entry_of(notification, attempts=attempts, data=result.data)
            self._entries[notification.group] = entry
            key = notifications.ledger_key(self.name, notification.group)
            await self._dependencies.store(streams.LEDGER, key, notifications.encode_entry(entry))
        await self._finish(delivery)
        if sent is not None and not sent.is_ledger_only:
            number = delivery.number if self._is_untracked(delivery) else 0
            await self._log.delivered(sent, result, attempts=attempts, number=number)

    async def _give_up(
        self, delivery: queue.Delivery, result: results.Result, *, attempts: int
    ) -> None:
        notification, at = delivery.notification, datetime.now(UTC)
        await self._dependencies.put(
            *dead_letters.dead_letter(notification, result, attempts=attempts, at=at)
        )
        await self._log.failed(notification, result, attempts=attempts, at=at)
        await self._finish(delivery)

    async def _finish(self, delivery: queue.Delivery) -> None:
        self._counted.discard(delivery.number)
        job = self._jobs.pop(delivery.number, None)
        if job is not None:
            await job.done()

    def _is_untracked(self, delivery: queue.Delivery) -> bool:
        """Return whether this is a replay or a test, which ledger and groups do not record."""
        is_again = delivery.is_replay and delivery.number not in self._counted
        return is_again or delivery.notification.is_test
