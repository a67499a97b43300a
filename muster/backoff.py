"""Pure: exponential back-off: how long to wait after a number of consecutive failures.

The caller counts the failures and supplies the randomness, so that the same arguments always give
the same delay. Where many processes wait for the same thing, a `jitter` with
`chance=random.random()` keeps them from coming back at the same moment.
"""

import math
from dataclasses import dataclass
from typing import Final

_DOUBLINGS_MAX: Final = 60
"""Beyond this a delay in seconds has long reached any maximum; 2.0 ** 1024 would overflow."""


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
        assert 0 <= self.jitter <= 1, f"jitter {self.jitter} is not a share from 0 to 1"

    def delay_s(self, failures: int, *, chance: float = 1.0) -> float:
        """Return how long to wait after `failures` failures in a row; 0 before the first.

        `chance` is random, from 0 to 1; 1 gives the longest delay.
        """
        if failures <= 0:
            return 0.0
        longest_s = min(self.max_s, self.first_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX))
        return longest_s * (1.0 - self.jitter * (1.0 - chance))
