"""Adapter: runs one receiver: takes its notifications from the outbox, and sends them.

What the receiver took is in the ledger before it leaves the outbox: a crash in between costs one
repeat, under the same `Idempotency-Key`, and never a loss. What it refused, or did not take for too
long, is stored as a dead letter first.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol

import prometheus_client

from muster import vocabulary
from muster.nats import streams
from muster.service import logs
from muster_notifier.delivery import dead_letters, delivery_log, queue
from muster_notifier.receivers import result
from muster_notifier.routing import inputs, ledger, notifications

Send = Callable[[notifications.Notification, Mapping[str, str]], Awaitable[result.Result]]
"""Sends one message once; the mapping is what the receiver said about this group before."""

GOODBYE_S: Final = 1.0
"""At the end, a message already on its way has this long to be answered and remembered."""

_LETTERS = prometheus_client.Gauge(
    "muster_notification_letters", "Letters that wait for a receiver.", ["receiver"]
)


class Job(Protocol):
    """A message of the outbox; see `muster.nats.work_queue`."""

    @property
    def number(self) -> int:
        """Its place in the stream."""

    @property
    def body(self) -> bytes:
        """The letter."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What is said about it."""

    @property
    def done(self) -> Callable[[], Awaitable[None]]:
        """Remove it."""

    @property
    def hold(self) -> Callable[[], Awaitable[None]]:
        """Keep it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """What a receiver needs of others; `may_act` returns once nobody else acts.

    `firing` returns those alerts that fire, of these.
    """

    may_act: Callable[[], Awaitable[None]]
    firing: Callable[[Iterable[str]], frozenset[str]]
    put: Callable[[str, bytes, str, Mapping[str, str]], Awaitable[None]]
    take: Callable[[str, str], AsyncIterator[Job]]
    hold_s: float
    remember: Callable[[streams.Bucket, str, bytes], Awaitable[object]]
    publish: Callable[[vocabulary.Event, str], Awaitable[object]]
    instance: str


class ReceiverWorker:
    """One addressee with its own desk, its own consumer and its own pace: it delays no other."""

    def __init__(
        self,
        name: str,
        send: Send,
        *,
        at_desk: queue.DeliveryQueue,
        doors: Doors,
        hear: Callable[[queue.Input], Awaitable[None]],
        report: Callable[[inputs.Outcome], Awaitable[None]],
    ) -> None:
        """`hear` gives the desk an input; `report` tells the machine what became of a letter."""
        self.name = name
        self.desk = at_desk
        self._send = send
        self._doors = doors
        self._hear = hear
        self._report = report
        self._entries: dict[str, ledger.Entry] = {}
        self._jobs: dict[int, Job] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._posted = 0
        # replays that are news after all
        self._counted: set[int] = set()
        self._books = delivery_log.DeliveryLog(name, doors.publish)
        # one for each group, the newest: the machine bounds how many groups these are
        self._outgoing: dict[str, notifications.Notification] = {}
        self._given = asyncio.Event()
        _LETTERS.labels(name).set_function(lambda: self.desk.waiting)

    def recall(self, entry: ledger.Entry) -> None:
        """Know what the receiver was told about a group."""
        self._entries[entry.group] = entry

    def give(self, notification: notifications.Notification) -> None:
        """Take one to send; never waits."""
        self._outgoing[notification.group] = notification
        self._given.set()

    async def work(self) -> None:
        """Put what is given into the outbox, and take letters from there; for ever."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._post())
            self._tasks.create_task(self._collect())
            self._tasks.create_task(self._hold())

    async def act(self, output: queue.Output) -> None:
        """Do what the desk says."""
        match output:
            case queue.Send():
                assert self._tasks is not None, f"{self.name} does not work yet"
                self._tasks.create_task(self._deliver_whole(output))
            case queue.Done(letter):
                self._books.note(None)
                if not self._is_extra(letter):
                    await self._report(inputs.Delivered(letter.notification))
            case queue.Postponed(letter, answer):
                self._books.note(answer)
                if not self._is_extra(letter):
                    await self._report(inputs.Postponed(letter.notification))
            case queue.Superseded(letter):
                await self._finish(letter)
            case queue.Dead(letter, attempts, answer):
                await self._bury(letter, answer, attempts=attempts)
                if not self._is_extra(letter):
                    await self._report(inputs.Failed(letter.notification))

    async def _post(self) -> None:
        while True:
            await self._given.wait()
            if not self._outgoing:
                self._given.clear()
                continue
            notification = self._outgoing.pop(next(iter(self._outgoing)))
            self._posted += 1
            await self._doors.may_act()
            await self._doors.put(
                f"muster.outbox.{self.name}.{notifications.token(notification.group)}",
                notifications.encode(notification),
                f"{notification.id}:{self._doors.instance}:{self._posted}",
                {},
            )

    async def _collect(self) -> None:
        jobs = self._doors.take(f"receiver-{self.name}", f"muster.outbox.{self.name}.>")
        async for job in jobs:
            if job.number in self._jobs:
                self._jobs[job.number] = job
                continue
            try:
                notification = notifications.decode(job.body)
            except notifications.MalformedLetter as error:
                logs.logger().error("letter_unreadable", receiver=self.name, error=str(error)[:500])
                await self._doors.put(*dead_letters.unreadable(self.name, job.body, str(error)))
                await job.done()
                continue
            letter = queue.Delivery(
                number=job.number,
                notification=notification,
                is_replay=dead_letters.REPLAY in job.headers,
            )
            entry = self._entries.get(notification.group)
            if not self._is_extra(letter) and entry is not None and entry.id == notification.id:
                # it was sent, and somebody ended before it could leave the outbox
                await job.done()
                await self._report(inputs.Delivered(notification))
                continue
            self._jobs[job.number] = job
            await self._hear(letter)

    async def _hold(self) -> None:
        while True:
            await asyncio.sleep(self._doors.hold_s)
            for job in list(self._jobs.values()):
                await job.hold()

    async def _deliver_whole(self, sending: queue.Send) -> None:
        """Deliver; when we are to end, what is on its way has a moment to be answered."""
        delivering = asyncio.ensure_future(self._deliver(sending))
        try:
            await asyncio.shield(delivering)
        except asyncio.CancelledError:
            await asyncio.wait([delivering], timeout=GOODBYE_S)
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)
            raise

    async def _deliver(self, sending: queue.Send) -> None:
        letter = sending.letter
        notification = self._now(letter)
        entry = self._entries.get(letter.notification.group)
        is_open = entry is not None and entry.firing and not self._is_extra(letter)
        if notification is None or (notification.is_silent and not self._is_extra(letter)):
            answer = result.Result(outcome=result.Outcome.TAKEN, detail="nothing to say")
        else:
            await self._doors.may_act()
            known = entry.data if entry is not None and is_open else {}
            answer = await self._attempt(notification, known)
            self._books.attempted(answer)
        if answer.kind is result.Kind.TAKEN:
            await self._settle(letter, notification, answer, attempts=sending.attempt)
        chance = random.random()  # noqa: S311  # jitter, not a secret
        await self._hear(queue.Answered(letter=letter, answer=answer, chance=chance))

    def _now(self, letter: queue.Delivery) -> notifications.Notification | None:
        """Return what is to be said; of a letter that is sent again by hand what is true by now.

        If that still fires and the receiver does not know, it is news like any other: the ledger
        knows of it, and so its end will be told.
        """
        notification = letter.notification
        if not letter.is_replay or notification.is_test:
            return notification
        entry = self._entries.get(notification.group)
        fires = self._doors.firing(notification.firing_ids)
        found = dead_letters.as_now(notification, fires=fires, told=entry.firing if entry else ())
        if found is not None and found.firing_ids:
            self._counted.add(letter.number)
        if found is None:
            logs.logger().info("replay_says_nothing_new", **delivery_log.facts(notification))
        return found

    async def _attempt(
        self, notification: notifications.Notification, known: Mapping[str, str]
    ) -> result.Result:
        """Send once. A fault of ours costs this letter, and not everybody every life of ours."""
        try:
            return await self._send(notification, known)
        except Exception as error:  # noqa: BLE001  # it would end the next process the same way
            logs.logger().error("send_broken", **delivery_log.facts(notification), exc_info=error)
            detail = f"a fault of the notifier: {type(error).__name__}"
            return result.Result(outcome=result.Outcome.BROKEN, detail=detail)

    async def _settle(
        self,
        letter: queue.Delivery,
        told: notifications.Notification | None,
        answer: result.Result,
        *,
        attempts: int,
    ) -> None:
        """Remember that it was told, before anybody forgets that it was to be."""
        notification = letter.notification
        # whoever was stopped meanwhile must not write over what its successor wrote
        await self._doors.may_act()
        if not self._is_extra(letter):
            entry = ledger.entry_of(notification, attempts=attempts, data=answer.data)
            self._entries[notification.group] = entry
            key = ledger.key_of(self.name, notification.group)
            await self._doors.remember(streams.LEDGER, key, ledger.encode(entry))
        await self._finish(letter)
        if told is not None and not told.is_silent:
            number = letter.number if self._is_extra(letter) else 0
            await self._books.delivered(told, answer, attempts=attempts, number=number)

    async def _bury(self, letter: queue.Delivery, answer: result.Result, *, attempts: int) -> None:
        notification, at = letter.notification, datetime.now(UTC)
        await self._doors.put(*dead_letters.bury(notification, answer, attempts=attempts, at=at))
        await self._books.failed(notification, answer, attempts=attempts, at=at)
        await self._finish(letter)

    async def _finish(self, letter: queue.Delivery) -> None:
        self._counted.discard(letter.number)
        job = self._jobs.pop(letter.number, None)
        if job is not None:
            await job.done()

    def _is_extra(self, letter: queue.Delivery) -> bool:
        """Tell whether it is a repeat or a test, of which neither ledger nor groups know."""
        is_again = letter.is_replay and letter.number not in self._counted
        return is_again or letter.notification.is_test
