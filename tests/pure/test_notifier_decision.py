import pytest

from muster.vocabulary import NotificationReason as Reason
from muster_notifier.routing import decision, groups

REPEAT_S = 100.0


def notified(firing: str, resolved: str = "", *, at: float = 0.0) -> groups.Notified:
    return groups.Notified(firing=frozenset(firing), resolved=frozenset(resolved), at=at, id="")


@pytest.mark.parametrize(
    ("entry", "firing", "resolved", "send_resolved", "now", "answer"),
    [
        pytest.param(None, "a", "", True, 0, Reason.FIRST, id="1 nobody notified, something fires"),
        pytest.param(None, "", "", True, 0, None, id="1 nobody notified, nothing fires"),
        pytest.param(None, "", "a", True, 0, None, id="1 fired and over before any notification"),
        pytest.param(notified("a"), "ab", "", True, 1, Reason.NEW_ALERTS, id="2 one more fires"),
        pytest.param(notified("a"), "b", "a", True, 1, Reason.NEW_ALERTS, id="2 goes before 4"),
        pytest.param(
            notified("", "a"), "a", "", True, 1, Reason.FIRST, id="2 fires again after all"
        ),
        pytest.param(notified("a"), "", "a", True, 1, Reason.ALL_RESOLVED, id="3 all over"),
        pytest.param(
            notified("a"), "", "a", False, 1, Reason.ALL_RESOLVED, id="3 wish does not matter"
        ),
        pytest.param(notified("", "a"), "", "a", True, 1, None, id="3 all over and notified"),
        pytest.param(
            notified("", "a"), "", "b", True, 999, None, id="3 never repeats what is over"
        ),
        pytest.param(
            notified("ab"), "a", "b", True, 1, Reason.NEW_RESOLVED, id="4 one of two over"
        ),
        pytest.param(notified("ab"), "a", "b", False, 1, None, id="4 not wished for"),
        pytest.param(notified("a", "b"), "a", "b", True, 1, None, id="4 notified already"),
        pytest.param(notified("a"), "a", "", True, REPEAT_S, Reason.REPEAT, id="6 old enough"),
        pytest.param(notified("ab"), "a", "b", False, REPEAT_S, Reason.REPEAT, id="6 fewer fire"),
        pytest.param(notified("a"), "a", "", True, REPEAT_S - 1, None, id="7 otherwise"),
    ],
)
def test_alertmanagers_table_decides(
    *,
    entry: groups.Notified | None,
    firing: str,
    resolved: str,
    send_resolved: bool,
    now: float,
    answer: Reason | None,
) -> None:
    assert (
        decision.reason_to_notify(
            entry,
            firing=set(firing),
            resolved=set(resolved),
            send_resolved=send_resolved,
            repeat_interval_s=REPEAT_S,
            now=now,
        )
        is answer
    )


@pytest.mark.parametrize(
    ("firing", "resolved", "now", "answer"),
    [
        ("a", "", 1, Reason.CHANGED),
        ("a", "", REPEAT_S, Reason.CHANGED),
        ("ab", "", 1, Reason.NEW_ALERTS),
        ("a", "b", 1, Reason.NEW_RESOLVED),
        ("", "a", 1, Reason.ALL_RESOLVED),
    ],
)
def test_a_changed_alert_is_sent_unless_there_is_a_better_reason(
    firing: str, resolved: str, now: float, answer: Reason
) -> None:
    reason = decision.reason_to_notify(
        notified("a"),
        firing=set(firing),
        resolved=set(resolved),
        send_resolved=True,
        repeat_interval_s=REPEAT_S,
        now=now,
        has_changed=True,
    )
    assert reason is answer
