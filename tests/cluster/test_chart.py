"""The chart, by default and in production: docs/install.md and docs/upgrade.md word for word."""

import base64
import concurrent.futures
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from muster.nats.auth import cluster_secrets
from scripts.cluster import layout, tools
from tests.worlds import (
    cluster_faults,
    console_in_cluster,
    manifests,
    muster_in_cluster,
    real_cluster,
    slack,
)
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


@pytest.fixture(scope="module")
def workspace(with_helm: real_cluster.Cluster) -> Iterator[slack.Slack]:
    assert with_helm.node
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
    # test_minimal.py uses the default of group_wait_s
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
    # on one node, NATS cannot become ready before its StatefulSet is patched
    install = real_cluster.block("install.md", "helm install").replace("--wait --timeout 5m", "")
    cluster.shell(install, folder)
    (soft,) = yaml.safe_load(real_cluster.block("install.md", "podAntiAffinity"))["patches"]
    patch = json.dumps(yaml.safe_load(soft["patch"]))
    cluster.good("-n", "muster", "patch", "statefulset", "muster-nats", "--type=json", "-p", patch)
    steps = real_cluster.block("install.md", "apply -k my-muster").splitlines()
    waits = [line for line in steps if "rollout status" in line or "kubectl wait" in line]
    assert len(waits) == 4
    cluster.shell("\n".join(waits), folder)


@dataclass(frozen=True, slots=True)
class Installed:
    """The chart in production, with keys that a Job made; `command` is its installation."""

    cluster: real_cluster.Cluster
    folder: Path
    command: str

    @property
    def context(self) -> str:
        return self.cluster.good("config", "current-context").strip()

    def muster(self, *words: str, expect: int = 0) -> str:
        """Run a command of muster with the kubeconfig's context."""
        return self.cluster.muster("--context", self.context, *words, expect=expect)

    def muster_as_reader(self, *words: str, expect: int = 0) -> str:
        """Run a command of muster with the reader's credentials."""
        secret = self.cluster.get("secret", "muster-reader-creds", "-n", "muster")
        file = self.folder / "reader.creds"
        file.write_bytes(base64.b64decode(secret["data"]["nats.creds"]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(self.cluster.environment, "NATS_CREDS", str(file))
            return self.muster(*words, expect=expect)

    def printed(self, *words: str) -> list[dict[str, Any]]:
        """Return the JSON objects that a command of muster prints, one in each line."""
        lines = self.muster(*words, "--json").splitlines()
        # without results, a line about rights may be printed
        return [json.loads(line) for line in lines if line.startswith("{")]

    def doctor(self, *words: str) -> dict[str, tuple[str, str]]:
        """Return the findings of `muster doctor`, which must exit with 0, by check."""
        report = json.loads(self.muster("doctor", "--json", *words))
        return {each["check"]: (each["level"], each["text"]) for each in report["findings"]}

    def upgrade(self, **values: object) -> None:
        """Upgrade with these additional values."""
        (self.folder / "more.yaml").write_text(yaml.safe_dump(values))
        command = self.command.replace("helm install", "helm upgrade")
        self.cluster.shell(f"{command} -f more.yaml", self.folder)


SERVICES: Final = ("gate", "health", "labeler", "notifier")
TEST: Final = "helm test muster --namespace muster --logs --timeout 5m"


@pytest.fixture(scope="module")
def made(
    with_helm: real_cluster.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    cluster, folder = with_helm, tmp_path_factory.mktemp("keys")
    before = cluster.snapshot()
    (folder / "muster").symlink_to(manifests.ROOT)
    (soft,) = yaml.safe_load(real_cluster.block("install.md", "podAntiAffinity"))["patches"]
    (operation,) = yaml.safe_load(soft["patch"])
    values = yaml.safe_load(real_cluster.block("install.md", "repository: "))
    values |= {"receivers": [], "production": {"enabled": True}}
    # all servers on the one node
    values["nats"] = {"affinity": {"podAntiAffinity": operation["value"]}}
    values["settings"] = {"notifier": {"group_wait_s": 1}}
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    cluster.good("apply", "-f", str(folder / "muster/k8s/base/namespace.yaml"))
    command = real_cluster.block("install.md", "helm install").strip()
    cluster.shell(command, folder)
    until(lambda: cluster.allocatable(FUSE) == "20", "the kubelet has the plugin's devices")
    yield Installed(cluster, folder, command)
    cluster.shell(real_cluster.block("upgrade.md", "muster uninstall"), folder)
    assert cluster.snapshot() == before


def test_keys_that_nobody_made_are_kept_by_an_upgrade(made: Installed) -> None:
    cluster = made.cluster
    assert cluster.get("serviceaccount", "muster-keys", "-n", "muster") == {}
    keys = _keys(cluster)
    assert {name for name, _ in keys} == {
        str(part) for part in cluster_secrets.Wanted("muster").parts(production=True)
    }
    made.upgrade()
    assert _keys(cluster) == keys
    since = ("--since", "10m", "--no-follow")
    assert FUSE in made.muster("events", "--type", "plugin.registered", *since)
    tested = cluster.shell(TEST, made.folder)
    assert f"passed: a pod got {FUSE}: {cluster.node}" in tested
    assert "passed: console got the test alert" in tested


@pytest.mark.parametrize("name", ["muster", "second"])
def test_a_second_release_is_refused_before_anything_of_it_is_created(
    made: Installed, name: str
) -> None:
    cluster, before = made.cluster, _of_muster(made.cluster)
    words = ("helm install second muster/k8s/chart/muster", "--namespace default", "-f values.yaml")
    command = " ".join((*words, f"--set fullnameOverride={name}"))
    printed = cluster.shell(command, made.folder, expect=1)
    assert printed.splitlines()[-1] == (
        "muster is installed already, in the namespace muster (the release muster), and two in "
        "one cluster would both change its nodes: upgrade that one, or first remove it: "
        "muster uninstall"
    )
    assert _of_muster(cluster) == before
    assert cluster.shell("helm list --all-namespaces --short", made.folder) == "muster\n"


def test_a_receiver_is_added_once_it_has_accepted_a_test_message(
    made: Installed, workspace: slack.Slack
) -> None:
    file = made.folder / "slack-url"
    file.write_text(f"{workspace.url}-\n")
    setup = ("notify", "setup", "slack", "--secret-file", str(file))
    assert made.muster(*setup, expect=1).splitlines()[-2:] == [
        "muster notify: test message to slack answered: refused (not_found): HTTP 404 no_service",
        "muster notify: nothing was written; --no-test writes the receiver without a test",
    ]
    file.write_text(f"{workspace.url}\n")
    assert "slack: written to the Secret muster-notifier-receivers" in made.muster(*setup)
    assert len(_tests(workspace)) == 1


def test_while_helm_tests_a_device_that_no_node_has_muster_is_well(
    made: Installed, workspace: slack.Slack
) -> None:
    cluster = made.cluster
    nowhere = {"name": "example.com/none", "groups": [{"devices": [{"path": "/dev/none"}]}]}
    made.upgrade(devices=[nowhere])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        testing = pool.submit(cluster.shell, TEST, made.folder)
        label = "app.kubernetes.io/name=muster-test-device"
        asks = ("-n", "muster", "get", "pods", "-l", label, "-o", "name")
        until(lambda: cluster.good(*asks), "a pod asks for the device")
        test = ("--context", made.context, "notify", "test", "slack")
        answered = until(
            lambda: _accepted(cluster, *test), "the notifier has the receiver", within_s=120
        )
        file = made.folder / "muster.tar.gz"
        findings = made.doctor("--bundle", str(file))
        tested = testing.result()
    assert "skipped: no node has example.com/none for a pod: 0/1 nodes are available" in tested
    assert "got the test alert" in tested
    assert answered.splitlines()[-1].startswith("answered: accepted")
    assert len(_tests(workspace)) == 2
    # on a busy machine an answer may be slow
    assert {level for level, _ in findings.values()} <= {"OK", "WARN"}
    assert findings["receivers"] == ("OK", "slack (slack)")
    assert findings["plugins"] == ("OK", "1 on 1 node, all well")
    content = muster_in_cluster.unpacked(file)
    secrets = cluster.get("secrets", "", "-n", "muster")["items"]
    assert {"muster-keys", "muster-notifier-receivers"} <= {s["metadata"]["name"] for s in secrets}
    assert muster_in_cluster.leaked(content, secrets) == []
    assert content["muster-doctor/not-included.txt"] == ""
    services = [pod for part in SERVICES for pod in cluster.pods(f"muster-{part}")]
    processes = json.loads(content["muster-doctor/versions.json"])["processes"]
    assert processes.keys() >= {pod["metadata"]["name"] for pod in services}
    assert len(services) == 8


def test_helm_tests_no_device_where_muster_serves_none(made: Installed) -> None:
    made.upgrade(devices=[], watch={"enabled": True})
    tested = made.cluster.shell(TEST, made.folder)
    assert "skipped: muster serves no devices here" in tested
    assert "got the test alert" in tested
    assert "failed" not in tested


def test_a_person_whom_a_proxy_names_silences_an_alert_in_the_console(made: Installed) -> None:
    page = real_cluster.block("console.md", "    writing:\n")
    values = yaml.safe_load(page.replace("10.0.3.0/24", console_in_cluster.PROXY))
    made.upgrade(**values)
    # while the plugin's pod is new, a stopped plugin counts as being replaced, not as down
    cluster_faults.Muster.of(made.cluster).about("device-plugin").until_healthy()
    ann, matcher = "ann@example.com", f"node={made.cluster.node}"
    fields = {"matchers": matcher, "duration": "2h", "comment": "new disk"}
    # the silence matches every alert of a cluster with one node, so it must be confirmed
    fields["confirmed"] = f"2h {matcher}"

    def until_down(holds: Callable[[], bool], what: str) -> None:
        # keep the plugin down, so that the alert keeps firing
        def is_so() -> bool:
            cluster_faults.end_plugin()
            return holds()

        until(is_so, what, within_s=120)

    with console_in_cluster.forwarded(made.cluster, made.folder) as browser:
        browser.url = values["console"]["url"]
        until_down(lambda: ">plugin_down<" in browser.read("/alerts"), "the console has the alert")
        status, text = browser.send("/silence", **fields)
        assert status == 403
        assert "Nothing was done: the proxy names nobody in X-Forwarded-User." in text
        words = ("silence", "add", matcher, "--comment", "x")
        # a busy machine may not reach NATS within the 3 s that a command waits
        until(
            lambda: "permissions violation" in made.muster_as_reader(*words, expect=1),
            "NATS refuses the reader",
        )
        assert made.printed("silence", "list") == []
        browser.person = ann
        status, place = browser.send("/silence", **fields)
        assert (status, place.partition("&")[0]) == (303, "alerts?done=silenced")
        (silence,) = made.printed("silence", "list")
        assert [silence[name] for name in ("author", "comment", "matchers")] == [
            *(ann, "new disk", [matcher])
        ]
        by_ann = f"silenced by {ann}"
        until_down(lambda: by_ann in browser.read("/alerts"), "the console shows it silenced")
        until_down(lambda: "1 firing, 1 silenced" in made.muster("status"), "and so does status")
        status, place = browser.send("/expire", id=silence["id"])
        assert (status, place) == (303, f"alerts?done=expired&silence={silence['id']}")
        until(lambda: by_ann not in browser.read("/alerts"), "the console shows it expired")
    assert made.printed("silence", "list") == []
    since = ("--since", "10m", "--no-follow")
    acted = [each["data"] for each in made.printed("events", "-t", "operator.acted", *since)]
    names = ("actor", "identity", "act", "outcome", "target")
    assert [tuple(each[name] for name in names) for each in acted] == [
        (ann, "header", act, "done", silence["id"]) for act in ("silence", "expire_silence")
    ]


def test_keys_that_nobody_made_are_left_by_an_uninstall(made: Installed) -> None:
    cluster, keys = made.cluster, _keys(made.cluster)
    assert keys
    cluster.shell("helm uninstall muster --namespace muster --wait", made.folder)
    assert _keys(cluster) == keys
    cluster.shell(real_cluster.block("security.md", "get secret muster-keys"), made.folder)
    cluster.shell("muster auth accounts", made.folder)


def _accepted(cluster: real_cluster.Cluster, *words: str) -> str:
    """Return what a command printed; empty if it failed."""
    program = str(Path(sys.executable).with_name("muster"))
    done = subprocess.run(
        [program, *words], env=cluster.environment, capture_output=True, text=True, check=False
    )
    return "" if done.returncode else done.stdout


def _tests(workspace: slack.Slack) -> list[slack.Posted]:
    """Return the test messages of `muster notify` in the channel."""
    phrase = "this is a test message from muster notify"
    return [each for each in workspace.channel if phrase in json.dumps(each.message)]


def _of_muster(cluster: real_cluster.Cluster) -> set[tuple[str, str, str]]:
    """Return the kind, namespace and name of muster's objects in all namespaces."""
    kinds = "clusterroles,clusterrolebindings,validatingadmissionpolicies,deployments,jobs,secrets"
    listed = cluster.get(kinds, "", "--all-namespaces", "-l", real_cluster.PART)["items"]
    return {
        (item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"])
        for item in listed
    }


def _keys(cluster: real_cluster.Cluster) -> set[tuple[str, str]]:
    """Return the kind with the name, and the resource version, of each object that the Job made."""
    label = "app.kubernetes.io/name=muster-keys"
    listed = cluster.get("secrets,configmaps", "", "-n", "muster", "-l", label)
    return {
        (f"{item['kind']} {item['metadata']['name']}", item["metadata"]["resourceVersion"])
        for item in listed["items"]
    }


def _starts(cluster: real_cluster.Cluster) -> dict[str, set[str]]:
    """Return the names of the pods of each component."""
    parts = ("nats", "health", "labeler", "notifier", "plugin")
    return {
        f"muster-{part}": {pod["metadata"]["name"] for pod in cluster.pods(f"muster-{part}")}
        for part in parts
    }
