"""docs/install.md followed word for word: the chart, alone and with `production.enabled`."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from scripts.cluster import layout, tools
from tests.worlds import manifests, real_cluster, slack

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


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
    cluster.shell(real_cluster.block("install.md", "secret generic muster-nats-$user"), folder)
    cluster.shell(workspace.secret(), folder)
    (folder / "values.yaml").write_text(real_cluster.block("install.md", "repository: "))
    install = real_cluster.block("install.md", "helm install")
    with cluster.no_default_storage():
        printed = cluster.shell(install, folder, expect=1)
    assert "the cluster has no default StorageClass" in printed
    assert "Notified: ops" in cluster.shell(install, folder)
    say(f"Helm: {slack.tried(cluster, folder, workspace, since=began)}")
    starts = _starts(cluster)
    changed = {"settings": {"labeler": {"policy": {"writes_per_s": 10}}}}
    (folder / "changed.yaml").write_text(yaml.safe_dump(changed))
    chart = "muster muster/k8s/chart/muster --namespace muster --reuse-values"
    cluster.shell(f"helm upgrade {chart} -f changed.yaml --wait --timeout 3m", folder)
    upgraded = _starts(cluster)
    assert {name for name in starts if starts[name] != upgraded[name]} == {"muster-labeler"}
    cluster.shell("helm rollback muster 1 --namespace muster --wait --timeout 3m", folder)
    again = _starts(cluster)
    assert {name for name in starts if again[name] != upgraded[name]} == {"muster-labeler"}


def test_production(empty: tuple[real_cluster.Cluster, Path]) -> None:
    cluster, folder = empty
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


def _starts(cluster: real_cluster.Cluster) -> dict[str, set[str]]:
    """Return the names of the pods of each part."""
    parts = ("nats", "health", "labeler", "notifier", "plugin")
    return {
        f"muster-{part}": {pod["metadata"]["name"] for pod in cluster.pods(f"muster-{part}")}
        for part in parts
    }
