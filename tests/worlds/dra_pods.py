"""A third-party DRA driver in the real cluster: `dra_driver` as a DaemonSet, slices and claims.

The driver publishes no slices itself: this module creates those that a test needs.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from scripts.cluster import layout
from tests.worlds import dra_driver, peers, real_cluster
from tests.worlds.real_cluster import BUSYBOX, until

_SLICES: Final = "resourceslices.resource.k8s.io"
_POD: Final = "muster-test-lamp"
_LABEL: Final = "muster-test=lamps"


class Lamps(peers.Program):
    """The driver `lamps.example.com` on the first node."""

    def __init__(self, cluster: real_cluster.Cluster) -> None:
        super().__init__(cluster, "lamps", Path(dra_driver.__file__).name)
        self.registration = layout.KUBELET / "plugins_registry" / dra_driver.REGISTRATION
        self.service = layout.KUBELET / "plugins" / dra_driver.SERVICE

    def events(self) -> list[str]:
        """Return the calls that it has logged."""
        lines = [line for line in self.log().splitlines() if line.startswith("{")]
        return [str(json.loads(line)["event"]) for line in lines]

    def publish(self, *, generation: int = 1, said: int = 1, devices: Sequence[str] = ()) -> None:
        """Publish a pool with one slice; `said` is the number of slices that it declares."""
        self.withdraw()
        node = self.cluster.node
        self.cluster.good("create", "-f", "-", given={
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"{node}-lamps", "labels": dict([_LABEL.split("=")])},
            "spec": {
                "driver": dra_driver.NAME,
                "nodeName": node,
                "pool": {"name": node, "generation": generation, "resourceSliceCount": said},
                "devices": [{"name": name} for name in devices or [dra_driver.DEVICE]],
            },
        })  # fmt: skip

    def withdraw(self) -> None:
        """Remove its slices."""
        self.cluster.good("delete", _SLICES, "-l", _LABEL, "--ignore-not-found")

    def slices(self) -> int:
        """Return the number of its slices; a kubelet removes those of its node when it starts."""
        return len(self.cluster.get(_SLICES, "", "-l", _LABEL)["items"])

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Run a pod that has claimed the device."""
        self.cluster.good("create", "-f", "-", given=_claim_and_pod())
        try:
            phase = ("wait", f"pod/{_POD}", "--for=condition=Ready", "--timeout=90s")
            self.cluster.good(*phase)
            yield
        finally:
            self.cluster.good("delete", "pod", _POD, "--grace-period=1")
            self.cluster.good("delete", "resourceclaim", _POD, "--timeout=60s")


@contextlib.contextmanager
def running(cluster: real_cluster.Cluster) -> Iterator[Lamps]:
    """Install the driver, yield it once it is registered and has a slice, and remove both."""
    lamps = Lamps(cluster)
    program = f"--from-file={dra_driver.__file__}"
    try:
        cluster.good("-n", "kube-system", "create", "configmap", "lamps", program)
        cluster.good("apply", "-f", str(peers.MANIFESTS / "dra.yaml"))
        until(lambda: "NotifyRegistrationStatus" in lamps.events(), "the kubelet registers it")
        lamps.publish()
        yield lamps
    finally:
        peers.remove(cluster, "dra")
        cluster.good("-n", "kube-system", "delete", "configmap", "lamps", "--ignore-not-found")
        lamps.withdraw()
        for socket in (lamps.registration, lamps.service):
            socket.unlink(missing_ok=True)


def _claim_and_pod() -> dict[str, object]:
    request = {"name": "lamp", "exactly": {"deviceClassName": dra_driver.NAME}}
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": _POD, "namespace": "default"},
        "spec": {"devices": {"requests": [request]}},
    }
    container = {
        "name": "main",
        "image": BUSYBOX,
        "command": ["sleep", "100000"],
        "resources": {"claims": [{"name": "lamp"}]},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": _POD, "namespace": "default"},
        "spec": {
            "containers": [container],
            "resourceClaims": [{"name": "lamp", "resourceClaimName": _POD}],
        },
    }
    return {"apiVersion": "v1", "kind": "List", "items": [claim, pod]}
