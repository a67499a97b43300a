"""The state machine of one watched plugin: its table, and any sequence of facts and times."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies

from muster import vocabulary
from muster_plugin.watch import finding

Finding = vocabulary.WatchedFinding
Server = finding.Server
HOLDS = finding.Holds()
WELL = finding.Facts(server=Server.ANSWERS, listed=8, expected=8)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (WELL, finding.NOTHING),
        (finding.Facts(server=Server.ANSWERS), finding.NOTHING),
        (finding.Facts(server=Server.ANSWERS, listed=0), finding.NOTHING),
        (finding.Facts(server=Server.ANSWERS, listed=9, expected=8), finding.NOTHING),
        (finding.Facts(server=Server.UNKNOWN, listed=8, expected=8), None),
        (
            finding.Facts(server=Server.REMOVED, detail="gone", listed=8, expected=8),
            finding.Suspicion(
                Finding.SOCKET_REMOVED, "gone; the kubelet lists 8 of 8 devices", 2.0
            ),
        ),
        (
            finding.Facts(server=Server.ENDED, detail="refused", listed=0, expected=8),
            finding.Suspicion(Finding.NOT_SERVED, "refused; the kubelet lists 0 of 8 devices", 2.0),
        ),
        (
            finding.Facts(server=Server.ENDED, detail="refused", listed=0),
            finding.Suspicion(Finding.NOT_SERVED, "refused; the kubelet lists 0 devices", 2.0),
        ),
        (
            finding.Facts(server=Server.HALTED, detail="its process is stopped"),
            finding.Suspicion(Finding.NO_ANSWER, "its process is stopped", 3.0),
        ),
        (
            finding.Facts(server=Server.SILENT, detail="silent"),
            finding.Suspicion(Finding.NO_ANSWER, "silent", 0.0),
        ),
        (
            finding.Facts(server=Server.WRONG, detail="HTTP/1.1"),
            finding.Suspicion(Finding.WRONG_ANSWER, "HTTP/1.1", 20.0),
        ),
        (
            finding.Facts(server=Server.ABSENT, detail="2 NVIDIA GPUs"),
            finding.Suspicion(Finding.NOT_OFFERED, "2 NVIDIA GPUs", 0.0),
        ),
        (
            finding.Facts(server=Server.ANSWERS, listed=0, expected=8),
            finding.Suspicion(Finding.NOT_REGISTERED, "the kubelet lists 0 of 8 devices", 8.0),
        ),
        (
            finding.Facts(server=Server.ANSWERS, listed=8, expected=8, rival="two processes"),
            finding.Suspicion(
                Finding.TWO_SERVERS, "two processes; the kubelet lists 8 of 8 devices", 30.0
            ),
        ),
        (
            finding.Facts(server=Server.UNKNOWN, listed=7, expected=8),
            finding.Suspicion(Finding.FEWER_DEVICES, "the kubelet lists 7 of 8 devices", 30.0),
        ),
        (
            finding.Facts(server=Server.ANSWERS, files_missing=("a/b=1", "a/b=2", "a/b=3", "c")),
            finding.Suspicion(
                Finding.FILES_MISSING,
                "no CDI spec describes a/b=1, a/b=2, a/b=3 and 1 more; "
                "containers that use them cannot start again",
                30.0,
            ),
        ),
    ],
    ids=str,
)
def test_the_first_row_that_applies_counts(
    facts: finding.Facts, expected: finding.Suspicion | None
) -> None:
    assert finding.suspicion(facts, HOLDS) == expected


def test_a_crash_that_is_back_within_two_seconds_is_no_finding() -> None:
    machine = finding.FindingMachine(HOLDS)
    machine.observe(WELL, 0.0)
    machine.observe(finding.Facts(server=Server.ENDED), 10.0)
    assert machine.next_deadline() == 12.0
    machine.observe(WELL, 11.9)
    machine.tick(20.0)
    assert (machine.finding, machine.text, machine.next_deadline()) == (Finding.NONE, "", None)


def test_a_finding_lasts_while_nothing_certain_is_known() -> None:
    machine = finding.FindingMachine(HOLDS)
    machine.observe(finding.Facts(server=Server.SILENT, detail="silent"), 0.0)
    machine.observe(finding.Facts(server=Server.UNKNOWN), 1.0)
    assert (machine.finding, machine.text) == (Finding.NO_ANSWER, "silent")
    machine.observe(WELL, 2.0)
    assert (machine.finding, machine.text) == (Finding.NONE, "")


def test_a_finding_about_a_count_lasts_while_the_count_is_unknown() -> None:
    machine = finding.FindingMachine(HOLDS)
    machine.observe(finding.Facts(server=Server.ANSWERS, listed=0, expected=8), 0.0)
    machine.tick(8.0)
    findings = []
    for facts in (finding.Facts(server=Server.ANSWERS, expected=8, is_held=True), WELL):
        machine.observe(facts, 9.0)
        findings.append(machine.finding)
    assert findings == [Finding.NOT_REGISTERED, Finding.NONE]


def test_no_finding_begins_while_the_kubelet_is_away() -> None:
    machine = finding.FindingMachine(HOLDS)
    removed = finding.Facts(server=Server.REMOVED, is_held=True)
    machine.observe(removed, 0.0)
    machine.tick(100.0)
    assert (machine.finding, machine.next_deadline()) == (Finding.NONE, None)
    machine.observe(finding.Facts(server=Server.REMOVED), 101.0)
    assert machine.finding is Finding.SOCKET_REMOVED


FACTS = strategies.builds(
    finding.Facts,
    server=strategies.sampled_from(Server),
    detail=strategies.just("detail"),
    listed=strategies.sampled_from([None, 0, 1, 2]),
    expected=strategies.sampled_from([None, 0, 1, 2]),
    rival=strategies.sampled_from(["", "two processes"]),
    files_missing=strategies.sampled_from([(), ("a/b=c",)]),
    is_held=strategies.booleans(),
)


@hypothesis.given(
    strategies.lists(strategies.tuples(FACTS, strategies.floats(0.0, 40.0)), max_size=30)
)
def test_a_finding_begins_only_when_its_condition_has_held_for_its_time(
    steps: list[tuple[finding.Facts, float]],
) -> None:
    machine = finding.FindingMachine(HOLDS)
    history: list[tuple[float, finding.Suspicion | None]] = []
    now = 0.0
    for facts, wait_s in steps:
        before = machine.finding
        deadline = machine.next_deadline()
        if deadline is not None and deadline <= now + wait_s:
            machine.tick(deadline)
            assert machine.next_deadline() is None
            assert machine.finding is not before
            before = machine.finding
        now += wait_s
        history.append((now, finding.suspicion(facts, HOLDS)))
        machine.observe(facts, now)
        after = machine.next_deadline()
        assert after is None or after > now
        assert (machine.text == "") == (machine.finding is Finding.NONE)
        if history[-1][1] == finding.NOTHING:
            is_about_counts = before in {Finding.NOT_REGISTERED, Finding.FEWER_DEVICES}
            lasts = is_about_counts and facts.listed is None
            assert machine.finding is (before if lasts else Finding.NONE)
        if machine.finding not in {before, Finding.NONE}:
            assert not facts.is_held
            assert now - _held_since(history, machine.finding) >= _hold_s(history[-1][1])


def _held_since(history: list[tuple[float, finding.Suspicion | None]], begun: Finding) -> float:
    """Return when the condition began to hold; uncertain facts do not interrupt it."""
    held = itertools.takewhile(
        lambda each: each[1] is None or each[1].finding is begun, reversed(history)
    )
    return min(at for at, _ in held)


def _hold_s(suspected: finding.Suspicion | None) -> float:
    assert suspected is not None
    return suspected.hold_s
