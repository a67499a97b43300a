"""docs/install.md followed word for word with kustomize, from the first command to Slack."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.worlds import console_in_cluster, muster_in_cluster, real_cluster, slack

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("minimal")


@pytest.fixture(scope="module")
def workspace(cluster: real_cluster.Cluster) -> Iterator[slack.Slack]:
    assert cluster.node
    with slack.serving() as made:
        yield made


@pytest.fixture(scope="module")
def began() -> float:
    return time.monotonic()


@pytest.fixture(scope="module")
def printed(
    cluster: real_cluster.Cluster, folder: Path, workspace: slack.Slack, began: float
) -> str:
    assert began
    cluster.prepare(folder, more=yaml.safe_load(real_cluster.block("install.md", "/console]")))
    cluster.shell(real_cluster.passwords(), folder)
    cluster.shell(workspace.secret(), folder)
    cluster.shell(real_cluster.block("install.md", "my-muster/notifier.yaml"), folder)
    return cluster.shell(real_cluster.block("install.md", "kubectl apply -k my-muster"), folder)


def test_the_last_command_shows_the_devices(cluster: real_cluster.Cluster, printed: str) -> None:
    assert printed.splitlines()[-1].split() == [cluster.node, "20"]


def test_the_console_shows_the_node(
    cluster: real_cluster.Cluster, folder: Path, printed: str
) -> None:
    assert printed
    with console_in_cluster.forwarded(cluster, folder) as browser:

        def names() -> list[str]:
            return list(json.loads(browser.read("/api/fleet"))["names"])

        assert "<title>" in browser.read("/")
        real_cluster.until(lambda: names() == [cluster.node], "the console shows the node")
        assert cluster.node in browser.read(f"/node/{cluster.node}")


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


def test_slack_hears_that_the_plugin_of_a_device_in_use_fails(
    cluster: real_cluster.Cluster,
    folder: Path,
    workspace: slack.Slack,
    began: float,
    printed: str,
    say: Callable[[str], None],
) -> None:
    assert printed
    say(f"kustomize: {slack.tried(cluster, folder, workspace, since=began)}")


def test_a_bundle_has_no_value_of_a_secret(
    cluster: real_cluster.Cluster, folder: Path, printed: str
) -> None:
    assert printed
    context, file = cluster.good("config", "current-context").strip(), folder / "muster.tar.gz"
    # the test before killed the plugin, so the doctor may report it
    doctor = f"muster doctor --context {context} --bundle {file} || [ $? = 1 ]"
    assert f"wrote {file}" in cluster.shell(doctor, folder)
    content = muster_in_cluster.unpacked(file)
    secrets = cluster.get("secrets", "", "-n", "muster")["items"]
    assert {"slack", "muster-nats-admin"} <= {each["metadata"]["name"] for each in secrets}
    assert muster_in_cluster.leaked(content, secrets) == []
    names = {name.removeprefix("muster-doctor/") for name in content}
    (plugin,) = cluster.pods("muster-plugin")
    assert names >= {
        *("report.txt", "versions.json", "bus.json", "status.json", "pods.json"),
        f"logs/{plugin['metadata']['name']}/plugin.previous.log",
    }
    assert content["muster-doctor/not-included.txt"] == ""
