"""One receiver's desk: the table in its docstring, and its laws on a virtual clock."""

import datetime as dt
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import vocabulary
from muster_notifier.delivery import queue
from muster_notifier.receivers import result
from muster_notifier.receivers.result import Outcome, Result
from muster_notifier.routing import notifications

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
TAKEN = Result(outcome=Outcome.TAKEN, detail="HTTP 200")
REFUSED = Result(outcome=Outcome.REJECTED, detail="HTTP 400")
AWAY = Result(outcome=Outcome.UNWELL, detail="HTTP 503")
NUMBERS = itertools.count(1)


def letter(group: str, name: str = "", *, is_replay: bool = False) -> queue.Delivery:
    number = next(NUMBERS)
    return queue.Delivery(
        number=number,
        is_replay=is_replay,
        notification=notifications.Notification(
            id=name or str(number),
            receiver="r",
            group=group,
            labels={},
            reason=vocabulary.NotificationReason.FIRST,
            firing=(),
            resolved=(),
            firing_ids=("a",),
            resolved_ids=(),
            episodes=(),
            send_resolved=True,
            at=T0,
        ),
    )


def make(
    rate: float = 1000.0, burst: int = 1000, retry_for_s: float = 100.0
) -> queue.DeliveryQueue:
    return queue.DeliveryQueue(rate_per_s=rate, burst=burst, retry_for_s=retry_for_s)


def answered(one: queue.Delivery, answer: Result) -> queue.Attempted:
    return queue.Attempted(delivery=one, result=answer, chance=1.0)


def test_what_is_new_is_sent_at_once_and_what_is_taken_is_done() -> None:
    found, a = make(), letter("a")
    assert found.receive(a, 0.0) == [queue.Send(a, 1)]
    assert found.receive(answered(a, TAKEN), 1.0) == [queue.Done(a, 1, TAKEN)]
    assert found.next_deadline() is None
    assert found.waiting == 0


def test_what_is_refused_is_dead() -> None:
    found, a = make(), letter("a")
    found.receive(a, 0.0)
    assert found.receive(answered(a, REFUSED), 1.0) == [queue.GivenUp(a, 1, REFUSED)]
    assert found.waiting == 0


def test_a_temporary_failure_is_tried_again_until_it_has_taken_too_long() -> None:
    found, a = make(retry_for_s=2.0), letter("a")
    found.receive(a, 0.0)
    assert found.receive(answered(a, AWAY), 0.0) == [queue.Postponed(a, AWAY)]
    assert found.next_deadline() == 0.5
    assert found.tick(0.5) == [queue.Send(a, 2)]
    assert found.receive(answered(a, AWAY), 0.5) == []
    assert found.tick(1.5) == [queue.Send(a, 3)]
    assert found.receive(answered(a, AWAY), 1.5) == [queue.GivenUp(a, 3, AWAY)]


@pytest.mark.parametrize(
    ("shows_repeats", "sent_at"),
    [(True, [0.0, 30.0, 150.0, 750.0, 4350.0]), (False, [0.0, 0.5, 1.5, 3.5, 7.5])],
)
def test_what_may_have_been_taken_is_sent_a_few_times_where_repeats_are_seen(
    sent_at: list[float], *, shows_repeats: bool
) -> None:
    unknown = Result(outcome=Outcome.TIMED_OUT, detail="", is_unknown=True)
    found = queue.DeliveryQueue(
        rate_per_s=1000, burst=9, retry_for_s=1e5, shows_repeats=shows_repeats
    )
    a = letter("a")
    out = found.receive(a, 0.0)
    for number, at in enumerate(sent_at, start=1):
        assert out == [queue.Send(a, number)]
        told = found.receive(answered(a, unknown), at)
        if number == len(sent_at):
            assert told == ([queue.GivenUp(a, number, unknown)] if shows_repeats else [])
        else:
            out = found.tick(sent_at[number])


def test_what_is_newer_takes_the_place_of_what_waits() -> None:
    found, old, new = make(), letter("a"), letter("a")
    found.receive(old, 0.0)
    found.receive(answered(old, AWAY), 0.0)
    assert found.receive(new, 0.1) == [queue.Superseded(old)]
    assert found.tick(0.5) == [queue.Send(new, 2)]


def test_what_is_newer_waits_behind_what_is_being_sent_and_the_newest_replaces_it() -> None:
    found, first, second, third = make(), letter("a"), letter("a"), letter("a")
    found.receive(first, 0.0)
    assert found.receive(second, 0.1) == []
    assert found.receive(third, 0.2) == [queue.Superseded(second)]
    assert found.receive(answered(first, TAKEN), 1.0) == [
        queue.Done(first, 1, TAKEN),
        queue.Send(third, 1),
    ]


def test_what_failed_gives_way_to_what_waits_behind_it() -> None:
    found, first, second = make(), letter("a"), letter("a")
    found.receive(first, 0.0)
    found.receive(second, 0.1)
    assert found.receive(answered(first, AWAY), 1.0) == [queue.Superseded(first)]
    assert found.tick(1.5) == [queue.Send(second, 2)]


def test_the_same_news_again_is_nothing_new() -> None:
    found, a, again = make(), letter("a", "news"), letter("a", "news")
    found.receive(a, 0.0)
    assert found.receive(again, 0.1) == [queue.Superseded(again)]


def test_a_replay_takes_nobodys_place() -> None:
    found, a, replay = make(), letter("a"), letter("a", is_replay=True)
    found.receive(a, 0.0)
    found.receive(answered(a, AWAY), 0.0)
    assert found.receive(replay, 0.1) == [queue.Send(replay, 1)]


def test_retry_after_closes_the_desk_to_everybody() -> None:
    limited = Result(outcome=Outcome.RATE_LIMITED, detail="HTTP 429", retry_after_s=30.0)
    found, a, b = make(), letter("a"), letter("b")
    found.receive(a, 0.0)
    found.receive(answered(a, limited), 0.0)
    assert found.receive(b, 1.0) == []
    assert found.next_deadline() == 30.0
    assert found.tick(29.9) == []
    assert found.tick(30.0) == [queue.Send(b, 1), queue.Send(a, 2)]


def test_whoever_is_away_is_tried_one_letter_at_a_time() -> None:
    found = make()
    letters = [letter(str(index)) for index in range(20)]
    sent = [out for one in letters for out in found.receive(one, 0.0)]
    assert len(sent) == queue.PARALLEL_MAX
    now = 0.0
    tries = []
    for _ in range(30):
        sending = [out for out in sent if isinstance(out, queue.Send)]
        sent = [o for s in sending for o in found.receive(answered(s.delivery, AWAY), now)]
        tries.append(len([out for out in sent if isinstance(out, queue.Send)]))
        if not any(isinstance(out, queue.Send) for out in sent):
            deadline = found.next_deadline()
            assert deadline is not None
            now = deadline
            sent = [*sent, *found.tick(now)]
    assert found.is_failing()
    assert max(tries[2:]) <= 1
    # every letter had its turn: none keeps the others back
    assert found.waiting == 20


def test_a_receiver_of_one_message_a_second_never_gets_more() -> None:
    found = make(rate=1.0, burst=1)
    sent: list[float] = []

    def heard(outs: Sequence[queue.Output], now: float) -> None:
        for out in outs:
            if isinstance(out, queue.Send):
                sent.append(now)
                heard(found.receive(answered(out.delivery, TAKEN), now), now)

    for index in range(50):
        heard(found.receive(letter(str(index)), index * 0.01), index * 0.01)
    while (deadline := found.next_deadline()) is not None:
        heard(found.tick(deadline), deadline)
    assert len(sent) == 50
    assert min(later - earlier for earlier, later in itertools.pairwise(sent)) >= 1 - 1e-6


Step = tuple[str, int, float]


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["new", "taken", "refused", "away", "limited", "time"]),
            st.integers(0, 3),
            st.floats(0.01, 20.0),
        ),
        max_size=80,
    )
)
def test_every_letter_ends_in_one_way_and_no_group_is_sent_twice_at_once(  # noqa: C901  # one law
    steps: list[Step],
) -> None:
    found = make(rate=2.0, burst=2, retry_for_s=30.0)
    sending: dict[int, queue.Delivery] = {}
    ended: list[int] = []
    given_: set[int] = set()
    now = 0.0

    def take(outs: Sequence[queue.Output]) -> None:
        for out in outs:
            match out:
                case queue.Send(one):
                    groups = [other.slot for other in sending.values()]
                    assert one.slot not in groups, "two of one group at once"
                    sending[one.number] = one
                case queue.Done(one) | queue.Superseded(one) | queue.GivenUp(one):
                    assert one.number not in sending, "ended while it was being sent"
                    ended.append(one.number)
                case queue.Postponed():
                    pass

    def answer(which: int, what: Result) -> None:
        one = sending.pop(sorted(sending)[which % len(sending)])
        take(found.receive(answered(one, what), now))

    for verb, which, seconds in steps:
        match verb:
            case "new":
                one = letter("abcd"[which])
                given_.add(one.number)
                take(found.receive(one, now))
            case "time":
                now += seconds
                deadline = found.next_deadline()
                if deadline is not None and deadline <= now:
                    take(found.tick(now))
            case _ if sending:
                what = {
                    "taken": TAKEN,
                    "refused": REFUSED,
                    "away": AWAY,
                    "limited": Result(outcome=Outcome.UNWELL, detail="", retry_after_s=seconds),
                }[verb]
                answer(which, what)
        assert len(sending) <= queue.PARALLEL_MAX
    while sending or found.next_deadline() is not None:
        while sending:
            answer(0, TAKEN)
        deadline = found.next_deadline()
        if deadline is not None:
            now = max(now, deadline)
            take(found.tick(now))
    assert sorted(ended) == sorted(given_)
    assert found.waiting == 0


def test_the_next_of_few_a_second_counts_from_the_answer_of_the_last() -> None:
    found, a, b = make(rate=1.0, burst=1), letter("a"), letter("b")
    assert found.receive(a, 0.0) == [queue.Send(a, 1)]
    assert found.receive(b, 0.1) == []
    assert found.receive(answered(a, TAKEN), 0.4) == [queue.Done(a, 1, TAKEN)]
    assert found.next_deadline() == 1.4
    assert found.tick(1.4) == [queue.Send(b, 1)]


def test_a_message_of_several_requests_costs_as_many_turns() -> None:
    found = make(rate=1.0, burst=1)
    two = Result(outcome=Outcome.TAKEN, detail="", requests=2)
    sent: list[float] = []

    def heard(outs: Sequence[queue.Output], now: float) -> None:
        for out in outs:
            if isinstance(out, queue.Send):
                sent.append(round(now, 3))
                heard(found.receive(answered(out.delivery, two), now), now)

    for index in range(4):
        heard(found.receive(letter(str(index)), 0.0), 0.0)
    while (deadline := found.next_deadline()) is not None:
        heard(found.tick(deadline), deadline)
    assert sent == [0.0, 2.0, 4.0, 6.0]


def test_a_wait_never_passes_a_longer_one_that_was_asked_for() -> None:
    asked = Result(outcome=Outcome.UNWELL, detail="", retry_after_s=7.0)
    assert result.delay_s(1, asked, chance=0.0) == 7.0
