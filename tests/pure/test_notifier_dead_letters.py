"""What a dead letter becomes when it is replayed later."""

import datetime as dt

import msgspec
import pytest

from muster import vocabulary
from muster.vocabulary import AlertState
from muster_notifier.delivery import dead_letters
from muster_notifier.routing import notifications

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
A, B = "a".rjust(16, "0"), "b".rjust(16, "0")


def alert(name: str, state: AlertState) -> vocabulary.AlertChanged:
    return vocabulary.AlertChanged(
        node="node-a",
        at=T0,
        plugin="plugin",
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.CRITICAL,
        state=state,
        fingerprint=name,
        summary="stuck",
        starts_at=T0,
        ends_at=T0 if state is AlertState.RESOLVED else None,
    )


def notification(*names: str, state: AlertState = AlertState.FIRING) -> notifications.Notification:
    fires = state is AlertState.FIRING
    return notifications.create(
        after="",
        receiver="r",
        group="g",
        labels={},
        reason=vocabulary.NotificationReason.FIRST,
        firing=[alert(name, state) for name in names] if fires else [],
        resolved=[] if fires else [alert(name, state) for name in names],
        send_resolved=True,
        at=T0,
    )


@pytest.mark.parametrize(
    ("fires", "notified", "is_sent"),
    [
        ({A, B}, (), True),
        ({A}, (), True),
        ({A}, (B,), True),
        ({A}, (A, B), False),
    ],
)
def test_what_still_fires_is_sent_to_a_receiver_that_does_not_know(
    fires: set[str], notified: tuple[str, ...], *, is_sent: bool
) -> None:
    dead = notification(A, B)
    assert dead_letters.as_of_now(dead, fires=fires, notified=notified) == (
        dead if is_sent else None
    )


def test_what_is_resolved_by_now_is_sent_as_resolved() -> None:
    current = dead_letters.as_of_now(notification(A, B), fires=set(), notified=())
    assert current is not None
    assert (current.state, current.firing, current.firing_ids) == (AlertState.RESOLVED, (), ())
    assert [(alert_.fingerprint, alert_.state) for alert_ in current.resolved] == [
        (A, AlertState.RESOLVED),
        (B, AlertState.RESOLVED),
    ]
    assert current.resolved_ids == (A, B)
    assert notifications.decode(msgspec.json.encode(current)) == current


def test_an_end_is_sent_unless_something_fires_again() -> None:
    dead = notification(A, state=AlertState.RESOLVED)
    assert dead_letters.as_of_now(dead, fires=set(), notified=()) == dead
    assert dead_letters.as_of_now(dead, fires={A}, notified=(A,)) is None
