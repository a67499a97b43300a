"""Adapter: sends one receiver its notifications from the outbox.

An accepted notification is recorded in the ledger before it is removed from the outbox: a crash in
between repeats one message, with the same `Idempotency-Key`, but loses none. A notification that is
refused, or retried for too long, is stored as a dead letter before it is removed. Each result has
the same name in logs, metrics and events.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypedDict

from muster import vocabulary
from muster.nats import storage, streams
from muster.service import logs, runtime
from muster_notifier.delivery import dead_letters, metrics, queue
from muster_notifier.receivers import results
from muster_notifier.routing import grouping, notifications

_Inbox = asyncio.Queue[runtime.Delivery[queue.Input]]

STOP_S: Final = 1.0
"""How long an attempt in flight may take to finish at shutdown."""


class _About(TypedDict):
    node: str
    receiver: str
    group: str
    reason: vocabulary.NotificationReason
    firing: tuple[str, ...]
    resolved: tuple[str, ...]


class _DeliveryLog:
    """Logs and counts the deliveries to one receiver, and publishes events about them."""

    def __init__(
        self, name: str, publish: Callable[[vocabulary.Event, str], Awaitable[object]]
    ) -> None:
        self._name = name
        self._publish = publish
        self._is_unavailable = False

    def log_availability(self, result: results.Result | None) -> None:
        """Log once when a receiver begins to fail (`result`), and once when it recovers (None)."""
        if result is not None and not self._is_unavailable:
            logs.logger().warning(
                "receiver_unavailable",
                receiver=self._name,
                outcome=result.outcome,
                error=result.detail,
            )
        elif result is None and self._is_unavailable:
            logs.logger().info("receiver_available", receiver=self._name)
        self._is_unavailable = result is not None

    async def delivered(
        self,
        notification: notifications.Notification,
        result: results.Result,
        *,
        attempts: int,
        number: int,
    ) -> None:
        """Report that the receiver accepted a notification; `number` is part of the event's id."""
        at = datetime.now(UTC)
        metrics.SECONDS.labels(self._name).observe(max(0.0, (at - notification.at).total_seconds()))
        metrics.NOTIFICATIONS.labels(self._name, notification.reason, "delivered").inc()
        logs.logger().info(
            "notification_delivered",
            **_log_fields(notification),
            attempts=attempts,
            result=result.detail,
        )
        event = vocabulary.NotificationDelivered(
            **self._about(notification), at=at, attempts=attempts, answer=result.detail[:2048]
        )
        await self._publish(event, f"{notification.id}:delivered:{number}")

    async def failed(
        self,
        notification: notifications.Notification,
        result: results.Result,
        *,
        attempts: int,
        at: datetime,
    ) -> None:
        """Report a permanent failure; except for a test, the notification is now a dead letter."""
        metrics.NOTIFICATIONS.labels(self._name, notification.reason, "failed").inc()
        logs.logger().error(
            "notification_failed",
            **_log_fields(notification),
            attempts=attempts,
            outcome=result.outcome,
            error=result.detail,
        )
        event = vocabulary.NotificationFailed(
            **self._about(notification),
            at=at,
            attempts=attempts,
            outcome=result.outcome,
            error=result.detail[:2048],
        )
        await self._publish(event, f"{notification.id}:failed:{at.isoformat()}")

    def _about(self, notification: notifications.Notification) -> _About:
        return {
            "node": notification.node,
            "receiver": self._name,
            "group": notification.group[:2048],
            "reason": notification.reason,
            "firing": notification.firing_ids,
            "resolved": notification.resolved_ids if notification.send_resolved else (),
        }


def _log_fields(notification: notifications.Notification) -> dict[str, str]:
    """Return the fields that identify a notification in the log."""
    return {
        "id": notification.id,
        "receiver": notification.receiver,
        "group": notification.group,
        "reason": notification.reason,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The functions that a worker uses; `may_act` waits until this process is the leader.

    `firing` returns which of the given alerts fire now. `put` writes to a stream, `take` reads the
    outbox, `store` writes to a bucket, `publish` publishes an event. `settle` removes the dead
    letters that a delivered notification covers. `instance` identifies this process.
    """

    may_act: Callable[[], Awaitable[None]]
    firing: Callable[[Iterable[str]], frozenset[str]]
    put: Callable[[str, bytes, str, Mapping[str, str]], Awaitable[None]]
    take: Callable[[str, str], AsyncIterator[storage.Job]]
    store: Callable[[streams.Bucket, str, bytes], Awaitable[object]]
    settle: Callable[[notifications.LedgerEntry], Awaitable[None]]
    publish: Callable[[vocabulary.Event, str], Awaitable[object]]
    instance: str


class ReceiverWorker:
    """Sends to one receiver; a separate queue, consumer and rate keep it from delaying others."""

    def __init__(
        self,
        name: str,
        send: results.Send,
        *,
        queue: queue.DeliveryQueue,
        dependencies: Dependencies,
        report: Callable[[grouping.Outcome], Awaitable[None]],
    ) -> None:
        """Create a worker, which calls `report` with each notification's result."""
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
        self._log = _DeliveryLog(name, dependencies.publish)
        # the newest notification of each group; the grouping limits how many there are
        self._outgoing: dict[str, notifications.Notification] = {}
        self._has_outgoing = asyncio.Event()
        metrics.begin(name, lambda: self.queue.waiting)

    def restore(self, entry: notifications.LedgerEntry) -> None:
        """Restore the ledger entry of a group."""
        self._entries[entry.group] = entry

    def enqueue(self, notification: notifications.Notification) -> None:
        """Enqueue a notification for sending, without waiting."""
        self._outgoing[notification.group] = notification
        self._has_outgoing.set()

    async def work(self) -> None:
        """Write enqueued notifications to the outbox, and deliver notifications from it forever."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._write_outbox())
            self._tasks.create_task(self._read_outbox())
            self._tasks.create_task(self._extend_holds())
            self._tasks.create_task(runtime.drive(self.queue, self._inbox, self._act))

    async def _act(self, output: queue.Output) -> None:
        """Perform an action that the queue has decided on."""
        match output:
            case queue.Send():
                assert self._tasks is not None, f"{self.name} has not been started"
                self._tasks.create_task(self._deliver_uninterrupted(output))
            case queue.Done(delivery):
                self._log.log_availability(None)
                if not _is_untracked(delivery):
                    await self._report(grouping.Delivered(delivery.notification))
            case queue.Postponed(delivery, result):
                self._log.log_availability(result)
                if not _is_untracked(delivery):
                    await self._report(grouping.Postponed(delivery.notification))
            case queue.Superseded(delivery):
                await self._finish(delivery)
            case queue.GivenUp(delivery, attempts, result):
                await self._give_up(delivery, result, attempts=attempts)
                if not _is_untracked(delivery):
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
            if not _is_untracked(delivery) and entry is not None and entry.id == notification.id:
                # an earlier process sent it, but ended before removing it from the outbox
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
        """Deliver a notification; at shutdown, wait briefly for a running attempt to finish."""
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
        notification = await self._current(delivery)
        entry = self._entries.get(delivery.notification.group)
        is_open = entry is not None and entry.firing and not _is_untracked(delivery)
        if notification is None or (notification.is_ledger_only and not _is_untracked(delivery)):
            result = results.Result(results.Outcome.ACCEPTED, "nothing to send")
        else:
            await self._dependencies.may_act()
            data = entry.data if entry is not None and is_open else {}
            result = await self._attempt(notification, data)
            metrics.ATTEMPTS.labels(self.name, result.kind, result.outcome).inc()
        if result.kind is results.Kind.ACCEPTED:
            await self._record(delivery, notification, result, attempts=sending.attempt)
        chance = random.random()  # noqa: S311  # jitter, not a secret
        await self._inbox.put(
            runtime.Delivery(queue.Attempted(delivery=delivery, result=result, chance=chance))
        )

    async def _current(self, delivery: queue.Delivery) -> notifications.Notification | None:
        """Return the notification to send now; None if there is nothing to send.

        If the alerts of a replayed dead letter still fire, or if a notification about its group is
        queued, the group is flushed instead.
        """
        notification = delivery.notification
        if not delivery.is_replay or notification.is_test:
            return notification
        fires = self._dependencies.firing(notification.firing_ids)
        if fires or self.queue.has_group(notification.group):
            await self._report(grouping.Requested(notification))
            logs.logger().info("replay_sent_as_group", **_log_fields(notification))
            return None
        last = self._entries.get(notification.group)
        current = dead_letters.as_of_now(notification, last=last)
        if current is None:
            logs.logger().info("replay_outdated", **_log_fields(notification))
        return current

    async def _attempt(
        self, notification: notifications.Notification, data: Mapping[str, str]
    ) -> results.Result:
        """Make one attempt to send; a bug fails this notification, but does not end the process."""
        try:
            return await self._send(notification, data)
        except Exception as error:  # noqa: BLE001  # a bug would end the restarted process, too
            logs.logger().error(
                "notification_internal_error", **_log_fields(notification), exc_info=error
            )
            detail = f"a bug in the notifier: {type(error).__name__}"
            return results.Result(results.Outcome.INTERNAL_ERROR, detail)

    async def _record(
        self,
        delivery: queue.Delivery,
        sent: notifications.Notification | None,
        result: results.Result,
        *,
        attempts: int,
    ) -> None:
        """Record a delivery in the ledger, except a replay or test; remove it from the outbox."""
        notification = delivery.notification
        # a process that was suspended meanwhile must not overwrite its successor's entry
        await self._dependencies.may_act()
        if not _is_untracked(delivery):
            entry = notifications.entry_of(notification, attempts=attempts, data=result.data)
            self._entries[notification.group] = entry
            key = notifications.ledger_key(self.name, notification.group)
            await self._dependencies.store(streams.LEDGER, key, notifications.encode_entry(entry))
            await self._dependencies.settle(entry)
        await self._finish(delivery)
        if sent is not None and not sent.is_ledger_only:
            number = delivery.number if _is_untracked(delivery) else 0
            await self._log.delivered(sent, result, attempts=attempts, number=number)

    async def _give_up(
        self, delivery: queue.Delivery, result: results.Result, *, attempts: int
    ) -> None:
        notification, at = delivery.notification, datetime.now(UTC)
        if not notification.is_test:
            await self._dependencies.put(
                *dead_letters.dead_letter(notification, result, attempts=attempts, at=at)
            )
        await self._log.failed(notification, result, attempts=attempts, at=at)
        await self._finish(delivery)

    async def _finish(self, delivery: queue.Delivery) -> None:
        job = self._jobs.pop(delivery.number, None)
        if job is not None:
            await job.done()


def _is_untracked(delivery: queue.Delivery) -> bool:
    """Return whether this is a replay or a test; ledger and groups do not record these."""
    return delivery.is_replay or delivery.notification.is_test
