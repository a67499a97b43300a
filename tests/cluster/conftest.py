"""The cluster that every test here uses."""

from collections.abc import Iterator

import pytest

from tests.worlds import manifests, real_cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[real_cluster.Cluster]:
    """Give an empty cluster, and leave it empty."""
    yield from real_cluster.chosen(request)


@pytest.fixture(scope="module")
def minimal(
    cluster: real_cluster.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[real_cluster.Cluster]:
    """Give the cluster with the minimal overlay installed and ready."""
    folder = tmp_path_factory.mktemp("minimal")
    (folder / "muster").symlink_to(manifests.ROOT)
    blocks = real_cluster.documented("install.md", "## In a cluster")
    cluster.shell(real_cluster.with_our_image("\n".join(blocks[:3])), folder)
    for workload in real_cluster.WORKLOADS:
        cluster.good("-n", "muster", "rollout", "status", workload, "--timeout=120s")
    yield cluster
    cluster.rest()
