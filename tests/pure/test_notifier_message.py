import datetime as dt

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from muster import vocabulary
from muster.vocabulary import AlertState
from muster_notifier import ledger, message
from muster_notifier.notification import Notification, identify

T0 = dt.datetime(2026, 1, 1, 12, 0, 0, tzinfo=dt.UTC)


def alert(
    fingerprint: str = "00000000000000aa",
    *,
    state: AlertState = AlertState.FIRING,
    summary: str = "device-plugin is frozen",
    pods: tuple[str, ...] = (),
    observed: str = "silent for 2.6 s",
) -> vocabulary.AlertChanged:
    return vocabulary.AlertChanged(
        node="node-a",
        at=T0,
        plugin="device-plugin",
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.CRITICAL,
        state=state,
        fingerprint=fingerprint,
        summary=summary,
        starts_at=T0,
        ends_at=T0 + dt.timedelta(minutes=2) if state is AlertState.RESOLVED else None,
        resource="nvidia.com/gpu",
        devices=("GPU-1",),
        pods=pods,
        evidence=(vocabulary.Evidence(source="health", observed=observed),),
        runbook="https://runbooks.example/stuck",
    )


def notification(
    *,
    firing: tuple[vocabulary.AlertChanged, ...],
    resolved: tuple[vocabulary.AlertChanged, ...] = (),
) -> Notification:
    reason = vocabulary.NotificationReason.FIRST
    return Notification(
        id=identify(
            after="", receiver="ops", group="{}", reason=reason, firing=firing, resolved=resolved
        ),
        receiver="ops",
        group='{kind="stuck",node="node-a"}',
        labels={"kind": "stuck", "node": "node-a"},
        reason=reason,
        firing=firing,
        resolved=resolved,
        send_resolved=True,
        decided_at=0.0,
    )


def test_a_message_says_what_where_since_when_why_who_is_hit_and_what_to_do() -> None:
    told = notification(
        firing=(alert(pods=("ml/train-0", "ml/train-1")),),
        resolved=(alert("00000000000000bb", state=AlertState.RESOLVED, summary="fell silent"),),
    )
    assert message.compose(told, at=T0).text.splitlines() == [
        "[FIRING] stuck on node-a: device-plugin is frozen (1 firing, 1 resolved)",
        "- firing critical: device-plugin is frozen",
        "  where: node-a device-plugin nvidia.com/gpu GPU-1, since 2026-01-01 12:00:00 UTC",
        "  health: silent for 2.6 s",
        "  pods that hold it: ml/train-0, ml/train-1",
        "- resolved critical: fell silent",
        (
            "  where: node-a device-plugin nvidia.com/gpu GPU-1, "
            "from 2026-01-01 12:00:00 UTC to 2026-01-01 12:02:00 UTC"
        ),
        "  what to do: https://runbooks.example/stuck",
        "  look closer: muster events --node node-a --since 1h",
    ]


def test_the_body_is_a_cloudevent_with_the_alerts_as_they_crossed_the_bus() -> None:
    fires, over = alert(), alert("00000000000000bb", state=AlertState.RESOLVED)
    told = notification(firing=(fires,), resolved=(over,))
    composed = message.compose(told, at=T0)
    assert msgspec.json.decode(composed.body) == {
        "specversion": "1.0",
        "id": told.id,
        "source": "/services/notifier",
        "type": "dev.muster.notification",
        "time": "2026-01-01T12:00:00Z",
        "datacontenttype": "application/json",
        "data": {
            "version": "1",
            "status": "firing",
            "reason": "first",
            "receiver": "ops",
            "groupKey": '{kind="stuck",node="node-a"}',
            "groupLabels": {"kind": "stuck", "node": "node-a"},
            "title": "[FIRING] stuck on node-a: device-plugin is frozen (1 firing, 1 resolved)",
            "text": composed.text,
            "alerts": msgspec.json.decode(msgspec.json.encode([fires, over])),
            "truncatedAlerts": 0,
            "truncatedPods": 0,
        },
    }
    assert composed.key == told.id


def test_a_storm_fits_into_a_body_and_what_was_left_out_is_counted() -> None:
    pods = tuple(f"namespace/pod-{index}" for index in range(10_000))
    storm = tuple(alert(f"{index:016x}", pods=pods, observed="x" * 2048) for index in range(300))
    composed = message.compose(notification(firing=storm), at=T0)
    data = msgspec.json.decode(composed.body)["data"]
    assert len(composed.body) <= message.BODY_BYTES_MAX
    assert data["truncatedAlerts"] == 300 - len(data["alerts"])
    assert data["truncatedPods"] == 9_950 * len(data["alerts"])
    assert "  and 280 more alerts" in composed.text.splitlines()


@given(summary=st.text(max_size=500), observed=st.text(max_size=500), pod=st.text(max_size=100))
def test_whatever_alerts_carry_a_line_stays_a_line(summary: str, observed: str, pod: str) -> None:
    told = notification(firing=(alert(summary=summary, observed=observed, pods=(pod,)),))
    lines = message.compose(told, at=T0).text.split("\n")
    assert len(lines) == 7
    assert all(line.isprintable() and len(line) <= 400 for line in lines)


@given(at=st.datetimes(timezones=st.just(dt.UTC)), attempts=st.integers(0, 1000))
def test_a_ledger_entry_comes_back_as_it_was(at: dt.datetime, attempts: int) -> None:
    entry = ledger.entry_of(notification(firing=(alert(),)), at=at, attempts=attempts)
    assert ledger.decode(ledger.encode(entry)) == entry


@given(value=st.binary(max_size=200))
def test_what_is_no_ledger_entry_is_told_apart(value: bytes) -> None:
    try:
        ledger.decode(value)
    except ledger.MalformedEntry:
        return
    raise AssertionError(f"{value!r} was read as an entry")
