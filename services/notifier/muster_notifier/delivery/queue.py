"""Pure: the delivery queue of one receiver; decides what to send, when, and when to give up.

| delivery | condition or result | next |
|---|---|---|
| new | no other delivery of its group is queued | waits |
| new | another delivery of its group is waiting | replaces that delivery, which is superseded |
| new | another delivery of its group is being sent | waits behind it; only the newest waits |
| new | the same notification is already queued | superseded |
| new | a test message, less than `TEST_EVERY_S` after another | given up, without an attempt |
| being sent | accepted | delivered |
| being sent | refused | dead letter |
| being sent | temporary failure, and a newer delivery waits | superseded by the newer one |
| being sent | temporary failure, after `retry_for_s` | dead letter |
| being sent | any failure of a test message | given up, without a dead letter |
| being sent | perhaps accepted, `shows_repeats` | retried after `UNKNOWN_S`, then dead letter |
| being sent | temporary failure | postponed: waits for its back-off |

A token bucket limits the receiver's rate, and `Retry-After` pauses the whole queue. After
`FAILURES_MAX` failures in a row, only one delivery at a time is tried, with a back-off in between:
a receiver that recovers must not be flooded, and one bad notification must not delay the others.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muster import pacing, vocabulary
from muster_notifier.receivers import results
from muster_notifier.routing import notifications

PARALLEL_MAX: Final = 4
FAILURES_MAX: Final = 5
TEST_EVERY_S: Final = 5
"""The minimum seconds between test messages; messages that resolve a test have their own limit."""
UNKNOWN_S: Final = (30.0, 120.0, 600.0, 3600.0)
"""Delays before a message that may have arrived is resent to a receiver that shows duplicates."""

_SLOW_PER_S: Final = 10.0
NOT_SENT: Final = "not sent: "
"""The beginning of a result's detail if the notifier did not send the message."""
_TESTED: Final = results.Result(
    results.Outcome.RATE_LIMITED,
    f"{NOT_SENT}the receiver has just been tested; wait {TEST_EVERY_S} s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One message in the outbox; `number` is its sequence number in the stream."""

    number: int
    notification: notifications.Notification
    is_replay: bool = False

    @property
    def slot(self) -> str:
        """The name of the delivery's slot: its group, or for a replay or test its group and id.

        In a slot, one delivery at a time is sent, and only the newest one waits.
        """
        group, id_ = self.notification.group, self.notification.id
        return f"{group} {id_}" if self.is_replay or self.notification.is_test else group


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """The result of an attempt; `chance` is random, from 0 to 1, for the jitter."""

    delivery: Delivery
    result: results.Result
    chance: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send this delivery; `attempt` counts its attempts, from 1."""

    delivery: Delivery
    attempt: int


@dataclass(frozen=True, slots=True)
class Done:
    """The receiver accepted the delivery."""

    delivery: Delivery
    attempts: int
    result: results.Result


@dataclass(frozen=True, slots=True)
class Postponed:
    """The first attempt failed; the delivery will be retried."""

    delivery: Delivery
    result: results.Result


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer notification replaces this delivery, or the same notification is already queued."""

    delivery: Delivery


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The delivery is not retried: it was refused, or failed for too long.

    A test message is also given up after any failure, or if it came too soon after another one.
    """

    delivery: Delivery
    attempts: int
    result: results.Result


Input = Delivery | Attempted
Output = Send | Done | Postponed | Superseded | GivenUp


@dataclass(slots=True, kw_only=True)
class _Slot:
    """A delivery and the newest one that waits behind it.

    `failures` in a row determine the back-off; they include those of superseded deliveries.
    """

    delivery: Delivery
    began_at: float
    due_at: float
    attempts: int = 0
    failures: int = 0
    unknown: int = 0
    is_sending: bool = False
    next: Delivery | None = None

    def replace(self, delivery: Delivery, now: float) -> None:
        """Continue with another delivery, behind which none waits."""
        self.delivery, self.next = delivery, None
        self.began_at, self.attempts, self.unknown = now, 0, 0


class DeliveryQueue:
    """The state machine of one receiver's delivery queue; see the module's docstring."""

    def __init__(
        self,
        *,
        rate_per_s: float,
        burst: int,
        retry_for_s: float,
        parallel_max: int = PARALLEL_MAX,
        shows_repeats: bool = False,
    ) -> None:
        """Create a queue that sends at most `parallel_max` deliveries at the same time."""
        self._shows_repeats = shows_repeats
        self._parallel_max = parallel_max
        self._is_slow = rate_per_s <= _SLOW_PER_S
        self._bucket = pacing.TokenBucket(per_s=rate_per_s, burst=burst, now=0.0)
        self._now = 0.0
        self._retry_for_s = retry_for_s
        self._slots: dict[str, _Slot] = {}
        self._due: list[tuple[float, int, str]] = []
        self._count = 0
        self._sending = 0
        self._failures = 0
        self._paused_until = 0.0
        self._tested_at: dict[vocabulary.NotificationReason, float] = {}

    def receive(self, event: Input, now: float) -> Sequence[Output]:
        """Add a delivery, or process the result of an attempt."""
        match event:
            case Delivery():
                return self._add(event, now)
            case Attempted():
                return self._on_result(event, now)

    def tick(self, now: float) -> Sequence[Output]:
        """Return a `Send` for each delivery that is due, within the limits."""
        return self._send_due(now)

    def next_deadline(self) -> float | None:
        """Return the time at which the next delivery can be sent.

        Return None if no delivery is waiting, or if the maximum number is being sent.
        """
        slot = self._first()
        if slot is None or self._sending >= self._sending_max():
            return None
        return max(slot.due_at, self._bucket.ready_at(self._now), self._paused_until)

    @property
    def waiting(self) -> int:
        """The number of deliveries in the queue, including those being sent."""
        return len(self._slots) + sum(slot.next is not None for slot in self._slots.values())

    def paused_s(self, now: float) -> float:
        """Return for how many more seconds the queue is paused; 0 if it is not paused."""
        return max(0.0, self._paused_until - now)

    def has_group(self, group: str) -> bool:
        """Return whether a notification about this group is queued; ignore replays and tests."""
        return group in self._slots

    def is_failing(self) -> bool:
        """Return whether the receiver has failed several times in a row."""
        return self._failures >= FAILURES_MAX

    def _add(self, delivery: Delivery, now: float) -> list[Output]:
        slot = self._slots.get(delivery.slot)
        if slot is None:
            if delivery.notification.is_test and not self._may_test(delivery, now):
                return [GivenUp(delivery, 0, _TESTED)]
            self._slots[delivery.slot] = _Slot(delivery=delivery, began_at=now, due_at=now)
            self._queue(delivery.slot, now)
            return self._send_due(now)
        newest = slot.next or slot.delivery
        if newest.notification.id == delivery.notification.id:
            return [Superseded(delivery)]
        out: list[Output] = []
        if slot.is_sending:
            if slot.next is not None:
                out.append(Superseded(slot.next))
            slot.next = delivery
            return out
        out.append(Superseded(slot.delivery))
        slot.replace(delivery, now)
        return [*out, *self._send_due(now)]

    def _may_test(self, delivery: Delivery, now: float) -> bool:
        """Return whether a test message may be sent now; if so, record that, to limit the rate."""
        reason = delivery.notification.reason
        last = self._tested_at.get(reason)
        if last is not None and now < last + TEST_EVERY_S:
            return False
        self._tested_at[reason] = now
        return True

    def _on_result(self, event: Attempted, now: float) -> list[Output]:
        delivery, result = event.delivery, event.result
        slot = self._slots[delivery.slot]
        assert slot.delivery == delivery, "the result belongs to another delivery"
        slot.is_sending = False
        self._sending -= 1
        self._take_tokens(result.requests - 1, now)
        if result.kind is results.Kind.TEMPORARY:
            self._failures += 1
            return [*self._retry(slot, event, now), *self._send_due(now)]
        self._failures = 0
        ended = Done if result.kind is results.Kind.ACCEPTED else GivenUp
        out = ended(delivery, slot.attempts, result)
        self._end(slot, now)
        return [out, *self._send_due(now)]

    def _take_tokens(self, more_requests: int, now: float) -> None:
        """Take a rate-limit token for every request beyond the first, even if none is left.

        At a slow rate, the wait for the next token begins at the result of this request: otherwise
        a slow request and the next one could arrive too close together.
        """
        if self._is_slow:
            self._bucket.refill_from(now)
        if more_requests:
            self._bucket.take(now, count=more_requests)

    def _retry(self, slot: _Slot, event: Attempted, now: float) -> list[Output]:
        delivery, result = event.delivery, event.result
        slot.failures += 1
        delay_s = results.delay_s(slot.failures, result, chance=event.chance)
        is_doubtful = result.is_unknown and self._shows_repeats
        is_test = delivery.notification.is_test
        is_over = is_test or (is_doubtful and slot.unknown >= len(UNKNOWN_S))
        if is_doubtful and not is_over:
            delay_s = max(delay_s, UNKNOWN_S[slot.unknown])
        slot.unknown += is_doubtful
        if result.retry_after_s is not None or self.is_failing():
            self._paused_until = max(self._paused_until, now + delay_s)
        if slot.next is not None:
            slot.replace(slot.next, now)
            self._wait(slot, now + delay_s)
            return [Superseded(delivery)]
        if is_over or now + delay_s > slot.began_at + self._retry_for_s:
            attempts = slot.attempts
            self._end(slot, now)
            return [GivenUp(delivery, attempts, result)]
        self._wait(slot, now + delay_s)
        return [Postponed(delivery, result)] if slot.attempts == 1 else []

    def _end(self, slot: _Slot, now: float) -> None:
        """Continue with the next delivery in this slot, or remove the slot."""
        name = slot.delivery.slot
        if slot.next is None:
            del self._slots[name]
            return
        slot.replace(slot.next, now)
        slot.failures = 0
        self._wait(slot, now)

    def _wait(self, slot: _Slot, until: float) -> None:
        slot.due_at = until
        self._queue(slot.delivery.slot, until)

    def _queue(self, name: str, at: float) -> None:
        self._count += 1
        heapq.heappush(self._due, (at, self._count, name))

    def _first(self) -> _Slot | None:
        """Return the slot that is due first, or None; drop outdated entries of the heap."""
        while self._due:
            at, _, name = self._due[0]
            slot = self._slots.get(name)
            if slot is not None and not slot.is_sending and slot.due_at == at:
                return slot
            heapq.heappop(self._due)
        return None

    def _send_due(self, now: float) -> list[Output]:
        self._now = now
        out: list[Output] = []
        while self._sending < self._sending_max():
            slot = self._first()
            ready_at = max(self._bucket.ready_at(now), self._paused_until)
            if slot is None or slot.due_at > now or ready_at > now:
                break
            heapq.heappop(self._due)
            self._bucket.take(now)
            slot.is_sending = True
            slot.attempts += 1
            self._sending += 1
            out.append(Send(slot.delivery, slot.attempts))
        return out

    def _sending_max(self) -> int:
        return 1 if self.is_failing() else self._parallel_max
