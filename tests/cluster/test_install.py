"""The minimal overlay on a real Kubernetes API server: it takes the objects, and holds the rights.

Run `pytest -m cluster` and nothing less: a KUBECONFIG that merely lies about may be a real cluster.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.worlds import api_rights, api_server, manifests

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

OVERLAY: Final = manifests.ROOT / "k8s/overlays/minimal"
LABELER: Final = "system:serviceaccount:muster:muster-labeler"
NODE: Final = "muster-test-install"
KEY: Final = "skypilot.co/accelerator"
LEFT: Final = (
    "clusterrole,clusterrolebinding",
    "validatingadmissionpolicy,validatingadmissionpolicybinding",
    "role,rolebinding -n default",
    "role,rolebinding -n kube-node-lease",
)
"""What is outside our namespace, and is gone with the rest."""
_HOLDS_S: Final = 60.0


class Installed:
    """A cluster, asked with kubectl."""

    def __init__(self, kubeconfig: str) -> None:
        executable = shutil.which("kubectl", path=str(pathlib.Path(sys.executable).parent))
        self._kubectl = [executable or "kubectl", "--kubeconfig", kubeconfig]

    def ask(self, *words: str, given: object = None) -> tuple[int, str]:
        """Return the exit code, and what was said on stdout or else on stderr."""
        done = subprocess.run(
            [*self._kubectl, *words],
            input=json.dumps(given) if given is not None else None,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout or done.stderr

    def good(self, *words: str, given: object = None) -> str:
        """Ask what must come out."""
        code, output = self.ask(*words, given=given)
        assert code == 0, f"kubectl {' '.join(words)}: {output}"
        return output

    def patches(self, patch: object, *more: str) -> tuple[int, str]:
        """Try to patch the node as the labeler."""
        words = ("patch", "node", NODE, "--type=merge", "--as", LABELER, "-p", json.dumps(patch))
        return self.ask(*words, *more)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Installed]:
    with api_server.asked_for(request) as (kubeconfig, _):
        installed = Installed(kubeconfig)
        if installed.ask("get", "namespace", "muster")[0] == 0:
            pytest.skip("no throwaway cluster: it has a namespace muster already")
        # where no controllers run, nobody made it
        installed.ask("create", "namespace", "kube-node-lease")
        installed.good("apply", "-k", str(OVERLAY))
        installed.good("create", "-f", "-", given={**_named("v1", "Node"), "spec": {}})
        try:
            yield installed
        finally:
            installed.ask("delete", "node", NODE)
            # a server without controllers never ends the namespace
            installed.good("delete", "-k", str(OVERLAY), "--wait=false")
        label = "app.kubernetes.io/part-of=muster"
        for kinds in LEFT:
            assert installed.good("get", *kinds.split(), "-l", label, "-o", "name") == "", kinds


def _named(version: str, kind: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": NODE}}


def test_the_server_has_every_object_and_a_second_apply_changes_nothing(
    cluster: Installed,
) -> None:
    lines = cluster.good("apply", "-k", str(OVERLAY)).splitlines()
    assert len(lines) == len(manifests.objects("minimal"))
    assert [line for line in lines if not line.endswith(" unchanged")] == []
    assert cluster.ask("diff", "-k", str(OVERLAY)) == (0, "")


def test_every_account_may_do_its_work_and_nothing_else(cluster: Installed) -> None:
    def says(asked: api_rights.Question) -> str:
        return cluster.ask("auth", "can-i", *asked.words())[1].split()[0]

    assert [asked for asked in api_rights.MAY if says(asked) != "yes"] == []
    assert [asked for asked in api_rights.MAY_NOT if says(asked) != "no"] == []


def test_the_labeler_writes_labels_of_accelerators_and_nothing_else(cluster: Installed) -> None:
    until = time.monotonic() + _HOLDS_S
    # a policy takes a moment to hold
    while cluster.patches({"spec": {"unschedulable": True}})[0] == 0:
        assert time.monotonic() < until, f"the policy does not hold after {_HOLDS_S:g} s"
        cluster.good("uncordon", NODE)
        time.sleep(0.5)
    forbidden = [
        {"spec": {"taints": [{"key": "x", "effect": "NoSchedule"}]}},
        {"metadata": {"labels": {"team": "x"}}},
        {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}},
        {"metadata": {"annotations": {"team": "x"}}},
        {"metadata": {"finalizers": ["example.com/x"]}},
    ]
    for patch in forbidden:
        code, output = cluster.patches(patch)
        assert (code, "muster-labeler" in output) == (1, True), (patch, output)
    condition = {"type": "Ready", "status": "False", "reason": "x", "message": "x"}
    status = [{"conditions": [condition]}, {"capacity": {"nvidia.com/gpu": "8"}}]
    for patch in status:
        assert cluster.patches({"status": patch}, "--subresource=status")[0] == 1
    assert cluster.ask("delete", "node", NODE, "--as", LABELER)[0] == 1
    code, output = cluster.patches({"metadata": {"labels": {KEY: "h100"}}})
    assert code == 0, output
    ours = {**condition, "type": "DevicePluginHealthy"}
    code, output = cluster.patches({"status": {"conditions": [ours]}}, "--subresource=status")
    assert code == 0, output
    node = json.loads(cluster.good("get", "node", NODE, "-o", "json"))
    assert node["metadata"]["labels"][KEY] == "h100"
