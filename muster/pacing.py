"""Pure: rate limits and retry delays: token buckets and exponential back-off.

Time is an argument: seconds of any monotonic clock, but the same clock in every call. Randomness is
an argument too, so that the same arguments always give the same delay.
"""

import math
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

_ROUNDING: Final = 1e-9
"""Tolerates rounding: without it, a wait that was rounded down leads to ever shorter waits."""

Key = TypeVar("Key")


class TokenBucket:
    """A token bucket: starts full with `burst` tokens, and gains `per_s` every second."""

    __slots__ = ("_burst", "_left", "_per_s", "_tokens", "_updated_at")

    def __init__(self, *, per_s: float, burst: float, now: float) -> None:
        assert per_s > 0, f"a rate of {per_s} tokens a second"
        assert burst >= 1, f"a bucket of {burst} can never hold a token"
        self._per_s = per_s
        self._burst = self._tokens = self._left = float(burst)
        self._updated_at = now

    def has_token(self, now: float) -> bool:
        """Return whether a token is available."""
        self._fill(now)
        return self._tokens >= 1.0

    def is_full(self, now: float) -> bool:
        """Return whether the bucket is full."""
        self._fill(now)
        return self._tokens >= self._burst

    def try_take(self, now: float) -> bool:
        """Take a token if one is available; return whether it was."""
        if not self.has_token(now):
            return False
        self.take(now)
        return True

    def take(self, now: float, *, count: int = 1) -> None:
        """Take `count` tokens; if too few are available, later tokens are used up in advance."""
        self._fill(now)
        self._tokens -= count
        self._left = self._tokens

    def refill_from(self, now: float) -> None:
        """Discard the tokens gained since the last take, and start to refill at `now`."""
        self._fill(now)
        self._tokens = min(self._tokens, self._left)

    def ready_at(self, now: float) -> float:
        """Return when the next token is available: now or later."""
        if self.has_token(now):
            return now
        return now + (1.0 - self._tokens) / self._per_s

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self._updated_at) * self._per_s
        self._tokens = min(self._burst, self._tokens + gained)
        if abs(1.0 - self._tokens) < _ROUNDING:
            self._tokens = 1.0
        self._updated_at = max(self._updated_at, now)


class KeyedBuckets(Generic[Key]):
    """One token bucket for each key; buckets that are full again are forgotten.

    If there are more than `keys_max` keys, the least recently used key is forgotten.
    """

    def __init__(self, *, per_s: float, burst: float, keys_max: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._keys_max = keys_max
        self._buckets: dict[Key, TokenBucket] = {}
        """Least recently used first."""

    def has_token(self, key: Key, now: float) -> bool:
        """Return whether a token of this key is available; the key does not count as used."""
        bucket = self._buckets.get(key)
        return bucket is None or bucket.has_token(now)

    def try_take(self, key: Key, now: float) -> bool:
        """Take a token of this key if one is available; return whether it was."""
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            bucket = TokenBucket(per_s=self._per_s, burst=self._burst, now=now)
        has_taken = bucket.try_take(now)
        self._buckets[key] = bucket
        self._forget(now)
        return has_taken

    def __len__(self) -> int:
        return len(self._buckets)

    def _forget(self, now: float) -> None:
        """Forget up to two of the least recently used keys, if full or more than the maximum."""
        for _ in range(2):
            key, bucket = next(iter(self._buckets.items()))
            if len(self._buckets) <= self._keys_max and not bucket.is_full(now):
                return
            del self._buckets[key]
            if not self._buckets:
                return


_DOUBLINGS_MAX: Final = 60
"""After this many failures every delay is at its maximum; 2.0 ** 1024 would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays that double from `first_s` up to `max_s`.

    `jitter` is the share of each delay that is random: with 0.5 a delay of 4 s becomes 2 to 4 s,
    with 1.0 ("full jitter") 0 to 4 s.
    """

    first_s: float
    max_s: float = math.inf
    jitter: float = 0.0

    def __post_init__(self) -> None:
        assert self.first_s >= 0, f"a first delay of {self.first_s} s"
        assert 0 <= self.jitter <= 1, f"jitter {self.jitter} is not between 0 and 1"

    def delay_s(self, failures: int, *, chance: float = 1.0) -> float:
        """Return how long to wait after `failures` failures in a row; 0 before the first.

        `chance` is random, from 0 to 1; 1 gives the longest delay.
        """
        if failures <= 0:
            return 0.0
        longest_s = min(self.max_s, self.first_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX))
        return longest_s * (1.0 - self.jitter * (1.0 - chance))
