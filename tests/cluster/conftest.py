"""The cluster that every test here uses, and a way to show what was measured in it."""

from collections.abc import Callable, Iterator

import pytest

from tests.worlds import real_cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[real_cluster.Cluster]:
    """Give an empty cluster, and leave it empty."""
    yield from real_cluster.chosen(request)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Give what prints a line although the test passes."""

    def shown(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")  # noqa: T201

    return shown
