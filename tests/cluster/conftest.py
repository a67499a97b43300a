"""The cluster that every test here uses."""

from collections.abc import Iterator

import pytest

from tests.worlds import real_cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[real_cluster.Cluster]:
    """Give an empty cluster, and leave it empty."""
    yield from real_cluster.chosen(request)
