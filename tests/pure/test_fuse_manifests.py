"""How the FUSE broker is deployed: its permissions, who may use it, and its part of the chart."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from muster.nats.auth import permissions
from muster.service import settings
from muster_gate import config as gate_config
from muster_health.model import config as health_config
from tests.worlds import admission_policy, manifests

BROKER: Final = "fuse-broker"
IN: Final = {"minimal": (BROKER,), "production": (BROKER, f"{BROKER}-tls")}
ALLOWED: Final = {"fuse.muster.dev/allowed": "true"}
FUSE: Final = {"volumes": [{"name": "fuse", "csi": {"driver": "fuse.muster.dev"}}]}
OTHER: Final = {"volumes": [{"name": "s", "csi": {"driver": "secrets"}}, {"name": "e"}]}
MESSAGE: Final = (
    "volumes of the driver fuse.muster.dev are only for namespaces with the label "
    "fuse.muster.dev/allowed=true"
)


@functools.cache
def deployed(overlay: str) -> tuple[manifests.Object, ...]:
    with tempfile.TemporaryDirectory() as where:
        return tuple(manifests.with_component(overlay, *IN[overlay], where=Path(where)))


def only(overlay: str, kind: str, name: str = "muster-fuse") -> manifests.Object:
    (there,) = [o for o in deployed(overlay) if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return there


def pod(overlay: str) -> Any:
    return only(overlay, "DaemonSet")["spec"]["template"]["spec"]


def file_in(overlay: str, service: str) -> str:
    (text,) = [
        o["data"][f"{service}.yaml"]
        for o in deployed(overlay)
        if o["kind"] == "ConfigMap"
        and o["metadata"]["name"].startswith(f"muster-{service}-settings")
    ]
    return str(text)


@pytest.mark.parametrize("overlay", IN)
def test_the_broker_has_no_right_at_the_api_and_one_token_for_nats(overlay: str) -> None:
    assert pod(overlay)["automountServiceAccountToken"] is False
    assert only(overlay, "ServiceAccount")["automountServiceAccountToken"] is False
    bound = [
        subject["name"]
        for o in deployed(overlay)
        if o["kind"].endswith("RoleBinding")
        for subject in o["subjects"]
    ]
    assert "muster-fuse" not in bound
    (projected,) = [v["projected"] for v in pod(overlay)["volumes"] if "projected" in v]
    (source,) = projected["sources"]
    assert source["serviceAccountToken"]["audience"] == gate_config.Tokens().audience


def test_the_gate_gives_the_brokers_account_the_brokers_name() -> None:
    account = pod("minimal")["serviceAccountName"]
    assert gate_config.Tokens().others[account] == (permissions.FUSE_BROKER,)


@pytest.mark.parametrize("overlay", IN)
def test_the_brokers_mounts_reach_the_node_and_its_root_is_read_only(overlay: str) -> None:
    (container,) = pod(overlay)["containers"]
    assert {
        mount["mountPath"]
        for mount in container["volumeMounts"]
        if mount.get("mountPropagation") == "Bidirectional"
    } == {"/var/lib/kubelet", "/var/lib/muster-fuse"}
    assert container["securityContext"] == {
        "privileged": True,
        "runAsUser": 0,
        "readOnlyRootFilesystem": True,
    }
    assert pod(overlay)["hostPID"] is True
    assert pod(overlay)["tolerations"] == [{"operator": "Exists"}]
    assert pod(overlay)["priorityClassName"] == "system-node-critical"
    update = only(overlay, "DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"]
    assert update["maxSurge"] == 0


def test_the_driver_attaches_nothing_and_asks_for_the_pods_identity() -> None:
    assert only("minimal", "CSIDriver", "fuse.muster.dev")["spec"] == {
        "attachRequired": False,
        "podInfoOnMount": True,
        "volumeLifecycleModes": ["Ephemeral"],
        "fsGroupPolicy": "None",
        "requiresRepublish": True,
    }


@pytest.mark.parametrize("overlay", IN)
def test_health_expects_the_broker_besides_the_plugin(overlay: str) -> None:
    (tree,) = settings.parse(file_in(overlay, "health").encode(), source="health")
    chosen = settings.validate(health_config.Settings, tree, source="health")
    assert [(p.plugin, p.daemonset) for p in chosen.cluster.plugins] == [
        ("device-plugin", "muster-plugin"),
        (BROKER, "muster-fuse"),
    ]


def test_in_production_the_broker_verifies_nats() -> None:
    env = {e["name"]: e.get("value", "") for e in pod("production")["containers"][0]["env"]}
    assert env["MUSTER_FUSE__BUS__URL"] == "tls://muster-nats:4222"
    assert env["NATS_CA"] == "/etc/nats-tls/ca.crt"


@pytest.mark.parametrize("overlay", IN)
def test_the_chart_says_what_the_component_says(overlay: str) -> None:
    values = {"fuse": {"enabled": True}, "production": {"enabled": overlay == "production"}}
    rendered = manifests.of_chart(values)
    expected = [o for o in deployed(overlay) if o["kind"] != "Namespace"]
    assert manifests.by_name(rendered) == manifests.by_name(expected)


TEMPLATED: Final[dict[str, Callable[[Any], Any]]] = {
    "Pod": lambda spec: {"spec": spec},
    "PodTemplate": lambda spec: {"template": {"spec": spec}},
    "ReplicationController": lambda spec: {"spec": {"template": {"spec": spec}}},
    "DaemonSet": lambda spec: {"spec": {"template": {"spec": spec}}},
    "Deployment": lambda spec: {"spec": {"template": {"spec": spec}}},
    "ReplicaSet": lambda spec: {"spec": {"template": {"spec": spec}}},
    "StatefulSet": lambda spec: {"spec": {"template": {"spec": spec}}},
    "Job": lambda spec: {"spec": {"template": {"spec": spec}}},
    "CronJob": lambda spec: {"spec": {"jobTemplate": {"spec": {"template": {"spec": spec}}}}},
}


def refused(
    kind: str, new: Any, *, old: Any = None, labels: dict[str, str] | None = None
) -> list[str]:
    """Return the messages with which the policy refuses an object in a namespace with labels."""
    policy = only("minimal", "ValidatingAdmissionPolicy")["spec"]
    namespace = {"metadata": {} if labels is None else {"labels": labels}}
    known = {
        "request": {"operation": "UPDATE" if old else "CREATE", "kind": {"kind": kind}},
        "object": new,
        "oldObject": old,
        "namespaceObject": namespace,
    }
    return admission_policy.refused(policy["validations"], known, variables=policy["variables"])


@pytest.mark.parametrize("kind", TEMPLATED)
def test_only_labelled_namespaces_may_use_the_driver_in_whatever_makes_pods(kind: str) -> None:
    of = TEMPLATED[kind]
    assert refused(kind, of(FUSE)) == [MESSAGE]
    assert refused(kind, of(FUSE), labels={"fuse.muster.dev/allowed": "false"}) == [MESSAGE]
    assert refused(kind, of(FUSE), labels=ALLOWED) == []
    assert refused(kind, of(OTHER)) == []
    assert refused(kind, of({}), labels={}) == []


@pytest.mark.parametrize("kind", TEMPLATED)
def test_a_volume_that_is_there_already_keeps_nobody_from_changing_the_rest(kind: str) -> None:
    of = TEMPLATED[kind]
    assert refused(kind, of(FUSE), old=of(FUSE)) == []
    assert refused(kind, of(OTHER), old=of(FUSE)) == []
    assert refused(kind, of(FUSE), old=of(OTHER)) == [MESSAGE]


def test_the_policy_asks_about_every_kind_that_carries_a_pod() -> None:
    constraints = only("minimal", "ValidatingAdmissionPolicy")["spec"]["matchConstraints"]
    resources = {r for rule in constraints["resourceRules"] for r in rule["resources"]}
    assert resources == {f"{kind.lower()}s" for kind in TEMPLATED}
    assert only("minimal", "ValidatingAdmissionPolicy")["spec"]["failurePolicy"] == "Fail"
    binding = only("minimal", "ValidatingAdmissionPolicyBinding")["spec"]
    assert binding == {"policyName": "muster-fuse", "validationActions": ["Deny", "Audit"]}
