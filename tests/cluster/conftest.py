"""Fixtures: the cluster of all tests here, and a function that prints measurements."""

from collections.abc import Callable, Iterator

import pytest

from tests.worlds import real_cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[real_cluster.Cluster]:
    """Yield a cluster without muster; afterwards, remove muster from it."""
    yield from real_cluster.chosen(request)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Return a function that prints a line even if the test passes."""

    def shown(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")  # noqa: T201

    return shown
