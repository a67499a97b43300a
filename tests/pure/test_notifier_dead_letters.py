"""What is sent when a dead letter is replayed later."""

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


def entry(
    *, firing: tuple[str, ...] = (), resolved: tuple[str, ...] = (), at: dt.datetime = T0
) -> notifications.LedgerEntry:
    return notifications.LedgerEntry(
        receiver="r",
        group="g",
        reason=vocabulary.NotificationReason.FIRST,
        firing=firing,
        resolved=resolved,
        at=at,
        id="last",
        attempts=1,
    )


def test_what_is_resolved_by_now_is_sent_as_resolved_with_an_id_of_its_own() -> None:
    sent = notification(A, B)
    current = dead_letters.as_of_now(sent, last=None)
    assert current is not None
    assert (current.state, current.firing, current.firing_ids) == (AlertState.RESOLVED, (), ())
    assert [(alert_.fingerprint, alert_.state) for alert_ in current.resolved] == [
        (A, AlertState.RESOLVED),
        (B, AlertState.RESOLVED),
    ]
    assert current.resolved_ids == (A, B)
    assert current.id == f"{sent.id}-resolved"
    assert notifications.decode(msgspec.json.encode(current)) == current


@pytest.mark.parametrize("state", AlertState)
@pytest.mark.parametrize(
    ("last", "is_sent"),
    [
        (None, True),
        (entry(resolved=(A,)), True),
        (entry(resolved=(A, B), at=T0 - dt.timedelta(seconds=1)), True),
        (entry(resolved=(A, B)), False),
        (entry(firing=(A, B)), False),
        (entry(firing=(A,)), False),
    ],
)
def test_an_end_is_sent_unless_the_receiver_knows_it_or_its_group_will_send_it(
    last: notifications.LedgerEntry | None, *, state: AlertState, is_sent: bool
) -> None:
    letter = notification(A, B, state=state)
    assert (dead_letters.as_of_now(letter, last=last) is not None) == is_sent


def test_a_delivered_notification_covers_the_dead_letters_about_its_alerts() -> None:
    later = T0 + dt.timedelta(seconds=1)
    assert dead_letters.is_covered(notification(A), entry(firing=(A, B), at=later))
    assert dead_letters.is_covered(notification(A, B), entry(firing=(A,), resolved=(B,)))
    assert not dead_letters.is_covered(notification(A, B), entry(firing=(A,), at=later))
    other = msgspec.structs.replace(entry(firing=(A,)), group="other")
    assert not dead_letters.is_covered(notification(A), other)
