"""`muster status` reports if nobody is notified of alerts."""

import datetime as dt

import msgspec
import pytest

from muster import vocabulary, wording
from muster.cli import status
from muster.fleet import health_state
from muster_health.bus import notified

T0 = dt.datetime(2026, 1, 1, 12, 0, tzinfo=dt.UTC)
NOBODY = "nobody is notified yet: "
NO_NOTIFIER = (
    "no notifier has published its receivers; check that one is running and connected to NATS"
)


def announced(**receivers: str) -> vocabulary.ReceiversConfigured:
    return vocabulary.ReceiversConfigured(
        node=vocabulary.FLEET, at=T0, receivers=receivers, interval_s=60.0
    )


@pytest.mark.parametrize(
    ("receivers", "problem"),
    [
        ({"console": "console"}, NOBODY),
        ({"a": "console", "b": "console"}, NOBODY),
        ({"console": "console", "ops": "slack"}, ""),
        ({"ops": "email"}, ""),
    ],
)
def test_nobody_is_notified_until_there_is_a_receiver_besides_the_console(
    receivers: dict[str, str], problem: str
) -> None:
    known = notified.ReceiverStatus(began_at=100.0)
    known.observe(announced(**receivers), 110.0)
    assert known.problem(120.0)[: len(NOBODY)] == problem


def test_a_notifier_that_says_nothing_for_three_minutes_is_reported() -> None:
    known = notified.ReceiverStatus(began_at=100.0)
    assert [known.problem(now) for now in (100.0, 280.0, 281.0)] == ["", "", NO_NOTIFIER]
    known.observe(announced(ops="slack"), 300.0)
    assert [known.problem(now) for now in (480.0, 481.0)] == ["", NO_NOTIFIER]


def test_a_list_has_the_first_few_and_how_many_more_there_are() -> None:
    assert wording.listed(["b", "a"]) == "b, a"
    assert wording.listed(["d", "c", "b", "a", "a"]) == "d, c, b and 2 more"
    assert wording.name_list(["b", "a", "b"], most=1) == "a and 1 more"


def test_status_shows_it_as_a_note() -> None:
    state = health_state.decode(
        b'{"plugins":[],"fleet":{},"service":{"leads":1,"notified":"nobody is notified yet: x"}}'
    )
    assert state.caveats() == ["nobody is notified yet: x"]
    assert "  note    nobody is notified yet: x" in status.lines(
        state, source="here", everything=False
    )


def test_the_notifiers_own_alerts_are_in_status_until_it_falls_silent() -> None:
    alert = vocabulary.AlertChanged(
        node=vocabulary.FLEET,
        at=T0,
        plugin="notifier",
        kind=vocabulary.AlertKind.DEAD_LETTERS,
        severity=vocabulary.Severity.CRITICAL,
        state=vocabulary.AlertState.FIRING,
        fingerprint="0" * 16,
        summary="notifications could not be delivered",
        starts_at=T0,
    )
    known = notified.ReceiverStatus(began_at=100.0)
    known.observe(msgspec.structs.replace(announced(ops="slack"), alerts=(alert,)), 110.0)
    assert [known.alerts(now) for now in (290.0, 291.0)] == [(alert,), ()]
    service = {"leads": 1, "notifier_alerts": known.alerts(120.0)}
    state = health_state.decode(
        msgspec.json.encode({"plugins": [], "fleet": {}, "service": service})
    )
    lines = status.lines(state, source="here", everything=False)
    assert "alerts    1 firing" in lines
    assert lines[-1].endswith("critical  dead_letters  notifications could not be delivered")


def test_receivers_that_the_notifier_leaves_out_are_named() -> None:
    known = notified.ReceiverStatus(began_at=100.0)
    known.observe(msgspec.structs.replace(announced(ops="slack"), refused=("a", "b")), 110.0)
    left_out = "the notifier ignores receivers, as its log explains: a, b"
    assert known.problem(120.0) == left_out
    known.observe(msgspec.structs.replace(announced(log="console"), refused=("a", "b")), 110.0)
    assert known.problem(120.0).endswith(f"; {left_out}")
