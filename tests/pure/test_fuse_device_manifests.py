"""The two ways to give pods /dev/fuse itself: their manifests, and what their policies allow."""

import functools
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from cel_expr_python import cel

from muster_fuse.dra import driver
from tests.worlds import manifests
from tests.worlds.manifests import Object

COMPONENTS: Final = ("fuse-nri", "fuse-dra")
DEVICE: Final = "fuse.muster.dev/device"
RESOURCE: Final = "muster.dev/fuse"
ALLOWED: Final = {"fuse.muster.dev/device-allowed": "true"}
_NAMES: Final = ("object", "oldObject", "request", "namespaceObject", "variables")
_CEL: Final = cel.NewEnv(variables=dict.fromkeys(_NAMES, cel.Type.DYN))


def shipped(component: str, kind: str) -> list[Object]:
    folder = manifests.ROOT / "k8s/components" / component
    objects = [
        o
        for file in sorted(folder.glob("*.yaml"))
        for o in yaml.safe_load_all(file.read_text("utf-8"))
    ]
    return [o for o in objects if o["kind"] == kind]


@functools.cache
def evaluated(expression: str) -> Any:
    return _CEL.compile(expression)


def denied(
    policy: Object, new: Object, *, old: Object | None = None, labels: dict[str, str] | None = None
) -> list[str]:
    """Return the messages with which a policy denies a change, as the API server evaluates it."""
    known: dict[str, Any] = {
        "object": new,
        "oldObject": old,
        "request": {"operation": "CREATE" if old is None else "UPDATE"},
        "namespaceObject": {"metadata": {} if labels is None else {"labels": labels}},
        "variables": {},
    }

    def value(expression: str) -> Any:
        result = evaluated(expression).eval(data=known)
        assert result.type() != cel.Type.ERROR, f"{expression}: {result.value()}"
        return result.plain_value()

    for variable in policy["spec"]["variables"]:
        known["variables"][variable["name"]] = value(variable["expression"])
    rules = policy["spec"]["validations"]
    return [rule["message"] for rule in rules if not value(rule["expression"])]


def policy(component: str, name: str) -> Object:
    (match,) = [
        o for o in shipped(component, "ValidatingAdmissionPolicy") if o["metadata"]["name"] == name
    ]
    return match


def annotated(**annotations: str) -> Object:
    return {"metadata": {"annotations": annotations} if annotations else {}}


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_object_is_one_of_kubernetes_and_says_that_it_is_ours(
    component: str, tmp_path: Path
) -> None:
    base = manifests.objects("minimal")
    added = [
        o for o in manifests.with_component("minimal", component, where=tmp_path) if o not in base
    ]
    assert len(added) >= 5
    for manifest in added:
        manifests.validate(manifest)
        assert manifest["metadata"]["labels"] == {
            "app.kubernetes.io/name": f"muster-{component}",
            "app.kubernetes.io/part-of": "muster",
        }


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_process_has_no_rights_no_network_and_two_directories_of_the_node_at_most(
    component: str,
) -> None:
    (workload,) = shipped(component, "DaemonSet")
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "runAsUser": 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    places = {
        "fuse-nri": {"/var/run/nri"},
        "fuse-dra": {"/var/lib/kubelet/plugins_registry", "/var/run/cdi"},
    }
    assert {volume["hostPath"]["path"] for volume in pod["volumes"]} == places[component]
    assert not [o for kind in ("Role", "ClusterRole") for o in shipped(component, kind)]
    (network,) = shipped(component, "NetworkPolicy")
    assert network["spec"].get("egress", []) == []


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_policy_is_bound_and_fails_closed(component: str) -> None:
    policies = shipped(component, "ValidatingAdmissionPolicy")
    bound = {
        o["spec"]["policyName"]: o["spec"]["validationActions"]
        for o in shipped(component, "ValidatingAdmissionPolicyBinding")
    }
    assert bound == {o["metadata"]["name"]: ["Deny"] for o in policies}
    assert {o["spec"]["failurePolicy"] for o in policies} == {"Fail"}


@pytest.mark.parametrize("labels", [None, {}, {**ALLOWED, "fuse.muster.dev/device-allowed": "yes"}])
@pytest.mark.parametrize("key", [DEVICE, f"{DEVICE}.container.main"])
def test_the_annotation_needs_the_label_of_the_namespace(
    key: str, labels: dict[str, str] | None
) -> None:
    rule = policy("fuse-nri", "muster-fuse-nri")
    message = (
        f"pods of this namespace may not have the annotation {DEVICE}: the namespace has no label "
        "fuse.muster.dev/device-allowed=true"
    )
    assert denied(rule, annotated(**{key: "true"}), labels=labels) == [message]
    assert denied(rule, annotated(**{key: "true"}), labels=ALLOWED) == []


@pytest.mark.parametrize(
    "annotations", [{}, {DEVICE: "false"}, {"fuse.muster.dev/mount": "true"}, {"other": "true"}]
)
def test_other_pods_are_none_of_its_business(annotations: dict[str, str]) -> None:
    assert denied(policy("fuse-nri", "muster-fuse-nri"), annotated(**annotations)) == []


def test_a_pod_can_be_changed_after_the_label_was_removed_but_not_annotated_then() -> None:
    rule = policy("fuse-nri", "muster-fuse-nri")
    before = annotated(**{DEVICE: "true"})
    assert denied(rule, annotated(**{DEVICE: "true", "other": "x"}), old=before) == []
    assert denied(rule, annotated(**{DEVICE: "true"}), old=annotated()) != []
    assert denied(rule, annotated(**{DEVICE: "true"}), old=annotated(**{DEVICE: "false"})) != []


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_the_resource_needs_the_label_of_the_namespace(kind: str) -> None:
    rule = policy("fuse-dra", "muster-fuse-dra")
    asking = {"resources": {"limits": {RESOURCE: "1"}}}
    pod = {"spec": {"containers": [{"name": "main"}], kind: [asking]}}
    assert len(denied(rule, pod, labels={})) == 1
    assert denied(rule, pod, labels=ALLOWED) == []
    plain = {"spec": {"containers": [{}, {"resources": {}}, {"resources": {"limits": {}}}]}}
    assert denied(rule, plain, labels={}) == []


@pytest.mark.parametrize(
    ("request_", "is_ours"),
    [
        ({"exactly": {"deviceClassName": "fuse.muster.dev"}}, True),
        ({"firstAvailable": [{"deviceClassName": "fuse.muster.dev"}]}, True),
        ({"exactly": {"deviceClassName": "gpu.example.com"}}, False),
    ],
)
def test_a_claim_needs_the_label_and_a_template_would_stop_the_autoscaler(
    request_: Object, *, is_ours: bool
) -> None:
    claim = {"spec": {"devices": {"requests": [{"name": "fuse", **request_}]}}}
    claims = policy("fuse-dra", "muster-fuse-dra-claims")
    assert bool(denied(claims, claim, labels={})) == is_ours
    assert denied(claims, claim, labels=ALLOWED) == []
    assert denied(claims, {"spec": {}}) == []
    templates = policy("fuse-dra", "muster-fuse-dra-templates")
    assert bool(denied(templates, {"spec": claim}, labels=ALLOWED)) == is_ours
    assert denied(templates, {"spec": {"spec": {}}}) == []


def test_class_and_slice_name_the_driver_its_pool_and_its_device() -> None:
    (device_class,) = shipped("fuse-dra", "DeviceClass")
    assert device_class["spec"] == {
        "extendedResourceName": RESOURCE,
        "selectors": [{"cel": {"expression": f'device.driver == "{driver.DRIVER}"'}}],
    }
    (devices,) = shipped("fuse-dra", "ResourceSlice")
    assert devices["spec"] == {
        "driver": driver.DRIVER,
        "pool": {"name": driver.POOL, "generation": 1, "resourceSliceCount": 1},
        "allNodes": True,
        "devices": [{"name": driver.DEVICE, "allowMultipleAllocations": True}],
    }


def test_the_example_waits_for_its_device() -> None:
    (pod,) = shipped("fuse-nri", "Pod")
    assert pod["metadata"]["annotations"] == {DEVICE: "true"}
    assert pod["spec"]["initContainers"][0]["args"] == ["muster_fuse.nri.device_check"]
    manifests.validate(pod)
