"""Pure: Whose turn it is: how many notifications may be on their way to each receiver at once."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from muster_notifier import group as groups

IN_FLIGHT_MAX: Final = 8
"""Notifications of different groups on their way to one receiver: a receiver that comes back must
not be stormed, and what waits here says what is true when its turn comes."""

OUTSTANDING_MAX: Final = 256
"""Notifications of one receiver in the outbox, those included that are tried again and again."""


class Turns:
    """The groups that wait for their receivers, in the order in which they were flushed."""

    def __init__(self, receivers: Iterable[str]) -> None:
        self._in_flight: Counter[str] = Counter()
        self._outstanding: Counter[str] = Counter()
        self._waiting: dict[str, dict[groups.Key, float]] = {name: {} for name in receivers}

    def wait(self, key: groups.Key, now: float) -> None:
        """Queue a group, if it does not wait already."""
        self._waiting[key[0]].setdefault(key, now)

    def next(self, receiver: str) -> groups.Key | None:
        """Return the group whose turn it is, and let it wait no more; None if it is nobody's."""
        waiting = self._waiting[receiver]
        is_busy = (
            self._in_flight[receiver] >= IN_FLIGHT_MAX
            or self._outstanding[receiver] >= OUTSTANDING_MAX
        )
        if is_busy or not waiting:
            return None
        key = next(iter(waiting))
        del waiting[key]
        return key

    def begin(self, receiver: str) -> None:
        """Count a notification that is on its way."""
        self._in_flight[receiver] += 1
        self._outstanding[receiver] += 1

    def postpone(self, receiver: str) -> None:
        """Count no longer what is tried again and again."""
        self._in_flight[receiver] -= 1

    def end(self, receiver: str, *, was_postponed: bool) -> None:
        """Count a notification no longer."""
        self._in_flight[receiver] -= not was_postponed
        self._outstanding[receiver] -= 1

    def since(self, receiver: str) -> list[float]:
        """Return since when each group of a receiver has waited."""
        return list(self._waiting[receiver].values())
