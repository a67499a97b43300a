"""What a dead letter says when it is sent again later."""

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


def letter(*names: str, state: AlertState = AlertState.FIRING) -> notifications.Notification:
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
    ("fires", "told", "is_said"),
    [
        ({A, B}, (), True),
        ({A}, (), True),
        ({A}, (B,), True),
        ({A}, (A, B), False),
    ],
)
def test_what_still_fires_is_told_to_who_does_not_know(
    fires: set[str], told: tuple[str, ...], *, is_said: bool
) -> None:
    dead = letter(A, B)
    assert dead_letters.as_of_now(dead, fires=fires, notified=told) == (dead if is_said else None)


def test_what_is_over_by_now_is_told_as_over() -> None:
    found = dead_letters.as_of_now(letter(A, B), fires=set(), notified=())
    assert found is not None
    assert (found.state, found.firing, found.firing_ids) == (AlertState.RESOLVED, (), ())
    assert [(one.fingerprint, one.state) for one in found.resolved] == [
        (A, AlertState.RESOLVED),
        (B, AlertState.RESOLVED),
    ]
    assert found.resolved_ids == (A, B)
    assert notifications.decode(msgspec.json.encode(found)) == found


def test_an_end_is_told_unless_something_fires_again() -> None:
    dead = letter(A, state=AlertState.RESOLVED)
    assert dead_letters.as_of_now(dead, fires=set(), notified=()) == dead
    assert dead_letters.as_of_now(dead, fires={A}, notified=(A,)) is None
