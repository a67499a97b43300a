"""Pure: finds the best connected set of a given size among free GPUs, for `allocation`.

As in NVIDIA's allocator (go-gpuallocator 876e7b7, gpuallocator/besteffort_policy.go), all free GPUs
are partitioned into sets of that size, and one smaller set of the remaining GPUs, so that the total
score is highest; then the set with the highest score is chosen. This leaves good sets for the next
pods.
Ties between partitions, and between sets, go to the first by position.

Up to 16 GPUs the answer is exact. At best a GPU is connected to its `size - 1` best partners. The
slack of a set is how much its members fall short of that, minus the shortfall that every set has.
Slacks are never negative and add up, so a partition whose slack reaches the best so far is
abandoned early (branch and bound); the first bound comes from a local search. For more than 16
GPUs, or if the exact search would take too many steps, the local search alone decides. No real
machine needs too many steps, but 1 in 1000 random matrices does.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

EXACT_MAX: Final = 16
_STEPS_MAX: Final = 100_000
_SWAPS_MAX: Final = 128

Matrix: TypeAlias = Sequence[Sequence[int]]
"""How well each pair is connected: symmetric, not negative, and 0 on the diagonal."""


class _TooLongError(Exception):
    """The exact search exceeded its maximum number of steps."""


def best(scores: Matrix, size: int, required: Collection[int] = ()) -> tuple[int, ...]:
    """Return the sorted positions of the best `size` GPUs, including all `required` GPUs."""
    count = len(scores)
    needed = frozenset(required)
    assert len(needed) <= size <= count, f"{len(needed)} of {size} of {count}"
    if size == count or len(needed) == size or size == 0:
        return tuple(sorted(needed)) if len(needed) == size else tuple(range(count))
    if size == 1:
        return (0,)
    if count > EXACT_MAX:
        return _Partition(scores, size, needed).chosen()
    if count <= 2 * size:
        return _all_but_few(scores, size, needed)
    approximate = _Partition(scores, size, needed)
    try:
        return _Search(scores, size, approximate.total()).chosen(needed)
    except _TooLongError:
        return approximate.chosen()


# Sets as bits: the first position is the highest bit, so that of two sets of equal size the set
# with the greater number comes first


def _sums(scores: Matrix, own: Sequence[int], size: int) -> list[dict[int, int]]:
    """Return the sum of each set of up to `size` GPUs, grouped by the size of the set.

    A sum is the members' `own` values plus twice the scores of their pairs. It is computed from the
    sums of three subsets: without the lowest member, without the highest, and without both.
    """
    last = len(scores) - 1
    levels = [{0: 0}, {1 << last - at: counts for at, counts in enumerate(own)}]
    for _ in range(2, size + 1):
        shorter, short = levels[-2:]
        level: dict[int, int] = {}
        for members, counts in short.items():
            high = members.bit_length() - 1
            inner = members ^ (1 << high)
            base = counts - shorter[inner]
            row = scores[last - high]
            for low in range((members & -members).bit_length() - 1):
                bit = 1 << low
                level[members | bit] = base + short[inner | bit] + 2 * row[last - low]
        levels.append(level)
    return levels


def _positions(members: int, count: int) -> tuple[int, ...]:
    return tuple(at for at in range(count) if members >> count - 1 - at & 1)


def _bits(positions: Collection[int], count: int) -> int:
    return sum(1 << count - 1 - at for at in positions)


def _all_but_few(scores: Matrix, size: int, required: frozenset[int]) -> tuple[int, ...]:
    """Return the best set by trying every possible set of unchosen GPUs, called the rest.

    A GPU's degree is the sum of its scores. The score of the chosen set plus the score of the rest
    is the total score, minus the degrees of the rest's members, plus twice the score within the
    rest (its pairs count twice in the degrees).
    """
    count = len(scores)
    everything = (1 << count) - 1
    needed = _bits(required, count)
    rests = _sums(scores, [-sum(row) for row in scores], count - size)[-1]
    free = {rest: gain for rest, gain in rests.items() if not rest & needed}
    most = max(free.values())
    equals = (rest for rest, gain in free.items() if gain == most)
    rest = max(equals, key=lambda rest: max(rest, everything ^ rest))
    sets = [_positions(members, count) for members in (everything ^ rest, rest)]
    eligible = [members for members in sets if len(members) == size and required.issubset(members)]
    return _first_best(scores, eligible)


def _first_best(scores: Matrix, sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the set with the highest score; the first by position if several have it."""
    return min(sets, key=lambda members: (-_total(scores, members), members))


def _total(scores: Matrix, members: Sequence[int]) -> int:
    return sum(scores[at][other] for at in members for other in members) // 2


class _Search:
    """The exact search. `best_total` is the score of the best partition so far."""

    def __init__(self, scores: Matrix, size: int, best_total: int) -> None:
        count = len(scores)
        self._scores = scores
        self._size = size
        self._count = count
        self._needed = 0
        self._fit: list[tuple[int, int]] = []
        most = [sum(sorted(row, reverse=True)[: size - 1]) for row in scores]
        levels = _sums(scores, [-each for each in most], size)
        rest = levels[count % size]
        lack = -max(levels[size].values())
        lack_of_rest = -max(rest.values())
        self._bound = sum(most) - 2 * best_total - lack_of_rest - lack * (count // size)
        # a set with more slack than the best partition cannot be part of a better partition
        self._sets = _slacks(levels[size], lack, self._bound)
        self._rests = _slacks(rest, lack_of_rest, self._bound) if count % size else {}
        self._full = _by_highest(count, self._sets)
        self._both = _by_highest(count, self._sets | self._rests) if self._rests else self._full
        self._least: dict[int, int] = {}
        self._at_least: dict[int, int] = {}
        self._steps = 0

    def chosen(self, required: frozenset[int]) -> tuple[int, ...]:
        """Return, from the best partition, the best set that contains all required GPUs.

        Of equal sets, the first is returned. Raises _TooLongError.
        """
        self._needed = _bits(required, self._count)
        containing = [
            (self._sets[members], members) for members in self._sets if not self._needed & ~members
        ]
        self._fit = sorted(containing) if required else []
        left = (1 << self._count) - 1
        least = self._least_of(left, self._bound + 1)
        sets = []
        while left:
            members = self._first(left, least)
            left ^= members
            least -= self._sets[members] if members in self._sets else self._rests[members]
            sets.append(_positions(members, self._count))
        eligible = [
            members for members in sets if len(members) == self._size and required.issubset(members)
        ]
        return _first_best(self._scores, eligible)

    def _first(self, left: int, least: int) -> int:
        """Return the first set of the first partition of `left` whose slack is `least`."""
        parts = (self._both if left.bit_count() % self._size else self._full)[left.bit_length() - 1]
        for _, slack, members in sorted(
            (-members, slack, members) for slack, members in parts if slack <= least
        ):
            limit = least - slack + 1
            is_short = bool(members & self._needed) and members not in self._sets
            if members & ~left or is_short:
                continue
            if self._least_of(left ^ members, limit) < limit:
                return members
        raise AssertionError("a partition with the least slack exists")

    def _least_of(self, left: int, limit: int) -> int:
        """Return the least slack of a partition of `left`, but at most `limit`.

        All required GPUs must be in one set.
        """
        if not left & self._needed:
            return self._cover(left, limit)
        if self._needed & ~left:
            return limit
        least = limit
        for slack, members in self._fit:
            if slack >= least:
                break
            if not members & ~left:
                least = min(least, slack + self._cover(left ^ members, least - slack))
        return least

    def _cover(self, left: int, limit: int) -> int:
        """Return the least slack of a partition of `left`, but at most `limit`."""
        size = left.bit_count()
        if size == 0:
            return 0
        if size <= self._size:
            slacks = self._sets if size == self._size else self._rests
            return min(slacks.get(left, limit), limit)
        if left in self._least:
            return min(self._least[left], limit)
        if self._at_least.get(left, 0) >= limit:
            return limit
        parts = (self._both if size % self._size else self._full)[left.bit_length() - 1]
        least = limit
        for slack, members in parts:
            if slack >= least:
                break
            self._steps += 1
            if not members & ~left:
                least = min(least, slack + self._cover(left ^ members, least - slack))
        if self._steps > _STEPS_MAX:
            raise _TooLongError
        (self._least if least < limit else self._at_least)[left] = least
        return least


def _slacks(sums: Mapping[int, int], lack: int, most: int) -> dict[int, int]:
    return {members: -value - lack for members, value in sums.items() if -value - lack <= most}


def _by_highest(count: int, slacks: Mapping[int, int]) -> list[list[tuple[int, int]]]:
    """Return the sets with their slacks, grouped by their highest bit, the least slack first."""
    lists: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for members, slack in slacks.items():
        lists[members.bit_length() - 1].append((slack, members))
    for entries in lists:
        entries.sort()
    return lists


class _Swap(msgspec.Struct, frozen=True, order=True):
    gain: int
    first: int
    other: int


class _Partition:
    """A partition that was improved by up to `_SWAPS_MAX` swaps of two GPUs.

    The first set contains all required GPUs.
    """

    def __init__(self, scores: Matrix, size: int, required: frozenset[int]) -> None:
        self._scores = scores
        self._size = size
        self._required = required
        self._sets = self._initial()
        self._of = {at: number for number, members in enumerate(self._sets) for at in members}
        self._pull = [
            [sum(row[other] for other in members) for members in self._sets] for row in self._scores
        ]
        for _ in range(_SWAPS_MAX):
            swap = self._best_swap()
            if swap.gain <= 0:
                break
            self._exchange(swap.first, swap.other)

    def total(self) -> int:
        """Return the sum of the scores of all sets."""
        return sum(_total(self._scores, members) for members in self._sets)

    def chosen(self) -> tuple[int, ...]:
        """Return the set with the required GPUs; if none are required, the best set."""
        full = [tuple(sorted(members)) for members in self._sets if len(members) == self._size]
        if self._required:
            return full[0]
        return _first_best(self._scores, full)

    def _initial(self) -> list[list[int]]:
        """Return sets that are filled one by one, each time with the best connected free GPU."""
        free = [at for at in range(len(self._scores)) if at not in self._required]
        sets = []
        members = sorted(self._required)
        while free or members:
            while free and len(members) < self._size:
                rows = [self._scores[member] for member in members]
                gain = functools.partial(_gain, rows or [[max(row) for row in self._scores]])
                members.append(max(free, key=gain))
                free.remove(members[-1])
            sets.append(members)
            members = []
        return sets

    def _best_swap(self) -> _Swap:
        gain, swap = 0, (0, 0)
        movable = [at for at in range(len(self._scores)) if at not in self._required]
        for place, at in enumerate(movable):
            row, pull, here = self._scores[at], self._pull[at], self._of[at]
            for other in movable[:place]:
                there = self._of[other]
                theirs = self._pull[other]
                better = pull[there] - pull[here] + theirs[here] - theirs[there] - 2 * row[other]
                if better > gain and here != there:
                    gain, swap = better, (at, other)
        return _Swap(gain, *swap)

    def _exchange(self, at: int, other: int) -> None:
        here, there = self._of[at], self._of[other]
        for pull, row in zip(self._pull, self._scores, strict=True):
            moved = row[other] - row[at]
            pull[here] += moved
            pull[there] -= moved
        self._of[at], self._of[other] = there, here
        self._sets[here][self._sets[here].index(at)] = other
        self._sets[there][self._sets[there].index(other)] = at


def _gain(rows: Sequence[Sequence[int]], at: int) -> tuple[int, int]:
    return sum(row[at] for row in rows), -at
