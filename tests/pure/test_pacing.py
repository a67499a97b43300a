"""A bucket never gives more than its burst and its rate allow; delays double up to a maximum."""

from hypothesis import given
from hypothesis import strategies as st

from muster import pacing

GAPS = st.lists(st.floats(0, 10), max_size=60)


def test_a_bucket_allows_its_burst_and_then_its_rate() -> None:
    bucket = pacing.TokenBucket(per_s=0.5, burst=2, now=100)
    assert [bucket.try_take(100) for _ in range(3)] == [True, True, False]
    assert bucket.ready_at(100) == 102
    assert not bucket.has_token(101.9)
    assert bucket.has_token(102)
    assert not bucket.is_full(102)
    assert bucket.is_full(104)


def test_tokens_that_were_taken_in_advance_are_waited_for() -> None:
    bucket = pacing.TokenBucket(per_s=1, burst=1, now=0)
    bucket.take(0, count=3)
    assert bucket.ready_at(0) == 3


def test_what_was_gained_since_the_last_take_can_be_discarded() -> None:
    bucket = pacing.TokenBucket(per_s=1, burst=1, now=0)
    bucket.take(0)
    bucket.refill_from(0.9)
    assert bucket.ready_at(0.9) == 1.9


@given(gaps=GAPS, per_s=st.floats(0.01, 20), burst=st.integers(1, 10))
def test_no_sequence_takes_more_than_burst_and_rate(
    gaps: list[float], per_s: float, burst: int
) -> None:
    now = 1e6
    bucket = pacing.TokenBucket(per_s=per_s, burst=burst, now=now)
    taken = 0
    for gap in gaps:
        now += gap
        taken += bucket.try_take(now)
    assert taken <= burst + (now - 1e6) * per_s + 1e-3


@given(gaps=GAPS, per_s=st.floats(0.01, 20))
def test_a_token_is_there_when_it_was_promised(gaps: list[float], per_s: float) -> None:
    now = 0.0
    bucket = pacing.TokenBucket(per_s=per_s, burst=1, now=now)
    for gap in gaps:
        now = max(now + gap, bucket.ready_at(now + gap))
        assert bucket.try_take(now)


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0, 5)), max_size=80))
def test_forgetting_keys_that_are_full_again_changes_no_answer(
    calls: list[tuple[int, float]],
) -> None:
    keyed = pacing.KeyedBuckets[int](per_s=0.5, burst=2, keys_max=100)
    kept: dict[int, pacing.TokenBucket] = {}
    now = 0.0
    for key, gap in calls:
        now += gap
        bucket = kept.setdefault(key, pacing.TokenBucket(per_s=0.5, burst=2, now=now))
        assert keyed.try_take(key, now) == bucket.try_take(now)
    for _ in range(10):
        keyed.try_take(0, now + 1e6)
    assert len(keyed) <= 1


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), st.booleans()), max_size=80))
def test_to_ask_for_a_token_of_a_key_tells_what_a_take_would_and_takes_nothing(
    calls: list[tuple[int, int, bool]],
) -> None:
    buckets = pacing.KeyedBuckets[int](per_s=0.5, burst=2, keys_max=4)
    unasked = pacing.KeyedBuckets[int](per_s=0.5, burst=2, keys_max=4)
    now = 0
    for key, gap, is_taken in calls:
        now += gap
        count = len(buckets)
        has_token = buckets.has_token(key, now)
        assert buckets.has_token(key, now) == has_token
        assert len(buckets) == count
        if is_taken:
            assert buckets.try_take(key, now) == unasked.try_take(key, now) == has_token


def test_to_ask_for_a_token_does_not_keep_a_key_from_being_forgotten() -> None:
    keyed = pacing.KeyedBuckets[str](per_s=0.001, burst=1, keys_max=2)
    assert [keyed.try_take(key, 0) for key in ("a", "b")] == [True, True]
    assert not keyed.has_token("a", 0)
    assert keyed.try_take("c", 0)
    assert keyed.has_token("a", 0)
    assert not keyed.has_token("b", 0)


def test_of_too_many_keys_the_one_unused_for_longest_is_forgotten() -> None:
    keyed = pacing.KeyedBuckets[str](per_s=0.001, burst=1, keys_max=2)
    assert [keyed.try_take(key, 0) for key in ("a", "b", "a", "c")] == [True, True, False, True]
    assert len(keyed) == 2
    assert not keyed.try_take("a", 0)
    assert keyed.try_take("b", 0)


def test_delays_double_from_the_first_to_the_longest() -> None:
    delays = pacing.Backoff(first_s=0.5, max_s=5)
    assert [delays.delay_s(failures) for failures in range(7)] == [0, 0.5, 1, 2, 4, 5, 5]
    assert delays.delay_s(-1) == 0


def test_jitter_is_the_random_share_of_a_delay() -> None:
    delays = pacing.Backoff(first_s=4, jitter=0.5)
    assert [delays.delay_s(1, chance=chance) for chance in (0.0, 0.5, 1.0)] == [2, 3, 4]
    assert pacing.Backoff(first_s=4, jitter=1).delay_s(1, chance=0) == 0


@given(failures=st.integers(1, 10**9), jitter=st.floats(0, 1), chance=st.floats(0, 1))
def test_no_number_of_failures_gives_a_delay_out_of_bounds(
    failures: int, jitter: float, chance: float
) -> None:
    delays = pacing.Backoff(first_s=0.02, max_s=30, jitter=jitter)
    longest_s = delays.delay_s(failures)
    assert 0.02 <= longest_s <= 30
    assert longest_s * (1 - jitter) * 0.999 <= delays.delay_s(failures, chance=chance) <= longest_s
