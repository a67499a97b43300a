"""What `muster check muster` reports about muster's own pods and volume claims."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from muster.kubernetes import objects, scheduling
from muster_labeler.check import findings, muster_findings

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
COMMANDS = findings.Commands()
UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."


def _pod(*, age_s: float = 60, **status: Any) -> objects.Pod:
    created = (NOW - timedelta(seconds=age_s)).isoformat()
    metadata = {"name": "muster-x", "namespace": "muster", "creationTimestamp": created}
    return msgspec.convert({"metadata": metadata, "status": status}, objects.Pod)


def _condition(kind: str, status: str, message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "message": message}


def _container(ready: bool, **state: Any) -> dict[str, Any]:  # noqa: FBT001  # as in the API
    return {"name": "health", "ready": ready, "state": state}


def _messages(*pods: objects.Pod) -> list[str]:
    view = findings.ClusterView(now=NOW, own_pods=pods)
    return [finding.message for finding in muster_findings.evaluate(view, COMMANDS)]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"conditions": [_condition("PodScheduled", "False", UNBOUND)]}, UNBOUND),
        (
            {
                "conditions": [_condition("Ready", "False")],
                "containerStatuses": [
                    _container(ready=False, waiting={"reason": "ImagePullBackOff", "message": "x"})
                ],
            },
            "ImagePullBackOff x",
        ),
        (
            {"containerStatuses": [_container(ready=False, running={})]},
            "health runs but reports that it is not ready; see its log",
        ),
        (
            {"containerStatuses": [_container(ready=False, terminated={"exitCode": 137})]},
            "health ended with exit code 137; see its log",
        ),
        ({"phase": "Pending"}, "Pending"),
    ],
)
def test_a_pod_that_is_not_ready_says_why(status: dict[str, Any], message: str) -> None:
    assert _messages(_pod(**status)) == [f"is not ready: {message}"]


def test_pods_that_are_ready_or_young_or_end_are_no_finding() -> None:
    ready = _pod(conditions=[_condition("Ready", "True")])
    ending = msgspec.structs.replace(
        _pod(), metadata=objects.Metadata(deletion_timestamp="2026-01-01T12:00:00Z")
    )
    unready = [_condition("Ready", "False")]
    over = _pod(phase="Succeeded", conditions=unready, containerStatuses=[_container(ready=False)])
    assert _messages(ready, ending, over, _pod(age_s=29, phase="Pending")) == []


def test_a_pod_that_is_ready_between_two_crashes_says_how_it_ended() -> None:
    def crashed(finished: str) -> objects.Pod:
        ended = {"reason": "Error", "exitCode": 137, "finishedAt": finished}
        container = _container(ready=True) | {
            "restartCount": 3,
            "lastState": {"terminated": ended},
        }
        return _pod(conditions=[_condition("Ready", "True")], containerStatuses=[container])

    assert _messages(crashed("2026-01-01T11:00:00Z")) == []
    text = "3 restarts of health, the last at 11:01 UTC (Error, exit code 137)"
    assert _messages(crashed("2026-01-01T11:01:00Z")) == [text]


def test_of_several_containers_the_last_failure_counts_and_a_success_is_none() -> None:
    def ended(name: str, code: int, minute: int) -> dict[str, Any]:
        last = {"exitCode": code, "finishedAt": f"2026-01-01T11:{minute}:00Z"}
        return {"name": name, "restartCount": 1, "lastState": {"terminated": last}}

    statuses = [ended("a", 1, 10), ended("b", 2, 30), ended("c", 1, 20), ended("d", 0, 40)]
    pod = _pod(conditions=[_condition("Ready", "True")], containerStatuses=statuses)
    assert _messages(pod) == ["1 restart of b, the last at 11:30 UTC (ended, exit code 2)"]


@pytest.mark.parametrize("part", ["muster-test", "muster-test-device"])
def test_a_pod_of_helm_test_is_no_part_of_muster(part: str) -> None:
    failed = _pod(phase="Failed", containerStatuses=[_container(ready=False)])
    labels = {"app.kubernetes.io/name": part}
    metadata = msgspec.structs.replace(failed.metadata, labels=labels)
    assert _messages(msgspec.structs.replace(failed, metadata=metadata)) == []


@pytest.mark.parametrize(
    ("mounts", "is_confined"),
    [
        ([{"mountPath": "/dev", "readOnly": True, "recursiveReadOnly": "Enabled"}], True),
        ([{"mountPath": "/dev", "readOnly": True, "recursiveReadOnly": "Disabled"}], False),
        ([{"mountPath": "/etc/muster", "recursiveReadOnly": "Enabled"}], False),
        # a kubelet before 1.31, which does not report mounts
        (None, False),
    ],
)
def test_a_plugin_that_could_write_below_dev_is_named(
    mounts: list[dict[str, Any]] | None, *, is_confined: bool
) -> None:
    plugin = _pod(
        phase="Running",
        conditions=[_condition("Ready", "True")],
        containerStatuses=[{**_container(ready=True), "volumeMounts": mounts}],
    )
    assert _messages(plugin) == []
    labels = {"app.kubernetes.io/name": "muster-plugin"}
    named = msgspec.structs.replace(
        plugin, metadata=msgspec.structs.replace(plugin.metadata, labels=labels)
    )
    view = findings.ClusterView(now=NOW, own_pods=[named])
    results = [*muster_findings.evaluate(view, COMMANDS)]
    assert [finding.id for finding in results] == ([] if is_confined else ["RUN003"])


@pytest.mark.parametrize(
    ("phase", "storage_class", "ids"),
    [("Pending", "", ["RUN002"]), ("Pending", "fast", []), ("Bound", "", [])],
)
def test_a_claim_without_a_class_that_could_serve_it(
    phase: str, storage_class: str, ids: list[str]
) -> None:
    claim = scheduling.VolumeClaim(
        metadata=objects.Metadata(name="data-muster-nats-0", namespace="muster"),
        spec=scheduling.VolumeClaimSpec(storage_class_name=storage_class),
        status=scheduling.VolumeClaimStatus(phase=phase),
    )
    view = findings.ClusterView(now=NOW, own_claims=[claim])
    results = [*muster_findings.evaluate(view, COMMANDS)]
    assert [finding.id for finding in results] == ids
    assert {finding.object for finding in results} <= {"muster/data-muster-nats-0"}
