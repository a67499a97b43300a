"""What a reader of a fleet reads next: every page in rounds, and single nodes that changed."""

from hypothesis import given
from hypothesis import strategies as st

from muster.fleet import rounds

PAGES = ("", "b", "d", "f")
"""The names after which the pages of a fleet begin."""


def read_page(reading: rounds.Rounds, now: float) -> str:
    """Read the next page; return the name after which it began."""
    after = reading.next_page(now)
    reading.receive_page(dict(zip(PAGES, [*PAGES[1:], ""], strict=True))[after])
    return after


def test_the_first_round_has_no_pauses_and_the_next_one_has() -> None:
    reading = rounds.Rounds(100.0)
    assert [(reading.pause_s(100.0), read_page(reading, 100.0)) for _ in range(5)] == [
        (0.0, ""),
        (0.0, "b"),
        (0.0, "d"),
        (0.0, "f"),
        (2.0, ""),
    ]


def test_a_fast_round_begins_at_the_first_page_wherever_the_slow_one_is() -> None:
    reading = rounds.Rounds(100.0)
    assert [read_page(reading, 110.0) for _ in range(6)][-2:] == ["", "b"]
    reading.want()
    assert [(reading.pause_s(110.0), read_page(reading, 110.0)) for _ in range(5)] == [
        (0.0, ""),
        (0.0, "b"),
        (0.0, "d"),
        (0.0, "f"),
        (2.0, ""),
    ]


def test_a_fast_round_waits_until_the_last_one_is_five_seconds_old() -> None:
    reading = rounds.Rounds(100.0)
    for _ in PAGES:
        read_page(reading, 100.0)
    reading.want()
    # meanwhile, the slow round continues
    assert (reading.pause_s(101.0), read_page(reading, 103.0)) == (2.0, "")
    assert (reading.pause_s(103.5), read_page(reading, 104.0)) == (1.5, "b")
    assert (reading.pause_s(105.0), read_page(reading, 105.0)) == (0.0, "")


def test_a_fast_round_is_finished_before_the_next_one_begins() -> None:
    reading = rounds.Rounds(100.0)
    seen = []
    for second in range(8):
        reading.want()
        seen.append(read_page(reading, 100.0 + 10 * second))
    assert seen == [*PAGES, *PAGES]


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 3)), max_size=60))
def test_after_a_round_was_wanted_every_page_is_read_within_two_fast_rounds(
    steps: list[tuple[bool, float]],
) -> None:
    reading, now = rounds.Rounds(0.0), 0.0
    unread: dict[str, float] = {}
    """The pages not read since a round was requested, and the time of that request."""
    for is_change, late_s in steps:
        if is_change:
            reading.want()
            unread = dict.fromkeys(PAGES, now) | unread
        now += reading.pause_s(now) + late_s
        unread.pop(read_page(reading, now), None)
        limit_s = rounds.FAST_S + 3.0 * (2 * len(PAGES) + 1) + rounds.PAGE_S
        assert all(now - since <= limit_s for since in unread.values())


def test_a_few_changed_nodes_are_read_one_by_one_and_of_more_none_is_forgotten() -> None:
    changed = rounds.ChangedNodes()
    assert changed.take() == ()
    few = tuple(f"n{number}" for number in range(20))
    for name in (*few, "n3"):
        changed.add(name)
    assert (changed.take(), changed.take()) == (few, ())
    for number in range(1_000):
        changed.add(f"n{number}")
    # None: all nodes have to be read
    assert (changed.take(), changed.take()) == (None, ())
