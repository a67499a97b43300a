"""Pure: the delivery queue of one receiver: what is sent next, when, and when it is given up.

| a delivery | what happens | then |
|---|---|---|
| new | none of its group is here | waits |
| new | one of its group waits | replaces it; the older one is superseded |
| new | one of its group is being sent | waits behind it; only the newest waits |
| new | the same notification is here already | superseded |
| being sent | taken | delivered |
| being sent | refused | dead |
| being sent | temporary failure, a newer one waits behind it | superseded by that |
| being sent | temporary failure, tried for `retry_for_s` | dead |
| being sent | perhaps taken, and a repeat would be seen | tried again after `UNKNOWN_S`, or dead |
| being sent | temporary failure | postponed: waits for its back-off |

A token bucket keeps the receiver's rate, `Retry-After` pauses the whole queue, and after
`FAILURES_MAX` failures in a row one delivery at a time is tried, with a back-off between: a
receiver that comes back must not be flooded, and one bad notification must not keep the others
back.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from muster_notifier.receivers import result
from muster_notifier.routing import notifications

SENDING_MAX: Final = 4
FAILURES_MAX: Final = 5
_FEW_PER_S: Final = 10.0
UNKNOWN_S: Final = (30.0, 120.0, 600.0, 3600.0)
"""When to send again what may have been taken, where people would see it again each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One message of the outbox; `number` tells it from every other, also from its repeats."""

    number: int
    notification: notifications.Notification
    is_replay: bool = False

    @property
    def slot(self) -> str:
        """Letters of one slot are sent one after the other, and the newest replaces the rest."""
        kept = self.notification
        return f"{kept.group} {kept.id}" if self.is_replay or kept.is_test else kept.group


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What the receiver said to a letter; `chance` is random, from 0 to 1, for the jitter."""

    letter: Delivery
    answer: result.Result
    chance: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send this letter, for the nth time."""

    letter: Delivery
    attempt: int


@dataclass(frozen=True, slots=True)
class Done:
    """The receiver took it."""

    letter: Delivery
    attempts: int
    answer: result.Result


@dataclass(frozen=True, slots=True)
class Postponed:
    """It will be tried again, and was not before."""

    letter: Delivery
    answer: result.Result


@dataclass(frozen=True, slots=True)
class Superseded:
    """Something newer about the same group says all that this says."""

    letter: Delivery


@dataclass(frozen=True, slots=True)
class Dead:
    """It was refused, or was tried for too long."""

    letter: Delivery
    attempts: int
    answer: result.Result


Input = Delivery | Answered
Output = Send | Done | Postponed | Superseded | Dead


@dataclass(slots=True, kw_only=True)
class _Slot:
    letter: Delivery
    began_at: float
    due_at: float
    attempts: int = 0
    unknown: int = 0
    is_sending: bool = False
    next: Delivery | None = None


@dataclass(slots=True)
class _Bucket:
    """Tokens for sending; `burst` at most, `rate` more every second."""

    rate: float
    burst: int
    tokens: float = field(init=False)
    left: float = 0.0
    at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = float(self.burst)

    def ready_at(self, now: float) -> float:
        """Return when there is a token."""
        self._fill(now)
        return now if self.tokens >= 1 else now + (1 - self.tokens) / self.rate

    def take(self, now: float) -> None:
        """Take one."""
        self._fill(now)
        self.tokens -= 1
        self.left = self.tokens

    def answered(self, now: float, *, requests: int) -> None:
        """Take what a message of several requests used beside, also if there is none.

        Of few a second the next counts from the answer: what is sent a second apart arrives less
        apart if the first was slow.
        """
        if self.rate <= _FEW_PER_S:
            self.tokens, self.at = min(self.tokens, self.left), now
        self.tokens -= requests - 1

    def _fill(self, now: float) -> None:
        if self.at is not None:
            self.tokens = min(float(self.burst), self.tokens + (now - self.at) * self.rate)
        # a wait that was rounded must not be followed by another, ever shorter one
        if 1 - self.tokens < 1e-9:  # noqa: PLR2004  # seconds are known to a nanosecond
            self.tokens = max(1.0, self.tokens)
        self.at = now


class DeliveryQueue:
    """See the module."""

    def __init__(
        self,
        *,
        rate_per_s: float,
        burst: int,
        retry_for_s: float,
        at_once: int = SENDING_MAX,
        shows_repeats: bool = False,
    ) -> None:
        """Send at most `at_once` letters side by side."""
        self._shows_repeats = shows_repeats
        self._at_once = at_once
        self._bucket = _Bucket(rate_per_s, burst)
        self._retry_for_s = retry_for_s
        self._slots: dict[str, _Slot] = {}
        self._due: list[tuple[float, int, str]] = []
        self._count = 0
        self._sending = 0
        self._failures = 0
        self._closed_until = 0.0

    def receive(self, event: Input, now: float) -> Sequence[Output]:
        """Take a letter, or an answer."""
        match event:
            case Delivery():
                return self._take(event, now)
            case Answered():
                return self._answered(event, now)

    def tick(self, now: float) -> Sequence[Output]:
        """Send what is due."""
        return self._send_due(now)

    def next_deadline(self) -> float | None:
        """Return when something can be sent."""
        slot = self._first()
        if slot is None or self._sending >= self._sending_max():
            return None
        ready_at = self._bucket.ready_at(self._bucket.at or 0.0)
        return max(slot.due_at, ready_at, self._closed_until)

    @property
    def waiting(self) -> int:
        """How many letters are here."""
        return len(self._slots) + sum(slot.next is not None for slot in self._slots.values())

    def closed_s(self, now: float) -> float:
        """Return for how long the receiver has asked us to stay away."""
        return max(0.0, self._closed_until - now)

    def is_away(self) -> bool:
        """Tell whether the receiver has failed several times in a row."""
        return self._failures >= FAILURES_MAX

    def _take(self, letter: Delivery, now: float) -> list[Output]:
        slot = self._slots.get(letter.slot)
        if slot is None:
            self._slots[letter.slot] = _Slot(letter=letter, began_at=now, due_at=now)
            self._queue(letter.slot, now)
            return self._send_due(now)
        newest = slot.next or slot.letter
        if newest.notification.id == letter.notification.id:
            return [Superseded(letter)]
        out: list[Output] = []
        if slot.is_sending:
            if slot.next is not None:
                out.append(Superseded(slot.next))
            slot.next = letter
            return out
        out.append(Superseded(slot.letter))
        slot.letter, slot.began_at, slot.unknown = letter, now, 0
        return [*out, *self._send_due(now)]

    def _answered(self, event: Answered, now: float) -> list[Output]:
        letter, answer = event.letter, event.answer
        slot = self._slots[letter.slot]
        assert slot.letter == letter, "an answer to what was not sent"
        slot.is_sending = False
        self._sending -= 1
        self._bucket.answered(now, requests=answer.requests)
        out: list[Output] = []
        if answer.kind is result.Kind.TEMPORARY:
            self._failures += 1
            delay_s = result.delay_s(slot.attempts, answer, chance=event.chance)
            is_doubtful = answer.is_unknown and self._shows_repeats
            if is_doubtful and slot.unknown < len(UNKNOWN_S):
                delay_s = max(delay_s, UNKNOWN_S[slot.unknown])
            is_over = is_doubtful and slot.unknown >= len(UNKNOWN_S)
            slot.unknown += is_doubtful
            if answer.retry_after_s is not None or self._failures >= FAILURES_MAX:
                self._closed_until = max(self._closed_until, now + delay_s)
            if slot.next is not None:
                out.append(Superseded(letter))
                slot.letter, slot.next = slot.next, None
                slot.began_at, slot.unknown = now, 0
                self._wait(slot, now + delay_s)
            elif is_over or now + delay_s > slot.began_at + self._retry_for_s:
                out.append(Dead(letter, slot.attempts, answer))
                self._end(slot, now)
            else:
                if slot.attempts == 1:
                    out.append(Postponed(letter, answer))
                self._wait(slot, now + delay_s)
        elif answer.kind is result.Kind.TAKEN:
            self._failures = 0
            out.append(Done(letter, slot.attempts, answer))
            self._end(slot, now)
        else:
            self._failures = 0
            out.append(Dead(letter, slot.attempts, answer))
            self._end(slot, now)
        return [*out, *self._send_due(now)]

    def _end(self, slot: _Slot, now: float) -> None:
        """Go on with what waits behind, or forget the slot."""
        name = slot.letter.slot
        if slot.next is None:
            del self._slots[name]
            return
        slot.letter, slot.next = slot.next, None
        slot.began_at, slot.attempts, slot.unknown = now, 0, 0
        self._wait(slot, now)

    def _wait(self, slot: _Slot, until: float) -> None:
        slot.due_at = until
        self._queue(slot.letter.slot, until)

    def _queue(self, name: str, at: float) -> None:
        self._count += 1
        heapq.heappush(self._due, (at, self._count, name))

    def _first(self) -> _Slot | None:
        """Return the slot that is due first; what the heap says of others is out of date."""
        while self._due:
            at, _, name = self._due[0]
            slot = self._slots.get(name)
            if slot is not None and not slot.is_sending and slot.due_at == at:
                return slot
            heapq.heappop(self._due)
        return None

    def _send_due(self, now: float) -> list[Output]:
        out: list[Output] = []
        while self._sending < self._sending_max():
            slot = self._first()
            ready_at = max(self._bucket.ready_at(now), self._closed_until)
            if slot is None or slot.due_at > now or ready_at > now:
                break
            heapq.heappop(self._due)
            self._bucket.take(now)
            slot.is_sending = True
            slot.attempts += 1
            self._sending += 1
            out.append(Send(slot.letter, slot.attempts))
        return out

    def _sending_max(self) -> int:
        return 1 if self.is_away() else self._at_once
