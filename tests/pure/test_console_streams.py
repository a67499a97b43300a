"""What a page receives when it reconnects: each event once, and how many events it missed."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import vocabulary
from muster.fleet import model
from muster_console import alert_history, event_log, subscribers
from tests.worlds.alert_events import event

AT = datetime(2026, 1, 2, tzinfo=UTC)
ALL = event_log.Filter()


def feed_of(log: event_log.EventLog, instance: str = "me") -> subscribers.Feed:
    history = alert_history.AlertHistory()
    return subscribers.Feed(
        model.FleetModel(), history, log, instance=instance, is_connected=lambda: True
    )


def publish(log: event_log.EventLog, number: int) -> str:
    """Add an event to the log; return its id."""
    data = vocabulary.DeviceRemoved(
        node="a", at=AT, plugin="device-plugin", resource="nvidia.com/gpu", device_id=f"{number}"
    )
    made = event(data, number)
    log.receive(made)
    return made.id


def connected(
    feed: subscribers.Feed, last: str, wanted: event_log.Filter = ALL
) -> subscribers.Subscriber:
    """Connect a page whose last message had this id."""
    position = subscribers.position_of(last)
    assert position is not None
    return subscribers.Subscriber(
        feed,
        revision=position.revision,
        alerts=position.alerts,
        event=position.event,
        events=wanted,
    )


def tail_of(messages: list[subscribers.Message]) -> tuple[list[str], int, int]:
    """Return the ids of the events, and the numbers of skipped and dropped events."""
    tails = [json.loads(each.data) for each in messages if each.name == "events"]
    ids = [line["id"] for tail in tails for line in tail["events"]]
    return ids, *(sum(tail[name] for tail in tails) for name in ("skipped", "dropped"))


@given(st.lists(st.one_of(st.integers(0, 3), st.just("cut"), st.just("take")), max_size=30))
def test_a_page_shows_each_event_once_however_often_its_connection_breaks(
    steps: list[int | str],
) -> None:
    log = event_log.EventLog()
    feed = feed_of(log)
    published: list[str] = []
    shown: list[str] = []
    skipped, last = 0, "me-0-0-0"
    page = connected(feed, last)
    for step in (*steps, "cut", "take"):
        if isinstance(step, int):
            published += [publish(log, len(published) + more) for more in range(step)]
        elif step == "cut":
            page = connected(feed, last)
        else:
            messages = page.take(0.0, AT)
            ids, missed, _ = tail_of(messages)
            shown, skipped = shown + ids, skipped + missed
            last = str(messages[-1].position) if messages else last
    assert (shown, skipped) == (published, 0)


def test_a_message_that_was_lost_with_the_connection_is_sent_again() -> None:
    log = event_log.EventLog()
    feed = feed_of(log)
    publish(log, 0)
    state, _, events = connected(feed, "me-0-0-0").take(0.0, AT)
    publish(log, 1)
    tails = [tail_of(connected(feed, str(each.position)).take(0.0, AT)) for each in (state, events)]
    assert tails == [(["e0", "e1"], 0, 0), (["e1"], 0, 0)]


@pytest.mark.parametrize(
    ("wanted", "counts"), [(ALL, (1_800, 500)), (event_log.Filter(node="b*"), (0, 500))]
)
def test_events_that_a_page_missed_are_counted_and_those_no_longer_stored_named_as_such(
    wanted: event_log.Filter, counts: tuple[int, int]
) -> None:
    log = event_log.EventLog()
    publish(log, 0)
    page = connected(feed_of(log), "me-0-0-1", wanted)
    for number in range(event_log.EVENTS_MAX + 500):
        publish(log, number + 1)
    ids, skipped, dropped = tail_of(page.take(0.0, AT))
    left_out, gone = counts
    if wanted == ALL:
        assert (len(ids), skipped, dropped) == (subscribers.EVENTS_MAX, left_out + gone, 0)
    else:
        assert (ids, skipped, dropped) == ([], left_out, gone)


@given(st.text(max_size=60))
def test_any_other_text_is_no_position(text: str) -> None:
    position = subscribers.position_of(text)
    assert position is None or str(position) == text


@given(*(st.integers(0, 10**15 - 1) for _ in range(3)))
def test_a_position_is_read_as_it_was_written(revision: int, alerts: int, event: int) -> None:
    position = subscribers.Position(
        instance="0123456789ab", revision=revision, alerts=alerts, event=event
    )
    assert subscribers.position_of(str(position)) == position
    assert subscribers.position_of(f"{position} ") is None
