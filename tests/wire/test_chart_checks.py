"""The chart's checks of a cluster before an installation, made by Helm itself over HTTP."""

import base64
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.worlds import manifests

helm = pytest.importorskip("helm_python", reason="no Helm: pip install helm-python-sdk")

DEFAULT: Final = {"storageclass.kubernetes.io/is-default-class": "true"}
PATHS: Final = {
    "StorageClass": "/apis/storage.k8s.io/v1/storageclasses",
    "PersistentVolumeClaim": "/api/v1/namespaces/gpus/persistentvolumeclaims",
    "Secret": "/api/v1/namespaces/gpus/secrets",
    "Namespace": "/api/v1/namespaces",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}
RECEIVER: Final = {
    "name": "ops",
    "slack": {"webhook_from": {"secretRef": {"name": "chat", "key": "url"}}},
}
FAST: Final[dict[str, Any]] = {
    "kind": "StorageClass",
    "metadata": {"name": "fast", "annotations": DEFAULT},
}


def _resources(*kinds: str) -> dict[str, Any]:
    resources = [
        {
            "name": PATHS[kind].rpartition("/")[2],
            "kind": kind,
            "namespaced": kind in {"Secret", "PersistentVolumeClaim"},
            "verbs": ["get", "list"],
        }
        for kind in kinds
    ]
    return {"kind": "APIResourceList", "resources": resources}


@contextlib.contextmanager
def _api(*objects: dict[str, Any]) -> Iterator[str]:
    """Serve objects for reading, as an API server does; yield the URL."""
    answers: dict[str, Any] = {
        "/api/v1": _resources("PersistentVolumeClaim", "Secret", "Namespace"),
        "/apis/storage.k8s.io/v1": _resources("StorageClass"),
        "/apis/rbac.authorization.k8s.io/v1": _resources("ClusterRoleBinding"),
    }
    for kind, path in PATHS.items():
        items = [item for item in objects if item["kind"] == kind]
        answers[path] = {"kind": f"{kind}List", "apiVersion": "v1", "items": items}
        answers |= {f"{path}/{item['metadata']['name']}": item for item in items}

    class Requests(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(missing if answer is None else {"apiVersion": "v1", **answer})
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Requests) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def refusal(values: dict[str, Any], *objects: dict[str, Any]) -> list[str]:
    """Return why the chart refuses to be installed in a cluster with these objects."""
    chart_folder = str(manifests.ROOT / "k8s/chart/muster")
    with (
        _api(*objects) as url,
        contextlib.closing(helm.Chart.load(chart_folder)) as chart,
        contextlib.closing(helm.Config(kube_apiserver=url, storage_driver="memory")) as config,
    ):
        try:
            config.render(chart, values, name="muster", namespace="gpus")
        except helm.HelmRenderError as error:
            return str(error).splitlines()[1:]
    return []


def secret(name: str, **data: str) -> dict[str, Any]:
    encoded = {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}
    return {"kind": "Secret", "metadata": {"name": name, "namespace": "gpus"}, "data": encoded}


def test_a_cluster_with_what_muster_needs_is_not_refused() -> None:
    assert refusal({"receivers": [RECEIVER]}, FAST, secret("chat", url="https://a.example\n")) == []


NO_DEFAULT: Final = (
    "the cluster has no default StorageClass, and NATS needs a volume: set nats.storage.className"
)


@pytest.mark.parametrize(
    ("values", "objects", "printed"),
    [
        (
            {},
            [],
            NO_DEFAULT
            + " (there is none at all: install a storage provider first), or make one the default",
        ),
        (
            {},
            [
                {"kind": "StorageClass", "metadata": {"name": "slow"}},
                {"kind": "StorageClass", "metadata": {"name": "fast"}},
            ],
            f"{NO_DEFAULT} (there are: fast, slow), or make one the default",
        ),
        ({"nats": {"storage": {"className": "fast"}}}, [], None),
        ({"nats": {"external": {"url": "tls://a.example:4222"}}}, [], None),
        ({"checkCluster": False}, [], None),
        # an upgrade: the volume of NATS exists
        ({}, [{"kind": "PersistentVolumeClaim", "metadata": {"name": "data-muster-nats-0"}}], None),
    ],
    ids=str,
)
def test_a_cluster_without_a_default_storage_class_is_refused_unless_none_is_needed(
    values: dict[str, Any], objects: list[dict[str, Any]], printed: str | None
) -> None:
    assert refusal(values, *objects) == ([] if printed is None else [printed])


NOT_THERE: Final = (
    "receivers: there is no Secret chat: "
    "kubectl -n gpus create secret generic chat --from-literal=url=..."
)


@pytest.mark.parametrize(
    ("objects", "printed"),
    [
        (
            [],
            NOT_THERE,
        ),
        (
            [secret("chat", key="a")],
            "receivers: the key url of the Secret chat is missing or empty",
        ),
        (
            [secret("chat", url=" \n")],
            "receivers: the key url of the Secret chat is missing or empty",
        ),
    ],
    ids=str,
)
def test_a_receiver_without_its_secret_is_refused(
    objects: list[dict[str, Any]], printed: str
) -> None:
    assert refusal({"receivers": [RECEIVER]}, FAST, *objects) == [printed]


@pytest.mark.parametrize("level", ["baseline", "restricted", "privileged"])
def test_a_namespace_that_allows_no_plugin_is_refused(level: str) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level}
    namespace = {"kind": "Namespace", "metadata": {"name": "gpus", "labels": labels}}
    problem = (
        f"the namespace gpus enforces the Pod Security level {level}, and the plugin mounts the "
        "kubelet's directory: kubectl label namespace gpus --overwrite "
        "pod-security.kubernetes.io/enforce=privileged"
    )
    assert refusal({}, FAST, namespace) == ([] if level == "privileged" else [problem])


def _binding(part: str, namespace: str, *, release: str = "") -> dict[str, Any]:
    """Return the ClusterRoleBinding of a part of muster; `release` is its Helm release, if any."""
    labels = {"app.kubernetes.io/name": part, "app.kubernetes.io/part-of": "muster"}
    helms = {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": namespace}
    metadata = {"name": "any", "labels": labels, "annotations": helms if release else {}}
    account = {"kind": "ServiceAccount", "name": part, "namespace": namespace}
    return {"kind": "ClusterRoleBinding", "metadata": metadata, "subjects": [account]}


@pytest.mark.parametrize(
    ("binding", "printed"),
    [
        (
            _binding("muster-labeler", "two", release="muster"),
            (
                "muster is installed already, in the namespace two (the release muster), "
                "and two in one cluster would both change its nodes: upgrade that one, "
                "or first remove it: muster uninstall --muster-namespace two"
            ),
        ),
        (
            _binding("muster-labeler", "gpus", release="other"),
            (
                "muster is installed already, in the namespace gpus (the release other), "
                "and two in one cluster would both change its nodes: upgrade that one, "
                "or first remove it: muster uninstall --muster-namespace gpus"
            ),
        ),
        (
            _binding("muster-labeler", "muster"),
            (
                "muster is installed already, in the namespace muster (without Helm), "
                "and two in one cluster would both change its nodes: upgrade that one, "
                "or first remove it: muster uninstall"
            ),
        ),
        # the binding of the same release, at an upgrade
        (_binding("muster-labeler", "gpus", release="muster"), None),
        (_binding("muster-health", "two", release="muster"), None),
    ],
    ids=str,
)
def test_a_second_muster_in_a_cluster_is_refused(
    binding: dict[str, Any], printed: str | None
) -> None:
    assert refusal({}, FAST, binding) == ([] if printed is None else [printed])
    assert refusal({"fullnameOverride": "second"}, FAST, binding) == refusal({}, FAST, binding)
    assert refusal({"checkCluster": False}, FAST, binding) == []


def test_bindings_of_others_are_nothing_to_it() -> None:
    theirs = {"kind": "ClusterRoleBinding", "metadata": {"name": "bare"}}
    assert refusal({}, FAST, theirs) == []
