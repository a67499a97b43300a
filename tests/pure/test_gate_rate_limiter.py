"""The gate's rate limiter: which nodes are refused, and for how long; no other node ever is."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from muster_gate import config, rate_limiter, traffic_monitor
from muster_gate.rate_limiter import Decision, Penalty, Traffic, Violation

RATES = config.Rates(messages_per_s=10, bytes_per_s=1000, burst_s=10, connections=3)
NOTHING = Decision(disconnect=(), violations=())


def sent(id_: int, messages: int, bytes_: int = 0, *, node: str = "a", age_s: float = 1) -> Traffic:
    return Traffic(id_, node, messages, bytes_, age_s)


def test_a_node_that_exceeds_a_rate_is_refused_for_a_while_each_time_and_watched() -> None:
    made, now = rate_limiter.RateLimiter(RATES), 0.0
    assert not made.is_watched(now)
    for number in range(8):
        assert made.read("s", [], now=now) == NOTHING
        now += 1
        # the whole reserve, which a penalty refills, and what the rate allows in a second
        assert made.read("s", [sent(number, 110)], now=now) == NOTHING
        now += 1
        (violation,) = made.read("s", [sent(number, 121, 7)], now=now).violations
        assert violation == Violation(
            node="a",
            messages=121,
            bytes=7,
            seconds=2,
            reason="more than 10 messages a second",
            refused_s=10,
        )
        assert made.penalties(now) == [Penalty(node="a", rest_s=10)]
        # further messages change nothing, and its connections are closed
        assert made.read("s", [sent(number, 10**6)], now=now + 1) == Decision((number,), ())
        now += 3
        assert made.refused_s("a", now) == 7
        now += 7
        assert made.refused_s("a", now) == 0
        assert made.penalties(now) == []
        assert made.is_watched(now)
    now += 10
    assert not made.is_watched(now)
    assert made.read("s", [], now=now) == NOTHING


def test_after_a_penalty_a_node_has_only_what_it_regained() -> None:
    made = rate_limiter.RateLimiter(config.Rates(messages_per_s=10, burst_s=60, refuse_s=10))
    assert made.read("s", [], now=0) == NOTHING
    assert len(made.read("s", [sent(1, 10**6)], now=1).violations) == 1
    # 100 regained during the penalty, and 10 in the second in which they were sent
    assert made.read("s", [], now=11) == NOTHING
    assert made.read("s", [sent(2, 110)], now=12) == NOTHING
    assert len(made.read("s", [sent(2, 121)], now=13).violations) == 1


def test_bytes_count_as_messages_do_and_so_does_a_connection_that_was_never_read() -> None:
    made = rate_limiter.RateLimiter(RATES)
    # its server has not reported yet: it may have used its rate and its reserve
    assert made.closed("s", sent(1, 0, 11_000), now=1) is None
    violation = made.closed("s", sent(2, 0, 1_001), now=1)
    assert violation is not None
    assert (violation.reason, violation.bytes) == ("more than 1000 bytes a second", 12_001)
    # messages of an earlier report are not counted again
    again = rate_limiter.RateLimiter(RATES)
    for now in (1, 2, 3):
        assert again.read("s", [sent(1, 100)], now=now) == NOTHING
    assert again.closed("s", sent(1, 101), now=3) is None
    assert again.closed("s", sent(2, 29), now=3) is None
    assert again.closed("s", sent(3, 1), now=3) is not None
    assert again.read("s", [], now=4) == NOTHING


@given(st.integers(1, 40), st.floats(0.05, 0.9), st.booleans())
def test_many_short_connections_are_allowed_no_more_than_a_single_one(
    at_once: int,
    open_s: float,
    is_reported: bool,  # noqa: FBT001
) -> None:
    made = rate_limiter.RateLimiter(RATES)
    made.read("s", [], now=0)
    ids, total = itertools.count(), 0
    for step in range(1, 400):
        now = step * open_s
        # each connection is within the rate while it is open
        each = int(10 * open_s) + 1
        closed = [sent(next(ids), each, age_s=open_s) for _ in range(at_once)]
        total += each * at_once
        violations = [made.closed("s", connection, now=now) for connection in closed]
        if is_reported:
            violations += made.read("s", [], now=now).violations
        if any(violations):
            return
        # the reserve, and the rate
        assert total <= 100 + 10 * now + 1


def test_the_connections_of_a_node_share_its_rates_and_the_oldest_of_too_many_are_closed() -> None:
    made = rate_limiter.RateLimiter(RATES)
    three = [sent(number, 0, age_s=number + 1) for number in range(3)]
    assert made.read("s", three, now=0) == NOTHING
    assert made.read("t", [sent(7, 0, age_s=9), sent(8, 0, node="b", age_s=99)], now=0) == Decision(
        disconnect=(7,), violations=()
    )
    assert made.read("t", [], now=1) == NOTHING
    assert made.read("s", [*three, sent(3, 0)], now=1) == Decision((2,), ())
    # no connection exceeds the rate, but all together do
    for now in range(2, 14):
        each = [sent(number, now * 9 - 9) for number in range(2)]
        assert made.read("s", each, now=now).violations == ()
    (violation,) = made.read("s", [sent(number, 13 * 9) for number in range(2)], now=14).violations
    assert (violation.node, violation.messages, violation.seconds) == ("a", 234, 13)


def test_gates_adopt_what_others_announce_and_a_delay_never_adds_up() -> None:
    first, second = rate_limiter.RateLimiter(RATES), rate_limiter.RateLimiter(RATES)
    first.read("s", [sent(1, 1000)], now=0)
    now = 0.0
    for _ in range(1000):
        for speaker, hearer in ((first, second), (second, first)):
            for penalty in speaker.penalties(now):
                hearer.adopt(penalty, now=now + 0.5)
        now += 0.1
    assert (first.penalties(now), second.penalties(now)) == ([], [])
    second.adopt(Penalty(node="b", rest_s=1e9), now=now)
    second.adopt(Penalty(node="b", rest_s=-1), now=now)
    assert second.penalties(now) == [Penalty(node="b", rest_s=RATES.refuse_s)]


def test_a_gate_that_starts_does_not_punish_what_was_sent_over_days() -> None:
    made = rate_limiter.RateLimiter(RATES)
    assert made.read("s", [sent(1, 10**7, 10**9, age_s=10**6)], now=0) == NOTHING
    # after a pause, the rate applies to all the time since the last report
    assert made.read("s", [sent(1, 10**7 + 900, 10**9, age_s=10**6)], now=100) == NOTHING


def test_a_report_that_a_closed_connection_has_overtaken_does_not_punish_for_its_whole_life() -> (
    None
):
    made, long = rate_limiter.RateLimiter(RATES), sent(1, 10**6, age_s=10**6)
    assert made.read("s", [long], now=0) == NOTHING
    assert made.closed("s", long, now=1) is None
    assert made.read("s", [long], now=1.1) == NOTHING
    assert made.closed("s", long, now=1.2) is None


def test_a_node_is_who_the_server_verified_and_not_who_the_client_says() -> None:
    assert traffic_monitor.node_of("plugin_node-a", ()) == "node-a"
    assert traffic_monitor.node_of("plugin_node-b", ("plugin:x", "node:node-a")) == "node-a"
    assert traffic_monitor.node_of("UABC", ()) == ""


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["honest", "noisy"]),
        st.integers(0, 1),
        st.floats(0.1, 5),
        st.integers(0, 400),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_others_do_an_honest_node_is_never_refused_and_penalties_end(
    steps: Sequence[tuple[str, int, float, int]],
) -> None:
    """The honest node sends what its rate and reserve allow, on several connections."""
    gates = [rate_limiter.RateLimiter(RATES), rate_limiter.RateLimiter(RATES)]
    now, reserve, refilled_at = 0.0, 100.0, 0.0
    totals = {("honest", 0): 0, ("honest", 1): 0, ("noisy", 0): 0, ("noisy", 1): 0}
    for node, connection, wait_s, wanted in steps:
        amount = wanted
        now += wait_s
        if node == "honest":
            reserve = min(100.0, reserve + (now - refilled_at) * 10)
            refilled_at = now
            amount = min(wanted, int(reserve))
            reserve -= amount
        totals[node, connection] += amount
        for gate in gates:
            report = [
                Traffic(number, n, total, 0, now)
                for number, ((n, _), total) in enumerate(totals.items())
            ]
            decision = gate.read("s", report, now=now)
            assert {o.node for o in decision.violations} <= {"noisy"}
            assert set(decision.disconnect) <= {2, 3}
            assert gate.refused_s("honest", now) == 0
            assert gate.refused_s("noisy", now) <= RATES.refuse_s + 1e-9
        for penalty in gates[0].penalties(now):
            gates[1].adopt(penalty, now=now)
    for gate in gates:
        assert gate.penalties(now + RATES.refuse_s) == []
