"""The chart, alone and in production: docs/install.md and docs/upgrade.md word for word."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from muster.nats.auth import cluster_secrets
from scripts.cluster import layout, tools
from tests.worlds import manifests, real_cluster, slack
from tests.worlds.real_cluster import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FUSE: Final = "smarter-devices/fuse"


@pytest.fixture(scope="module")
def with_helm(cluster: real_cluster.Cluster) -> real_cluster.Cluster:
    if shutil.which("helm", path=cluster.environment["PATH"]) is None:
        try:
            folder = tools.built("helm", print)
        except layout.Refused as refused:
            pytest.skip(f"no helm in the PATH: {refused}")
        cluster.environment["PATH"] += f":{folder}"
    return cluster


@pytest.fixture
def empty(
    with_helm: real_cluster.Cluster, tmp_path: Path
) -> Iterator[tuple[real_cluster.Cluster, Path]]:
    before = with_helm.snapshot()
    (tmp_path / "muster").symlink_to(manifests.ROOT)
    yield with_helm, tmp_path
    with_helm.shell(real_cluster.block("upgrade.md", "muster uninstall"), tmp_path)
    assert with_helm.snapshot() == before
    with_helm.rest()


@pytest.fixture
def workspace() -> Iterator[slack.Slack]:
    with slack.serving() as made:
        yield made


def test_install_a_message_in_slack_upgrade_and_rollback(
    empty: tuple[real_cluster.Cluster, Path], workspace: slack.Slack, say: Callable[[str], None]
) -> None:
    cluster, folder = empty
    began = time.monotonic()
    # with Helm the namespace is enough: a Job makes the passwords
    cluster.shell(real_cluster.namespace_step(), folder)
    cluster.shell(workspace.secret(), folder)
    values = real_cluster.block("install.md", "repository: ")
    # how long a message waits for more by default is seen in test_minimal.py
    settings: dict[str, object] = {"notifier": {"group_wait_s": 1}}
    file = folder / "values.yaml"
    file.write_text(f"{values}\n{yaml.safe_dump({'settings': settings})}")
    install = real_cluster.block("install.md", "helm install")
    with cluster.no_default_storage():
        printed = cluster.shell(install, folder, expect=1)
    assert "the cluster has no default StorageClass" in printed
    assert "Notified: ops" in cluster.shell(install, folder)
    say(f"Helm: {slack.tried(cluster, folder, workspace, since=began)}")
    starts = _starts(cluster)
    settings["labeler"] = {"policy": {"writes_per_s": 10}}
    file.write_text(f"{values}\n{yaml.safe_dump({'settings': settings})}")
    cluster.shell(real_cluster.block("upgrade.md", "helm upgrade"), folder)
    upgraded = _starts(cluster)
    assert {name for name in starts if starts[name] != upgraded[name]} == {"muster-labeler"}
    cluster.shell(real_cluster.block("upgrade.md", "helm rollback"), folder)
    again = _starts(cluster)
    assert {name for name in starts if again[name] != upgraded[name]} == {"muster-labeler"}


def test_production(empty: tuple[real_cluster.Cluster, Path]) -> None:
    cluster, folder = empty
    cluster.shell(real_cluster.namespace_step(), folder)
    printed = cluster.shell(real_cluster.block("install.md", "muster auth init"), folder)
    cluster.shell(real_cluster.printed_commands(printed), folder)
    values = yaml.safe_load(real_cluster.block("install.md", "repository: "))
    values |= {"receivers": [], "production": {"enabled": True}}
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    # on one node it cannot become ready before it is patched
    install = real_cluster.block("install.md", "helm install").replace("--wait --timeout 5m", "")
    cluster.shell(install, folder)
    (soft,) = yaml.safe_load(real_cluster.block("install.md", "podAntiAffinity"))["patches"]
    patch = json.dumps(yaml.safe_load(soft["patch"]))
    cluster.good("-n", "muster", "patch", "statefulset", "muster-nats", "--type=json", "-p", patch)
    steps = real_cluster.block("install.md", "apply -k my-muster").splitlines()
    waits = [line for line in steps if "rollout status" in line or "kubectl wait" in line]
    assert len(waits) == 4
    cluster.shell("\n".join(waits), folder)


def test_keys_that_nobody_made_are_kept_by_an_upgrade_and_left_by_an_uninstall(
    empty: tuple[real_cluster.Cluster, Path],
) -> None:
    cluster, folder = empty
    (soft,) = yaml.safe_load(real_cluster.block("install.md", "podAntiAffinity"))["patches"]
    (operation,) = yaml.safe_load(soft["patch"])
    values = yaml.safe_load(real_cluster.block("install.md", "repository: "))
    values |= {"receivers": [], "production": {"enabled": True}}
    # all servers on the one node
    values["nats"] = {"affinity": {"podAntiAffinity": operation["value"]}}
    values["settings"] = {"notifier": {"group_wait_s": 1}}
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    cluster.good("apply", "-f", str(folder / "muster/k8s/base/namespace.yaml"))
    install = real_cluster.block("install.md", "helm install")
    cluster.shell(install, folder)
    until(lambda: cluster.allocatable(FUSE) == "20", "the kubelet has the plugin's devices")
    assert cluster.get("serviceaccount", "muster-keys", "-n", "muster") == {}
    made = _keys(cluster)
    assert {name for name, _ in made} == {
        str(part) for part in cluster_secrets.Wanted("muster").parts(production=True)
    }
    cluster.shell(install.replace("helm install", "helm upgrade"), folder)
    assert _keys(cluster) == made
    context = cluster.good("config", "current-context").strip()
    since = ("--since", "10m", "--no-follow")
    events = cluster.muster("--context", context, "events", "--type", "plugin.registered", *since)
    assert FUSE in events
    tested = cluster.shell("helm test muster --namespace muster --logs --timeout 5m", folder)
    assert f"passed: a pod got {FUSE}: {cluster.node}" in tested
    assert "passed: console got the test alert" in tested
    cluster.shell("helm uninstall muster --namespace muster --wait", folder)
    assert _keys(cluster) == made
    cluster.shell(real_cluster.block("security.md", "get secret muster-keys"), folder)
    cluster.shell("muster auth accounts", folder)


def _keys(cluster: real_cluster.Cluster) -> set[tuple[str, str]]:
    """Return the kind, name and version of what the Job made."""
    label = "app.kubernetes.io/name=muster-keys"
    listed = cluster.get("secrets,configmaps", "", "-n", "muster", "-l", label)
    return {
        (f"{item['kind']} {item['metadata']['name']}", item["metadata"]["resourceVersion"])
        for item in listed["items"]
    }


def _starts(cluster: real_cluster.Cluster) -> dict[str, set[str]]:
    """Return the names of the pods of each part."""
    parts = ("nats", "health", "labeler", "notifier", "plugin")
    return {
        f"muster-{part}": {pod["metadata"]["name"] for pod in cluster.pods(f"muster-{part}")}
        for part in parts
    }
