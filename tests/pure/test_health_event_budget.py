"""How many events of each node health reads."""

from muster_health.bus.event_budget import EventBudget
from muster_health.model import limits


def subject(node: str) -> str:
    return f"muster.event.{node}.p.device.added"


def test_a_burst_is_read_whole_and_a_flood_only_at_the_budgets_rate() -> None:
    budget = EventBudget()
    assert all(budget.wants(subject("a"), 0.0) for _ in range(2_000))
    assert not budget.wants(subject("a"), 0.0)
    read = sum(budget.wants(subject("a"), second / 1_000) for second in range(10_000))
    assert 1_990 <= read <= 2_010
    assert all(budget.wants(subject("b"), 10.0) for _ in range(2_000))


def test_a_node_is_read_again_until_nothing_is_skipped_and_named_if_that_lasts() -> None:
    budget = EventBudget()
    reads: list[float] = []
    noisy: list[tuple[float, limits.NodeNoisy]] = []
    for tenth in range(400):
        now = tenth / 10
        if now < 20:
            for _ in range(1_000):
                budget.wants(subject("node_a"), now)
        tokens, reports = budget.due(now)
        assert tokens in ([], ["node_a"])
        reads += [now] * len(tokens)
        noisy += [(now, report) for report in reports]
    assert reads[0] <= 2.5
    assert 20 <= reads[-1] <= 25
    first_at, first = noisy[0]
    assert 5 <= first_at <= 9
    assert (first.node, first.channel, first.senders) == ("node.a", limits.Channel.EVENTS, ())
    assert first.messages > 10_000
    assert noisy[-1][0] <= 23


def test_a_short_backlog_is_no_noise() -> None:
    budget = EventBudget()
    for _ in range(10_000):
        budget.wants(subject("a"), 0.0)
    due = [budget.due(second / 2) for second in range(40)]
    assert [tokens for tokens, _ in due if tokens] == [["a"], ["a"]]
    assert [noisy for _, noisy in due if noisy] == []


def test_the_table_of_budgets_is_bounded() -> None:
    budget = EventBudget()
    for number in range(100_000):
        budget.wants(subject(f"n{number}"), number / 100)
    assert len(budget._read) <= 1_000
