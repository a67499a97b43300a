"""A stand-in for the Kubernetes API, objects for it, and calls of `muster` commands that use it."""

import asyncio
import contextlib
import datetime as dt
import io
import pathlib
import threading
from collections.abc import Iterator
from typing import Any, Self

import cyclopts
import orjson

from muster.cli import output, registry
from muster.local import kubernetes
from muster_labeler import model
from muster_labeler.kubernetes import projection
from muster_labeler.naming import accelerators, sources

KEY = accelerators.SKYPILOT
GFD = accelerators.GFD_PRODUCT
READY = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
_KINDS = {
    "Node": "/api/v1/nodes",
    "Namespace": "/api/v1/namespaces",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Event": "/api/v1/namespaces/{}/events",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "ResourceSlice": "/apis/resource.k8s.io/v1/resourceslices",
    "ResourceClaim": "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims",
    "DeviceClass": "/apis/resource.k8s.io/v1/deviceclasses",
    "NodeOverlay": "/apis/karpenter.sh/v1alpha1/nodeoverlays",
}


class Cluster:
    """A stand-in for the Kubernetes API, on an event loop in a thread, for synchronous tests."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._audit_log = directory / "audit.log"
        self.api = kubernetes.KubernetesApi(audit_log=self._audit_log)
        self.kubeconfig = str(directory / "kubeconfig")
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self.api.__aenter__())
        self.api.write_kubeconfig(pathlib.Path(self.kubeconfig))
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self.api.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, story: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(story, self._loop).result(30)

    def put(self, *objects: dict[str, Any], manager: str = "kubectl") -> None:
        """Create objects as another field manager."""
        for entry in objects:
            namespace = entry["metadata"].get("namespace", "default")
            path = _KINDS[entry["kind"]].format(namespace)
            self.send("POST", f"{path}?fieldManager={manager}", entry)

    def node(self, name: str) -> dict[str, Any]:
        """Return a node from the API."""
        node: dict[str, Any] = self.send("GET", f"/api/v1/nodes/{name}")
        return node

    def labels(self, name: str) -> dict[str, str]:
        """Return a node's labels."""
        labels: dict[str, str] = self.node(name)["metadata"].get("labels", {})
        return labels

    def apply(self, name: str, labels: dict[str, str], manager: str = model.FIELD_MANAGER) -> None:
        """Write a node's labels by server-side apply, as the labeler does."""
        path = f"/api/v1/nodes/{name}?fieldManager={manager}"
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        self.send("PATCH", path, body, "application/apply-patch+yaml")

    def send(
        self, method: str, path: str, body: object = None, content: str = "application/json"
    ) -> Any:
        """Send a request as administrator; return the decoded response, which must be a success."""
        return self._run(self._send(method, path, body, content))

    async def _send(self, method: str, path: str, body: object, content: str) -> Any:
        host, _, port = self.api.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = b"" if body is None else orjson.dumps(body)
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: {content}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        status, _, rest = answer.partition(b"\r\n\r\n")
        assert b" 20" in status[:13], (method, path, answer)
        return orjson.loads(rest)

    def writes(self, path: str) -> list[float]:
        """Return the times at which the API received writes below a path, in ascending order."""
        lines = [orjson.loads(line) for line in self._audit_log.read_bytes().splitlines()]
        writes = [line for line in lines if line["requestURI"].startswith(path)]
        times = [dt.datetime.fromisoformat(line["requestReceivedTimestamp"]) for line in writes]
        return sorted(time.timestamp() for time in times)

    def run(self, *words: str, kubeconfig: str | None = None) -> tuple[int, str, str]:
        """Run a command; return its exit code, standard output and standard error."""
        file = self.kubeconfig if kubeconfig is None else kubeconfig
        has_cluster = words[0] != "gpu-name" and "--kubeconfig" not in words
        options = ["--kubeconfig", file] if file and has_cluster else []
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = registry.call(words[0], *options, *words[1:])
            except cyclopts.CycloptsError as error:
                code = output.fail(words[0], str(error))
        return code, out.getvalue(), err.getvalue()

    def check(self, *words: str, kubeconfig: str | None = None) -> tuple[int, dict[str, Any]]:
        """Return the exit code and the report of a check."""
        code, out, _ = self.run("check", *words, "--output", "json", kubeconfig=kubeconfig)
        report: dict[str, Any] = orjson.loads(out)
        return code, report

    def user(self, *denied: tuple[str, str]) -> str:
        """Return the kubeconfig of a user without these rights, pairs of a verb and a resource."""
        file = self._directory / "limited"
        self.api.write_kubeconfig(file, token="limited")  # noqa: S106  # of the stand-in
        for verb, plural in denied:
            self.api.users.deny("limited", verb, plural)
        return str(file)


@contextlib.contextmanager
def cluster(directory: pathlib.Path) -> Iterator[Cluster]:
    """Yield a running cluster."""
    with Cluster(directory) as made:
        yield made


def node(
    name: str = "a", *, gpus: int | None = 8, usable: int | None = None, **more: Any
) -> dict[str, Any]:
    """Return a node; `more` may be `labels`, `provider`, `runtime` and `resources`."""
    capacity = {"cpu": "8"} | ({} if gpus is None else {"nvidia.com/gpu": str(gpus)})
    offered = capacity if usable is None else {**capacity, "nvidia.com/gpu": str(usable)}
    resources = more.get("resources", {})
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": more.get("labels", {})},
        "spec": {"providerID": more.get("provider", "")},
        "status": {
            "capacity": {**capacity, **dict.fromkeys(resources, "1000")},
            "allocatable": {**offered, **resources},
            "conditions": [READY],
            "nodeInfo": {
                "containerRuntimeVersion": more.get("runtime", "containerd://2.0.1"),
                "kubeletVersion": "v1.37.2",
                "kernelVersion": "6.18.44",
            },
        },
    }


def reports(
    nodes: dict[str, dict[sources.Product, int]], *, simulated: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the ConfigMap in which the labeler stores the GPUs that agents reported."""
    return {
        "kind": "ConfigMap",
        "metadata": {"name": projection.INVENTORY_CONFIG_MAP, "namespace": "default"},
        "data": {projection.INVENTORY_KEY: projection.encode_inventory(nodes, simulated)},
    }
