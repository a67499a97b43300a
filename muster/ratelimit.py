"""Pure: rate limits: a token bucket, and one bucket for each of many keys.

Time is an argument: seconds of any monotonic clock, the same one in every call.
"""

from typing import Final, Generic, TypeVar

_ROUNDING: Final = 1e-9
"""A wait that was rounded down must not be followed by another, ever shorter one."""

Key = TypeVar("Key")


class TokenBucket:
    """A token bucket: starts full with `burst` tokens, and gains `per_s` every second."""

    __slots__ = ("_burst", "_left", "_per_s", "_tokens", "_updated_at")

    def __init__(self, *, per_s: float, burst: float, now: float) -> None:
        assert per_s > 0, f"{per_s} tokens a second are none"
        assert burst >= 1, f"a bucket of {burst} never holds a token"
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
        """Take tokens, even future ones, which delays the next."""
        self._fill(now)
        self._tokens -= count
        self._left = self._tokens

    def refill_from(self, now: float) -> None:
        """Discard the tokens gained since the last were taken; gain again from now on."""
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
    """One token bucket for each key; those that are full again are forgotten.

    Of more than `keys_max` keys the one that has been used least recently is forgotten.
    """

    def __init__(self, *, per_s: float, burst: float, keys_max: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._keys_max = keys_max
        self._buckets: dict[Key, TokenBucket] = {}
        """Least recently used first."""

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
        """Forget up to two keys, the oldest first: more than one call can add."""
        for _ in range(2):
            key, bucket = next(iter(self._buckets.items()))
            if len(self._buckets) <= self._keys_max and not bucket.is_full(now):
                return
            del self._buckets[key]
            if not self._buckets:
                return
