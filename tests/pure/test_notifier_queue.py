"""A receiver's delivery queue: the table in its docstring, and its properties."""

import datetime as dt
import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import vocabulary
from muster_notifier.delivery import queue
from muster_notifier.receivers import results
from muster_notifier.receivers.results import Outcome, Result
from muster_notifier.routing import notifications

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
TAKEN = Result(outcome=Outcome.ACCEPTED, detail="HTTP 200")
REFUSED = Result(outcome=Outcome.REJECTED, detail="HTTP 400")
AWAY = Result(outcome=Outcome.SERVER_ERROR, detail="HTTP 503")
NUMBERS = itertools.count(1)


def delivery_of(group: str, name: str = "", *, is_replay: bool = False) -> queue.Delivery:
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


def answered(delivery: queue.Delivery, answer: Result) -> queue.Attempted:
    return queue.Attempted(delivery=delivery, result=answer, chance=1.0)


def test_what_is_new_is_sent_at_once_and_what_is_taken_is_done() -> None:
    deliveries, a = make(), delivery_of("a")
    assert deliveries.receive(a, 0.0) == [queue.Send(a, 1)]
    assert deliveries.receive(answered(a, TAKEN), 1.0) == [queue.Done(a, 1, TAKEN)]
    assert deliveries.next_deadline() is None
    assert deliveries.waiting == 0


def test_what_is_refused_is_given_up() -> None:
    deliveries, a = make(), delivery_of("a")
    deliveries.receive(a, 0.0)
    assert deliveries.receive(answered(a, REFUSED), 1.0) == [queue.GivenUp(a, 1, REFUSED)]
    assert deliveries.waiting == 0


def test_a_test_message_is_sent_once() -> None:
    deliveries, a = make(), delivery_of("a")
    test = msgspec.structs.replace(a.notification, is_test=True)
    a = queue.Delivery(number=a.number, notification=test)
    assert deliveries.receive(a, 0.0) == [queue.Send(a, 1)]
    assert deliveries.receive(answered(a, AWAY), 1.0) == [queue.GivenUp(a, 1, AWAY)]
    assert deliveries.waiting == 0


@given(
    st.lists(
        st.tuples(
            st.floats(0, 7),
            st.sampled_from(
                [vocabulary.NotificationReason.FIRST, vocabulary.NotificationReason.ALL_RESOLVED]
            ),
        )
    )
)
def test_a_receiver_gets_one_test_message_of_a_reason_in_five_seconds_and_others_are_refused(
    tests: list[tuple[float, vocabulary.NotificationReason]],
) -> None:
    deliveries, now = make(), 0.0
    sent_at: dict[vocabulary.NotificationReason, float] = {}
    for pause_s, reason in tests:
        now += pause_s
        a = delivery_of("a")
        changed = msgspec.structs.replace(a.notification, is_test=True, reason=reason)
        test = queue.Delivery(number=a.number, notification=changed)
        (output,) = deliveries.receive(test, now)
        if reason in sent_at and now < sent_at[reason] + 5:
            assert isinstance(output, queue.GivenUp)
            assert (output.delivery, output.attempts) == (test, 0)
            assert output.result == Result(
                Outcome.RATE_LIMITED, "not sent: the receiver has just been tested; wait 5 s"
            )
        else:
            assert output == queue.Send(test, 1)
            sent_at[reason] = now
            deliveries.receive(answered(test, TAKEN), now)
    assert deliveries.waiting == 0


def test_a_temporary_failure_is_tried_again_until_it_has_taken_too_long() -> None:
    deliveries, a = make(retry_for_s=2.0), delivery_of("a")
    deliveries.receive(a, 0.0)
    assert deliveries.receive(answered(a, AWAY), 0.0) == [queue.Postponed(a, AWAY)]
    assert deliveries.next_deadline() == 0.5
    assert deliveries.tick(0.5) == [queue.Send(a, 2)]
    assert deliveries.receive(answered(a, AWAY), 0.5) == []
    assert deliveries.tick(1.5) == [queue.Send(a, 3)]
    assert deliveries.receive(answered(a, AWAY), 1.5) == [queue.GivenUp(a, 3, AWAY)]


@pytest.mark.parametrize(
    ("shows_repeats", "sent_at"),
    [(True, [0.0, 30.0, 150.0, 750.0, 4350.0]), (False, [0.0, 0.5, 1.5, 3.5, 7.5])],
)
def test_what_may_have_been_taken_is_sent_a_few_times_where_repeats_are_seen(
    sent_at: list[float], *, shows_repeats: bool
) -> None:
    unknown = Result(outcome=Outcome.TIMED_OUT, detail="", is_unknown=True)
    deliveries = queue.DeliveryQueue(
        rate_per_s=1000, burst=9, retry_for_s=1e5, shows_repeats=shows_repeats
    )
    a = delivery_of("a")
    out = deliveries.receive(a, 0.0)
    for number, at in enumerate(sent_at, start=1):
        assert out == [queue.Send(a, number)]
        ended = deliveries.receive(answered(a, unknown), at)
        if number == len(sent_at):
            assert ended == ([queue.GivenUp(a, number, unknown)] if shows_repeats else [])
        else:
            out = deliveries.tick(sent_at[number])


def test_what_is_newer_replaces_what_waits() -> None:
    deliveries, old, new = make(), delivery_of("a"), delivery_of("a")
    deliveries.receive(old, 0.0)
    deliveries.receive(answered(old, AWAY), 0.0)
    assert deliveries.receive(new, 0.1) == [queue.Superseded(old)]
    assert deliveries.tick(0.5) == [queue.Send(new, 1)]


def test_what_is_newer_waits_behind_what_is_being_sent_and_the_newest_replaces_it() -> None:
    deliveries, first, second, third = make(), delivery_of("a"), delivery_of("a"), delivery_of("a")
    deliveries.receive(first, 0.0)
    assert deliveries.receive(second, 0.1) == []
    assert deliveries.receive(third, 0.2) == [queue.Superseded(second)]
    assert deliveries.receive(answered(first, TAKEN), 1.0) == [
        queue.Done(first, 1, TAKEN),
        queue.Send(third, 1),
    ]


def test_what_failed_is_replaced_by_what_waits_behind_it() -> None:
    deliveries, first, second = make(), delivery_of("a"), delivery_of("a")
    deliveries.receive(first, 0.0)
    deliveries.receive(second, 0.1)
    assert deliveries.receive(answered(first, AWAY), 1.0) == [queue.Superseded(first)]
    assert deliveries.tick(1.5) == [queue.Send(second, 1)]


@pytest.mark.parametrize("waits", [False, True])
def test_attempts_are_those_of_one_delivery_and_the_back_off_is_that_of_its_group(
    *, waits: bool
) -> None:
    deliveries, old, new = make(), delivery_of("a"), delivery_of("a")
    deliveries.receive(old, 0.0)
    if waits:
        deliveries.receive(new, 0.0)
        deliveries.receive(answered(old, AWAY), 0.0)
    else:
        deliveries.receive(answered(old, AWAY), 0.0)
        deliveries.receive(new, 0.0)
    assert deliveries.tick(0.5) == [queue.Send(new, 1)]
    assert deliveries.receive(answered(new, AWAY), 0.5) == [queue.Postponed(new, AWAY)]
    assert deliveries.next_deadline() == 1.5
    assert deliveries.tick(1.5) == [queue.Send(new, 2)]
    assert deliveries.receive(answered(new, TAKEN), 1.5) == [queue.Done(new, 2, TAKEN)]


def test_the_same_notification_again_is_superseded() -> None:
    deliveries, a, again = make(), delivery_of("a", "same"), delivery_of("a", "same")
    deliveries.receive(a, 0.0)
    assert deliveries.receive(again, 0.1) == [queue.Superseded(again)]


def test_a_replay_replaces_nothing() -> None:
    deliveries, a, replay = make(), delivery_of("a"), delivery_of("a", is_replay=True)
    deliveries.receive(a, 0.0)
    deliveries.receive(answered(a, AWAY), 0.0)
    assert deliveries.receive(replay, 0.1) == [queue.Send(replay, 1)]


def test_retry_after_pauses_the_whole_queue() -> None:
    limited = Result(outcome=Outcome.RATE_LIMITED, detail="HTTP 429", retry_after_s=30.0)
    deliveries, a, b = make(), delivery_of("a"), delivery_of("b")
    deliveries.receive(a, 0.0)
    deliveries.receive(answered(a, limited), 0.0)
    assert deliveries.receive(b, 1.0) == []
    assert deliveries.next_deadline() == 30.0
    assert deliveries.tick(29.9) == []
    assert deliveries.tick(30.0) == [queue.Send(b, 1), queue.Send(a, 2)]


def test_a_receiver_that_fails_is_tried_one_delivery_at_a_time() -> None:
    deliveries = make()
    added = [delivery_of(str(index)) for index in range(20)]
    sent = [out for delivery in added for out in deliveries.receive(delivery, 0.0)]
    assert len(sent) == queue.PARALLEL_MAX
    now = 0.0
    tries = []
    for _ in range(30):
        sending = [out for out in sent if isinstance(out, queue.Send)]
        sent = [o for s in sending for o in deliveries.receive(answered(s.delivery, AWAY), now)]
        tries.append(len([out for out in sent if isinstance(out, queue.Send)]))
        if not any(isinstance(out, queue.Send) for out in sent):
            deadline = deliveries.next_deadline()
            assert deadline is not None
            now = deadline
            sent = [*sent, *deliveries.tick(now)]
    assert deliveries.is_failing()
    assert max(tries[2:]) <= 1
    # every delivery was tried: none blocks the others
    assert deliveries.waiting == 20


def test_a_receiver_of_one_message_a_second_never_gets_more() -> None:
    deliveries = make(rate=1.0, burst=1)
    sent: list[float] = []

    def process(outs: Sequence[queue.Output], now: float) -> None:
        for out in outs:
            if isinstance(out, queue.Send):
                sent.append(now)
                process(deliveries.receive(answered(out.delivery, TAKEN), now), now)

    for index in range(50):
        process(deliveries.receive(delivery_of(str(index)), index * 0.01), index * 0.01)
    while (deadline := deliveries.next_deadline()) is not None:
        process(deliveries.tick(deadline), deadline)
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
def test_every_delivery_ends_in_one_way_and_no_group_is_sent_twice_at_once(  # noqa: C901  # one law
    steps: list[Step],
) -> None:
    deliveries = make(rate=2.0, burst=2, retry_for_s=30.0)
    sending: dict[int, queue.Delivery] = {}
    ended: list[int] = []
    added: set[int] = set()
    now = 0.0

    def process(outs: Sequence[queue.Output]) -> None:
        for out in outs:
            match out:
                case queue.Send(delivery):
                    groups = [other.slot for other in sending.values()]
                    assert delivery.slot not in groups, "two of one group at once"
                    sending[delivery.number] = delivery
                case queue.Done(delivery) | queue.Superseded(delivery) | queue.GivenUp(delivery):
                    assert delivery.number not in sending, "ended while it was being sent"
                    ended.append(delivery.number)
                case queue.Postponed():
                    pass

    def answer(which: int, what: Result) -> None:
        delivery = sending.pop(sorted(sending)[which % len(sending)])
        process(deliveries.receive(answered(delivery, what), now))

    for verb, which, seconds in steps:
        match verb:
            case "new":
                delivery = delivery_of("abcd"[which])
                added.add(delivery.number)
                process(deliveries.receive(delivery, now))
            case "time":
                now += seconds
                deadline = deliveries.next_deadline()
                if deadline is not None and deadline <= now:
                    process(deliveries.tick(now))
            case _ if sending:
                what = {
                    "taken": TAKEN,
                    "refused": REFUSED,
                    "away": AWAY,
                    "limited": Result(
                        outcome=Outcome.SERVER_ERROR, detail="", retry_after_s=seconds
                    ),
                }[verb]
                answer(which, what)
        assert len(sending) <= queue.PARALLEL_MAX
    while sending or deliveries.next_deadline() is not None:
        while sending:
            answer(0, TAKEN)
        deadline = deliveries.next_deadline()
        if deadline is not None:
            now = max(now, deadline)
            process(deliveries.tick(now))
    assert sorted(ended) == sorted(added)
    assert deliveries.waiting == 0


def test_at_a_slow_rate_the_next_counts_from_the_result_of_the_last() -> None:
    deliveries, a, b = make(rate=1.0, burst=1), delivery_of("a"), delivery_of("b")
    assert deliveries.receive(a, 0.0) == [queue.Send(a, 1)]
    assert deliveries.receive(b, 0.1) == []
    assert deliveries.receive(answered(a, TAKEN), 0.4) == [queue.Done(a, 1, TAKEN)]
    assert deliveries.next_deadline() == 1.4
    assert deliveries.tick(1.4) == [queue.Send(b, 1)]


def test_a_message_of_several_requests_takes_as_many_tokens() -> None:
    deliveries = make(rate=1.0, burst=1)
    two = Result(outcome=Outcome.ACCEPTED, detail="", requests=2)
    sent: list[float] = []

    def process(outs: Sequence[queue.Output], now: float) -> None:
        for out in outs:
            if isinstance(out, queue.Send):
                sent.append(round(now, 3))
                process(deliveries.receive(answered(out.delivery, two), now), now)

    for index in range(4):
        process(deliveries.receive(delivery_of(str(index)), 0.0), 0.0)
    while (deadline := deliveries.next_deadline()) is not None:
        process(deliveries.tick(deadline), deadline)
    assert sent == [0.0, 2.0, 4.0, 6.0]


def test_a_retry_is_never_earlier_than_the_receiver_asked_for() -> None:
    delays = Result(outcome=Outcome.SERVER_ERROR, detail="", retry_after_s=7.0)
    assert results.delay_s(1, delays, chance=0.0) == 7.0
