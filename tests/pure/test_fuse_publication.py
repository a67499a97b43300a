from collections.abc import Mapping
from types import MappingProxyType

import hypothesis
import pytest
from hypothesis import strategies as st

from muster_fuse.request import caller
from muster_fuse.volume import publication
from muster_fuse.volume.publication import Reason

KUBELET = "/var/lib/kubelet"
UID = "0d5b8a6e-6c4f-4a43-9a43-1f4f3c1f7f55"
TARGET = f"{KUBELET}/pods/{UID}/volumes/kubernetes.io~csi/fuse/mount"
CONTEXT = {
    "csi.storage.k8s.io/pod.name": "train-0",
    "csi.storage.k8s.io/pod.namespace": "team-a",
    "csi.storage.k8s.io/pod.uid": UID,
    "csi.storage.k8s.io/serviceAccount.name": "default",
    "csi.storage.k8s.io/ephemeral": "true",
}


def wanted(
    *,
    volume_id: str = "csi-1",
    target: str = TARGET,
    is_mount: bool = True,
    namespaces: tuple[str, ...] = ("team-*",),
    changed: Mapping[str, str] = MappingProxyType({}),
) -> publication.Publication | Reason:
    context = CONTEXT | {f"csi.storage.k8s.io/pod.{key}": text for key, text in changed.items()}
    try:
        return publication.wanted(
            volume_id,
            target,
            context,
            is_mount=is_mount,
            kubelet=KUBELET,
            namespaces=namespaces,
        )
    except publication.Refused as refused:
        return refused.reason


def test_a_volume_is_for_the_pod_that_the_kubelet_names() -> None:
    assert wanted() == publication.Publication(
        volume=publication.Volume(pod_uid=UID, volume_id="csi-1", target=TARGET),
        pod=caller.Pod(uid=UID, namespace="team-a", name="train-0"),
    )


def test_static_pods_have_uids_of_their_own_kind() -> None:
    uid = "6f1d2c0a9b8e7f6d5c4b3a2918070605"
    made = wanted(target=TARGET.replace(UID, uid), changed={"uid": uid})
    assert isinstance(made, publication.Publication)
    assert made.pod.uid == uid


@pytest.mark.parametrize(
    ("namespaces", "is_allowed"),
    [
        (("team-a",), True),
        (("kube-*", "*-a"), True),
        (("team",), False),
        (("TEAM-A",), False),
        (("team-?", "x"), True),
    ],
)
def test_namespaces_are_allowed_by_shell_patterns(
    namespaces: tuple[str, ...],
    is_allowed: bool,  # noqa: FBT001  # a parameter of the table
) -> None:
    made = wanted(namespaces=namespaces)
    assert isinstance(made, publication.Publication) is is_allowed
    assert is_allowed or made is Reason.NAMESPACE


@pytest.mark.parametrize(
    "target",
    [
        "",
        "mount",
        KUBELET,
        f"{KUBELET}-of-another{TARGET.removeprefix(KUBELET)}",
        TARGET.replace(UID, ".."),
        TARGET.replace("/fuse/", "/../"),
        TARGET.replace("/fuse/", "/"),
        TARGET.replace("kubernetes.io~csi", "kubernetes.io~empty-dir"),
        f"{TARGET}/",
        f"{TARGET}/../../../../../../../etc",
        f"/etc{TARGET}",
        f"{TARGET}\n",
    ],
)
def test_only_the_directory_of_a_pods_inline_volume_is_a_target(target: str) -> None:
    assert wanted(target=target) is Reason.INVALID
    with pytest.raises(publication.Refused):
        publication.existing("csi-1", target, kubelet=KUBELET)


def test_a_volume_in_the_directory_of_another_pod_is_refused() -> None:
    assert wanted(changed={"uid": "7f0e6a52-93b1-4a3c-8a0e-0d3b6e2f9c11"}) is Reason.INVALID


@pytest.mark.parametrize("key", ["name", "namespace", "uid"])
def test_without_the_pods_identity_nothing_is_made(key: str) -> None:
    assert wanted(changed={key: ""}) is Reason.NO_POD
    assert isinstance(wanted(changed={key: "x" * 300}), Reason)


@pytest.mark.parametrize("volume_id", ["", "x" * 129])
def test_a_volume_has_an_id_of_a_bounded_length(volume_id: str) -> None:
    assert wanted(volume_id=volume_id) is Reason.INVALID


def test_a_block_device_is_refused() -> None:
    assert wanted(is_mount=False) is Reason.INVALID


@hypothesis.given(
    st.text(max_size=20), st.text(max_size=120), st.dictionaries(st.text(), st.text())
)
def test_whatever_a_kubelet_asks_gets_a_volume_or_a_reason(
    volume_id: str, target: str, context: dict[str, str]
) -> None:
    with pytest.raises(publication.Refused):
        publication.wanted(
            volume_id, target, context, is_mount=True, kubelet=KUBELET, namespaces=("*",)
        )
