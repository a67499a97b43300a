import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster_plugin.gpu import topology

Matrix = list[list[int]]


def symmetric(count: int, weights: list[int]) -> Matrix:
    joined = [[0] * count for _ in range(count)]
    for (subset, other), weight in zip(
        itertools.combinations(range(count), 2), weights, strict=False
    ):
        joined[subset][other] = joined[other][subset] = weight
    return joined


def tree(places: list[int]) -> Matrix:
    """Return the weights of a tree: pairs share a switch, fours a switch above, eights a socket."""

    def weight(subset: int, other: int) -> int:
        sizes = {2: 50, 4: 40, 8: 20}
        return next((w for size, w in sizes.items() if subset // size == other // size), 10)

    return [[weight(a, b) if a != b else 0 for b in places] for a in places]


def has(joined: Matrix, members: tuple[int, ...]) -> int:
    return sum(joined[subset][other] for subset, other in itertools.combinations(members, 2))


def divisions(left: tuple[int, ...], size: int) -> list[list[tuple[int, ...]]]:
    """Return every way to divide into sets of the size and one smaller set for the rest."""
    if not left:
        return [[]]
    sizes = {size} if len(left) % size == 0 else {size, len(left) % size}
    ways = []
    for wanted in sizes:
        if wanted > len(left):
            continue
        for others in itertools.combinations(left[1:], wanted - 1):
            subset = (left[0], *others)
            rest = tuple(at for at in left if at not in subset)
            fits = len(rest) % size == 0 or wanted == size
            ways += [[subset, *more] for more in divisions(rest, size)] if fits else []
    return ways


def slowly(joined: Matrix, size: int, required: tuple[int, ...]) -> tuple[int, ...]:
    """Return the best set of the best of all divisions; the first of equals is chosen."""
    able = []
    for division in sorted(divisions(tuple(range(len(joined))), size), key=padded(len(joined))):
        sets = [subset for subset in division if len(subset) == size and {*required} <= {*subset}]
        if sets:
            able.append((division, sets))
    _, sets = max(able, key=lambda best_set: sum(has(joined, subset) for subset in best_set[0]))
    return max(sets, key=lambda subset: has(joined, subset))


def padded(count: int) -> Callable[[list[tuple[int, ...]]], list[tuple[int, ...]]]:
    """Return a sort key that pads smaller sets with a number that sorts last."""
    return lambda division: [subset + (count,) * (count - len(subset)) for subset in division]


@st.composite
def requests(draw: st.DrawFn, most: int) -> tuple[Matrix, int, tuple[int, ...]]:
    count = draw(st.integers(1, most))
    size = draw(st.integers(1, count))
    required = tuple(draw(st.permutations(range(count))))[: draw(st.integers(0, size))]
    pairs = count * (count - 1) // 2
    weights = draw(
        st.sampled_from([[10, 20, 30, 40, 50, 60], [10, 110, 210], [0, 1], list(range(200))])
    )
    drawn = st.lists(st.sampled_from(weights), min_size=pairs, max_size=pairs)
    places = st.permutations(range(16)).map(lambda all_: tree(list(all_)[:count]))
    return draw(st.one_of(drawn.map(lambda w: symmetric(count, w)), places)), size, required


@given(requests(7))
def test_the_best_set_is_the_one_that_a_slow_search_finds(
    request: tuple[Matrix, int, tuple[int, ...]],
) -> None:
    joined, size, required = request
    assert topology.best(joined, size, required) == slowly(joined, size, required)


@pytest.mark.parametrize("size", [3, 4, 5, 6])
@pytest.mark.parametrize("seed", [3, 7, 11])
def test_it_is_so_with_more_gpus_than_the_slow_search_likes(size: int, seed: int) -> None:
    joined = symmetric(10, [(seed * at * at) % 211 for at in range(1, 46)])
    assert topology.best(joined, size) == slowly(joined, size, ())
    assert topology.best(joined, size, (4, 9)) == slowly(joined, size, (4, 9))


@pytest.mark.parametrize("size", range(2, 9))
def test_sixteen_gpus_that_are_all_joined_alike_give_the_first(size: int) -> None:
    alike = symmetric(16, [50] * 120)
    assert topology.best(alike, size) == tuple(range(size))
    assert topology.best(alike, 4, (15,)) == (12, 13, 14, 15)


def test_of_sixteen_gpus_in_disorder_those_of_one_socket_are_taken_together() -> None:
    places = [5 * at % 16 for at in range(16)]
    for size in (2, 4, 8):
        best = topology.best(tree(places), size)
        assert len({places[at] // size for at in best}) == 1


def test_the_search_of_sixteen_agrees_with_the_best_of_two_halves() -> None:
    half = symmetric(8, [(7 * at * at) % 211 for at in range(1, 29)])
    apart = [
        [
            half[subset % 8][other % 8] + 1000 if subset // 8 == other // 8 else 0
            for other in range(16)
        ]
        for subset in range(16)
    ]
    for at in range(16):
        apart[at][at] = 0
    assert topology.best(apart, 4) == slowly(half, 4, ())


def test_more_gpus_are_placed_by_swaps_and_in_time() -> None:
    places = [7 * at % 32 for at in range(32)]
    for size, required in ((4, ()), (8, (3,)), (5, (1, 2))):
        best = topology.best(tree(places), size, required)
        assert len(set(best)) == size
        assert {*required} <= {*best}
        assert best == topology.best(tree(places), size, required)
    assert len({places[at] // 8 for at in topology.best(tree(places), 8)}) == 1


@settings(max_examples=20)
@given(st.lists(st.integers(0, 1500), min_size=153, max_size=153), st.integers(1, 18))
def test_a_large_request_is_answered_whole(weights: list[int], size: int) -> None:
    best = topology.best(symmetric(18, weights), size, (17,))
    assert len(set(best)) == size
    assert 17 in best


def test_a_puzzle_that_no_machine_is_gets_a_good_answer_in_time() -> None:
    puzzle = symmetric(16, [at % 3 for at in range(1, 121)])
    best = topology.best(puzzle, 6)
    assert len(set(best)) == 6
    assert has(puzzle, best) >= max(has(puzzle, (*range(at, at + 6),)) for at in range(11))
    assert best == topology.best(puzzle, 6)
