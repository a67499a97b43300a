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


WRITES = """
import os
for folder in ("/dev", "/dev/shm", "/dev/mqueue", "/dev/hugepages", "/dev/pts"):
    try:
        with open(f"{folder}/muster-test", "w") as file:
            file.write("x")
    except FileNotFoundError:
        print(folder, "is not there")
    except OSError as error:
        print(folder, error.strerror)
    else:
        print(folder, "written")
        os.unlink(f"{folder}/muster-test")
print(os.listdir("/dev/shm"), os.listdir("/dev/pts"))
"""


def test_the_plugin_cannot_write_below_the_nodes_dev(
    cluster: real_cluster.Cluster, printed: str
) -> None:
    assert printed
    where = ("-n", "muster", "exec", "-i", "daemonset/muster-plugin", "--")
    output = cluster.good(*where, "/opt/venv/bin/python", "-", given=WRITES)
    *refused, seen = output.splitlines()
    assert refused == [
        "/dev Read-only file system",
        "/dev/shm Read-only file system",
        "/dev/mqueue Read-only file system",
        "/dev/hugepages is not there",
        "/dev/pts Read-only file system",
    ]
    assert seen == "[] []"
    (plugin,) = cluster.pods("muster-plugin")
    (status,) = plugin["status"]["containerStatuses"]
    modes = {mount["mountPath"]: mount.get("recursiveReadOnly") for mount in status["volumeMounts"]}
    assert modes["/dev"] == "Enabled"
    assert "RUN003" not in cluster.muster("check", "muster")
