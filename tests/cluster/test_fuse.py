"""docs/fuse.md followed word for word: unprivileged pods mount FUSE file systems."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from scripts.cluster import images, layout, node
from tests.worlds import real_cluster
from tests.worlds.real_cluster import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

TEAM: Final = "team-a"
BROKER: Final = "muster-fuse"
FUSE: Final = {"name": "fuse", "csi": {"driver": "fuse.muster.dev"}}
MOUNTS: Final = (
    {"name": "fuse", "mountPath": "/run/muster-fuse", "readOnly": True},
    *(
        {"name": "fuse", "mountPath": path, "subPath": "fusermount3", "readOnly": True}
        for path in ("/usr/bin/fusermount3", "/bin/fusermount")
    ),
    {"name": "fuse", "mountPath": "/dev/fuse", "subPath": "dev-fuse"},
)
SERVER: Final = """
set -e
cd /data
mkdir -p remote photos
echo seen > remote/file
ssh-keygen -q -t ed25519 -N '' -f key
cp key.pub authorized
cat > sshd.conf <<END
Port 2222
ListenAddress 127.0.0.1
HostKey /data/key
AuthorizedKeysFile /data/authorized
PidFile none
StrictModes no
UsePAM no
Subsystem sftp internal-sftp
END
/usr/sbin/sshd -f /data/sshd.conf -E /data/sshd.log
mount_photos() {
  sshfs -o StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,LogLevel=ERROR \\
    -o IdentityFile=/data/key,port=2222 user@127.0.0.1:/data/remote /data/photos
}
"""


SSHFS: Final = "sshfs -o ssh_command='sh -c /usr/lib/openssh/sftp-server' host:$PWD/"
"""The start of a command that mounts a directory of the pod itself, without a network."""
RESOURCE: Final = "smarter-devices/fuse"


class Team:
    """A team's namespace at the Pod Security level `restricted`; the broker is allowed in it."""

    def __init__(self, cluster: real_cluster.Cluster) -> None:
        self.cluster = cluster

    def start(self, name: str, script: str, **spec: object) -> None:
        """Create an unprivileged pod that starts an SSH server and then runs a script."""
        container = {
            "name": "main",
            "image": images.FUSE_PROGRAMS,
            "command": ["bash", "-c", SERVER + script],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "volumeMounts": [
                {"name": "data", "mountPath": "/data"},
                {"name": "data", "mountPath": "/tmp", "subPath": "tmp"},
                *MOUNTS,
            ],
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": TEAM},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 1000,
                    "runAsGroup": 1000,
                    "fsGroup": 1000,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [container],
                "volumes": [{"name": "data", "emptyDir": {}}, FUSE],
                **spec,
            },
        }
        self.cluster.good("create", "-f", "-", given=pod)

    def phase(self, name: str) -> str:
        """Return the phase of a pod."""
        return str(self.cluster.get("pod", name, "-n", TEAM)["status"]["phase"])

    def logs(self, name: str) -> str:
        """Return a pod's output so far."""
        return self.cluster.ask("-n", TEAM, "logs", name)[1]

    def ended(self, name: str) -> str:
        """Wait until a pod has ended; return its output."""
        until(lambda: self.phase(name) in {"Succeeded", "Failed"}, f"{name} ends")
        return self.logs(name)

    def shell(self, name: str, script: str) -> str:
        """Run a script in a running pod; return its output."""
        return self.cluster.good(
            "-n", TEAM, "exec", name, "--", "bash", "-c", f"cd /data; {{ {script}; }} 2>&1"
        )

    def answers(self, name: str) -> bool:
        """Return whether `kubectl exec` works in a pod."""
        return self.cluster.ask("-n", TEAM, "exec", name, "--", "true")[0] == 0

    def delete(self, name: str, *, within_s: float = 30.0) -> None:
        """Delete a pod; fail if that takes longer than `within_s`."""
        self.cluster.good(
            "-n", TEAM, "delete", "pod", name, f"--timeout={within_s:g}s", "--ignore-not-found"
        )

    def reasons(self, name: str) -> set[str]:
        """Return reason and message of each event about a pod."""
        listed = self.cluster.get(
            "events", "", "-n", TEAM, "--field-selector", f"involvedObject.name={name}"
        )
        return {f"{item['reason']}: {item['message']}" for item in listed["items"]}


@pytest.fixture(scope="module")
def installed(
    cluster: real_cluster.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[real_cluster.Cluster]:
    if Path(cluster.kubeconfig) != layout.KUBECONFIG:
        pytest.skip("only the cluster of make cluster has the programs' image")
    folder = tmp_path_factory.mktemp("fuse")
    cluster.install(folder)
    cluster.shell(real_cluster.block("fuse.md", "rollout status daemonset/muster-fuse"), folder)
    yield cluster
    cluster.rest()


@pytest.fixture(scope="module")
def team(installed: real_cluster.Cluster) -> Iterator[Team]:
    installed.good("create", "namespace", TEAM)
    labels = ("pod-security.kubernetes.io/enforce=restricted", "fuse.muster.dev/allowed=true")
    installed.good("label", "namespace", TEAM, *labels)
    yield Team(installed)
    installed.good("delete", "namespace", TEAM, "--timeout=60s")


def mounts_of_the_node() -> list[str]:
    """Return the lines of the FUSE mounts in the kubelet's mount namespace."""
    (kubelet,) = node.processes("kubelet")
    lines = Path(f"/proc/{kubelet}/mountinfo").read_text().splitlines()
    return [line for line in lines if " - fuse" in line and " - fusectl " not in line]


def front() -> list[int]:
    """Return the process ids of the broker's front, which serves the pods."""
    pids = subprocess.run(
        ["/usr/bin/pgrep", "-f", "muster_fuse --config"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(pid) for pid in pids.stdout.split()]


def broker(cluster: real_cluster.Cluster) -> dict[str, Any]:
    """Wait until a pod of the broker is ready; return it."""

    def ready() -> dict[str, Any]:
        for pod in cluster.pods(BROKER):
            conditions = pod["status"].get("conditions", ())
            if any(each["type"] == "Ready" and each["status"] == "True" for each in conditions):
                return pod
        return {}

    return until(ready, "the broker is ready")


def test_a_restricted_pod_mounts_uses_and_unmounts(team: Team) -> None:
    script = """
mount_photos
cat photos/file
echo written > photos/new && cat remote/new
grep -o ' /data/photos .* - fuse[^ ]*' /proc/self/mountinfo | cut -d' ' -f3
fusermount3 -u photos
ls photos | wc -l
"""
    team.start("once", script)
    assert team.ended("once").split() == ["seen", "written", "rw,nosuid,nodev,relatime", "0"]
    assert mounts_of_the_node() == []
    assert team.phase("once") == "Succeeded"
    team.delete("once")


def test_a_namespace_without_the_label_is_refused(installed: real_cluster.Cluster) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "refused", "namespace": "default"},
        "spec": {
            "containers": [{"name": "main", "image": real_cluster.BUSYBOX}],
            "volumes": [FUSE],
        },
    }
    code, output = installed.ask("create", "-f", "-", given=pod)
    assert code != 0
    assert "fuse.muster.dev/allowed" in output


def test_a_mount_lives_through_the_end_of_broker_and_kubelet(team: Team) -> None:
    team.start("long", "mount_photos && exec sleep infinity")
    until(lambda: team.phase("long") == "Running", "the pod runs")
    until(lambda: "seen" in team.shell("long", "cat photos/file || true"), "it has mounted")
    before = broker(team.cluster)["metadata"]["name"]
    team.cluster.good("-n", real_cluster.NAMESPACE, "delete", "pod", before)
    assert team.shell("long", "cat photos/file") == "seen\n"
    assert broker(team.cluster)["metadata"]["name"] != before
    subprocess.run(
        [sys.executable, "-m", "scripts.cluster", "kubelet", "restart"],
        check=True,
        cwd=layout.ROOT,
    )
    until(lambda: team.answers("long"), "the kubelet knows its pods again")
    assert team.shell("long", "cat photos/file; fusermount3 -u photos; ls photos | wc -l") == (
        "seen\n0\n"
    )
    again = team.shell("long", "echo again > remote/file; ls -d /run/muster-fuse/broker.sock")
    assert again == "/run/muster-fuse/broker.sock\n"
    team.delete("long")


def test_a_pod_with_a_hanging_mount_is_deleted(team: Team) -> None:
    script = "mount_photos && pkill -STOP sshfs && { cat photos/file & } && exec sleep infinity"
    team.start("hanging", script)
    until(lambda: team.phase("hanging") == "Running", "the pod runs")
    until(
        lambda: "T" in team.shell("hanging", "ps -o stat= -C sshfs || true"),
        "the daemon is stopped",
    )
    team.delete("hanging")
    assert mounts_of_the_node() == []


def test_a_frozen_broker_costs_one_line_and_no_mount(team: Team) -> None:
    team.start("cold", "mount_photos && mkdir other && exec sleep infinity")
    until(lambda: team.phase("cold") == "Running", "the pod runs")
    until(lambda: "seen" in team.shell("cold", "cat photos/file || true"), "it has mounted")
    broker(team.cluster)
    (pid,) = front()
    os.kill(pid, signal.SIGSTOP)
    try:
        output = team.shell("cold", f"{SSHFS}remote other; cat photos/file")
    finally:
        os.kill(pid, signal.SIGCONT)
    *refused, seen = output.splitlines()
    assert seen == "seen"
    assert [line for line in refused if "broker" in line] == refused[:1], output
    assert team.shell("cold", f"{SSHFS}remote other && cat other/file") == "seen\n"
    team.delete("cold")


def test_a_dead_daemon_is_noticed_by_its_users_who_mount_again(team: Team) -> None:
    team.start("dead", "mount_photos && exec sleep infinity")
    until(lambda: team.phase("dead") == "Running", "the pod runs")
    until(lambda: "seen" in team.shell("dead", "cat photos/file || true"), "it has mounted")
    again = f"fusermount3 -u photos; {SSHFS}remote photos; cat photos/file"
    first, _, then = team.shell("dead", f"pkill -KILL sshfs; cat photos/file; {again}").partition(
        "\n"
    )
    # the daemon may die before the request or during it
    errors = ("Transport endpoint is not connected", "Software caused connection abort")
    assert (first in {f"cat: photos/file: {error}" for error in errors}, then) == (True, "seen\n")
    team.delete("dead")


def test_an_unchanged_pod_of_skypilot_mounts_without_the_resource(
    installed: real_cluster.Cluster, team: Team
) -> None:
    installed.good("create", "namespace", "sky")
    installed.good("label", "namespace", "sky", "fuse.muster.dev/allowed=true")
    installed.good("annotate", "namespace", "sky", f"fuse.muster.dev/replace={RESOURCE}")
    script = f"cd /tmp && mkdir remote photos && echo seen > remote/file && {SSHFS}remote photos"
    container = {
        "name": "ray-node",
        "image": images.FUSE_PROGRAMS,
        "command": ["bash", "-c", f"{script} && cat photos/file"],
        "resources": {"requests": {RESOURCE: "1"}, "limits": {RESOURCE: "1"}},
        "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "head", "namespace": "sky"},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }
    try:
        made = json.loads(installed.good("create", "-o", "json", "-f", "-", given=pod))
        (given,) = made["spec"]["containers"]
        assert given["resources"] == {}
        assert given["securityContext"]["capabilities"] == {}
        ended = {"Succeeded", "Failed"}
        until(
            lambda: installed.get("pod", "head", "-n", "sky")["status"]["phase"] in ended,
            "the pod ends",
        )
        assert installed.good("-n", "sky", "logs", "head") == "seen\n"
    finally:
        installed.good("delete", "namespace", "sky", "--timeout=60s")
    assert team.cluster is installed


def test_a_pod_waits_for_the_broker_and_says_so(team: Team) -> None:
    patch = {"spec": {"template": {"spec": {"nodeSelector": {"nowhere": "true"}}}}}
    where = ("-n", real_cluster.NAMESPACE, "patch", "daemonset", BROKER)
    team.cluster.good(*where, "-p", json.dumps(patch))
    until(lambda: not team.cluster.pods(BROKER), "the broker has gone")
    try:
        team.start("waiting", "mount_photos && cat photos/file")
        until(
            lambda: any("FailedMount" in reason for reason in team.reasons("waiting")),
            "an event says what the pod waits for",
        )
    finally:
        remove = [{"op": "remove", "path": "/spec/template/spec/nodeSelector/nowhere"}]
        team.cluster.good(*where, "--type=json", "-p", json.dumps(remove))
    broker(team.cluster)
    until(lambda: team.phase("waiting") == "Succeeded", "the pod has mounted", within_s=150)
    assert team.logs("waiting") == "seen\n"
    team.delete("waiting")
