"""What `helm test` runs: a pod that requests a device, and one that checks the allocation."""

from typing import Any, Final

import msgspec
import pytest

from muster.kubernetes import installation
from muster.kubernetes.installation import Allocation, Pod
from tests.worlds import manifests

Values = dict[str, Any]

NODE: Final = {"nodeName": "node-a"}
READY: Final = {"conditions": [{"type": "Ready", "status": "True"}]}
LACKING: Final = "0/1 nodes are available: 1 Insufficient example.com/a."
UNSCHEDULABLE: Final = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": LACKING,
}
REFUSED: Final = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "gone"}


def of_test(values: Values) -> dict[str, Any]:
    return {o["metadata"]["name"]: o for o in manifests.of_chart(values, hooks="test")}


@pytest.mark.parametrize("production", [False, True])
def test_a_pod_asks_for_the_first_device_and_another_has_the_rights_of_health(
    *, production: bool
) -> None:
    resource = {"name": "example.com/a", "groups": [{"devices": [{"path": "/dev/a"}]}]}
    values: Values = {"devices": [resource], "production": {"enabled": production}}
    made = of_test(values)
    assert list(made) == ["muster-test", "muster-test-device"]
    for item in made.values():
        manifests.validate(item)
    test, device = made["muster-test"]["spec"], made["muster-test-device"]["spec"]["template"]
    limits = device["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"memory": "64Mi", "example.com/a": 1}
    assert device["spec"]["automountServiceAccountToken"] is False
    (health,) = [
        o["spec"]["template"]["spec"]
        for o in manifests.of_chart(values)
        if (o["kind"], o["metadata"]["name"]) == ("Deployment", "muster-health")
    ]
    for key in ("serviceAccountName", "volumes", "securityContext", "priorityClassName"):
        assert test[key] == health[key]
    main = test["containers"][0]
    assert main["args"] == ["muster.cli.verify_installation", "example.com/a"]
    assert main["env"][: len(health["containers"][0]["env"])] == health["containers"][0]["env"]
    # the objects of a passed test are deleted at once, so `helm uninstall` leaves none
    policies = [o["metadata"]["annotations"]["helm.sh/hook-delete-policy"] for o in made.values()]
    assert policies == ["before-hook-creation,hook-succeeded"] * 2
    # no selector of health matches either, and both may connect to NATS
    labels = [item["metadata"]["labels"] for item in made.values()]
    names = [each["app.kubernetes.io/name"] for each in labels]
    assert names == ["muster-test", "muster-test-device"]
    assert {each["app.kubernetes.io/part-of"] for each in labels} == {"muster"}


def test_who_only_watches_tests_no_device() -> None:
    made = of_test({"watch": {"enabled": True}})
    assert list(made) == ["muster-test"]
    (main,) = made["muster-test"]["spec"]["containers"]
    assert main["args"] == ["muster.cli.verify_installation"]


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([], (Allocation.WAITING, "there is no such pod")),
        ([{"status": {"phase": "Pending"}}], (Allocation.WAITING, "a is Pending")),
        (
            [{"status": {"phase": "Pending", "conditions": [UNSCHEDULABLE]}}],
            (Allocation.UNSCHEDULABLE, LACKING),
        ),
        (
            [{"spec": NODE, "status": REFUSED}, {"status": {"phase": "Pending"}}],
            (Allocation.REFUSED, "a on node-a: UnexpectedAdmissionError: gone"),
        ),
        # a second pod was created after the refusal
        ([{"status": REFUSED}, {"spec": NODE, "status": READY}], (Allocation.GIVEN, "node-a")),
    ],
)
def test_a_pod_has_its_device_once_any_of_them_runs(
    pods: list[Any], expected: tuple[Allocation, str]
) -> None:
    listed = [msgspec.convert({"metadata": {"name": "a"}, **pod}, Pod) for pod in pods]
    assert installation.allocation(listed) == expected
