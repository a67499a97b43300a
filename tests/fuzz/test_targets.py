"""A short form of `make fuzz`: runs each target on its corpus, on changed and on long input.

A defect that fuzzing finds is fixed with a test beside the code; its input stays in the corpus.
"""

import time
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import mutation
from tests.fuzz.__main__ import import_targets
from tests.fuzz.target import CORPUS, TARGETS, Target

import_targets()
EVERY: Final = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
RUN_S: Final = 5.0
SHAPES: Final = (
    *(b"[", b"{", b'{"a":', b'"', b"\\", b" ", b"\n", b",", b"-", b"0", b"9", b"a", b"/", b"="),
    *(b"\xff", b"\x00", "é".encode(), b"- ", b"a: ", b"? ", b"MSG a 1 0\r\n\r\n", b'""', b"a,"),
)
SHAPE_BYTES: Final = 400
SMALL, FACTOR = 10, 16
GROWTH_MAX: Final = 4.0
"""From 10 parts to 160, n log n grows by 2.2 times as much as the size, n squared by 16 times."""
NOISE_S: Final = 0.1


@EVERY
def test_the_corpus_is_read_or_refused(target: Target) -> None:
    corpus = target.corpus()
    assert corpus
    for data in corpus:
        target.run(data)


@EVERY
@settings(max_examples=10)
@given(data=st.data())
def test_changed_input_is_read_or_refused_too(target: Target, data: st.DataObject) -> None:
    seed = data.draw(st.sampled_from(target.corpus()))
    changed = mutation.mutated(seed, data.draw(st.integers(0, 2**32))) or seed
    at = data.draw(st.integers(0, len(changed)))
    added = data.draw(
        st.binary(max_size=3) | st.sampled_from([w.encode() for w in target.words or " "])
    )
    target.run(changed)
    target.run(changed[:at] + added + changed[at + data.draw(st.integers(0, 4)) :])


@EVERY
def test_no_shape_of_input_takes_long(target: Target) -> None:
    head = next(iter(target.corpus())).partition(b"\n")[0] + b"\n"
    began = time.process_time()
    for shape in SHAPES:
        target.run(shape * (SHAPE_BYTES // len(shape)))
        target.run(head + shape * (SHAPE_BYTES // len(shape)))
    assert time.process_time() - began < RUN_S


@pytest.mark.parametrize(
    "target", [target for target in TARGETS.values() if target.long], ids=lambda t: t.name
)
def test_the_cost_grows_with_the_size_and_not_with_its_square(target: Target) -> None:
    assert target.long is not None
    small, large = (cost(target, target.long(SMALL * factor)) for factor in (1, FACTOR))
    assert large < FACTOR * GROWTH_MAX * small + NOISE_S


def cost(target: Target, data: bytes) -> float:
    """Return the CPU time of the faster of two runs."""

    def once() -> float:
        began = time.process_time()
        target.run(data)
        return time.process_time() - began

    return min(once() for _ in range(2))


def test_every_file_of_the_corpus_belongs_to_a_target() -> None:
    assert {file.stem for file in CORPUS.iterdir()} <= TARGETS.keys()
