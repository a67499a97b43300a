"""Delays double up to a maximum, and jitter only ever shortens them."""

from hypothesis import given
from hypothesis import strategies as st

from muster import backoff


def test_delays_double_from_the_first_to_the_longest() -> None:
    delays = backoff.Backoff(first_s=0.5, max_s=5)
    assert [delays.delay_s(failures) for failures in range(7)] == [0, 0.5, 1, 2, 4, 5, 5]
    assert delays.delay_s(-1) == 0


def test_jitter_is_the_random_share_of_a_delay() -> None:
    delays = backoff.Backoff(first_s=4, jitter=0.5)
    assert [delays.delay_s(1, chance=chance) for chance in (0.0, 0.5, 1.0)] == [2, 3, 4]
    assert backoff.Backoff(first_s=4, jitter=1).delay_s(1, chance=0) == 0


@given(failures=st.integers(1, 10**9), jitter=st.floats(0, 1), chance=st.floats(0, 1))
def test_no_number_of_failures_gives_a_delay_out_of_bounds(
    failures: int, jitter: float, chance: float
) -> None:
    delays = backoff.Backoff(first_s=0.02, max_s=30, jitter=jitter)
    longest_s = delays.delay_s(failures)
    assert 0.02 <= longest_s <= 30
    assert longest_s * (1 - jitter) * 0.999 <= delays.delay_s(failures, chance=chance) <= longest_s
