"""docs/install.md followed word for word: the minimal overlay works."""

from collections.abc import Iterator

import pytest

from tests.worlds import real_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

FUSE = "smarter-devices/fuse"


@pytest.fixture(scope="module")
def printed(
    cluster: real_cluster.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    yield cluster.install(tmp_path_factory.mktemp("minimal"))
    cluster.rest()


def test_the_last_command_shows_the_devices(cluster: real_cluster.Cluster, printed: str) -> None:
    assert printed.splitlines()[-1].split() == [cluster.node, "20"]


def test_a_pod_that_asks_for_the_device_has_it(cluster: real_cluster.Cluster, printed: str) -> None:
    assert printed
    assert cluster.run_pod({FUSE: "1"}, "ls /dev/fuse") == "/dev/fuse\n"
