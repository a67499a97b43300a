"""The overlay openshift: an API server with OpenShift's kind accepts each of its objects."""

from collections.abc import Iterator
from typing import Final

import pytest

from tests.worlds import manifests, real_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

KIND: Final = "securitycontextconstraints"
GROUP: Final = "security.openshift.io"
CRD: Final = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{KIND}.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Cluster",
        "names": {"kind": "SecurityContextConstraints", "plural": KIND, "singular": KIND},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}
"""OpenShift's kind without its behaviour, which is not tested."""


@pytest.fixture
def openshift(cluster: real_cluster.Cluster) -> Iterator[real_cluster.Cluster]:
    cluster.good("create", "-f", "-", given=CRD)
    try:
        cluster.good("wait", "crd", f"{KIND}.{GROUP}", "--for=condition=Established")
        yield cluster
    finally:
        cluster.good("delete", "crd", f"{KIND}.{GROUP}")


def test_every_object_is_taken_and_uninstalled(openshift: real_cluster.Cluster) -> None:
    before = openshift.snapshot()
    overlay = str(manifests.ROOT / "k8s/overlays/openshift")
    lines = openshift.good("apply", "-k", overlay).splitlines()
    assert [line for line in lines if not line.endswith(" created")] == []
    assert len(lines) == len(manifests.objects("openshift"))
    openshift.muster("uninstall", "--yes")
    assert openshift.snapshot() == before
