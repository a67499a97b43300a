"""The webhook's manifests: what it may do, and which pods the API server sends to it."""

import functools
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
from cel_expr_python import cel

from muster.service import settings
from muster_fuse.admission import config, server
from tests.worlds import manifests

NAME: Final = "muster-fuse-webhook"
SMARTER: Final = {"smarter-devices/fuse": "1"}


@functools.cache
def installed() -> tuple[manifests.Object, ...]:
    """Return the objects that the component adds."""
    with tempfile.TemporaryDirectory() as folder:
        everything = manifests.with_component("minimal", "fuse-webhook", where=Path(folder))
    mine = [each for each in everything if each["metadata"]["name"] == NAME]
    assert len(everything) == len(mine) + len(manifests.objects("minimal"))
    return tuple(mine)


def only(kind: str) -> manifests.Object:
    (made,) = [each for each in installed() if each["kind"] == kind]
    return made


def test_every_object_is_one_of_kubernetes_and_of_muster() -> None:
    for manifest in installed():
        manifests.validate(manifest)
        assert manifest["metadata"]["labels"]["app.kubernetes.io/part-of"] == "muster"
        assert manifest["metadata"].get("namespace", "muster") == "muster"


def test_it_has_the_rights_for_its_work_and_no_others() -> None:
    group = "admissionregistration.k8s.io"
    named = {"resourceNames": [NAME], "verbs": ["get", "patch"]}
    assert only("Role")["rules"] == [{"apiGroups": [""], "resources": ["secrets"], **named}]
    assert only("ClusterRole")["rules"] == [
        {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
        {"apiGroups": [group], "resources": ["mutatingwebhookconfigurations"], **named},
    ]
    assert "data" not in only("Secret")


def test_the_api_server_asks_where_it_listens() -> None:
    pod = only("Deployment")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", "muster") for entry in container["env"]}
    taken = settings.load(
        config.Settings, prefix="MUSTER_FUSE_WEBHOOK", file=None, environment=variables
    )
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": taken.http.port, "https": taken.listen.port}
    service = only("Service")["spec"]
    assert pod["metadata"]["labels"].items() >= service["selector"].items()
    assert service["ports"] == [{"name": "https", "port": 443, "targetPort": "https"}]
    (rule,) = only("NetworkPolicy")["spec"]["ingress"]
    assert rule == {"ports": [{"port": taken.listen.port, "protocol": "TCP"}]}
    assert taken.kubernetes.name == NAME
    for webhook in only("MutatingWebhookConfiguration")["webhooks"]:
        assert webhook["clientConfig"] == {
            "service": {"name": NAME, "namespace": "muster", "path": server.PATH, "port": 443}
        }


def test_a_webhook_that_is_down_hinders_no_pod() -> None:
    for webhook in only("MutatingWebhookConfiguration")["webhooks"]:
        assert webhook["failurePolicy"] == "Ignore"
        assert webhook["sideEffects"] == "NoneOnDryRun"
        assert webhook["timeoutSeconds"] == 5
    assert only("Deployment")["spec"]["replicas"] == 2
    assert only("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def sent(
    pod: dict[str, Any], *, namespace: str = "apps", labels: dict[str, str] | None = None
) -> list[str]:
    """Return the webhooks to which the API server sends a pod."""
    of_namespace = {"kubernetes.io/metadata.name": namespace, **(labels or {})}
    of_pod = pod["metadata"].get("labels", {})
    return [
        webhook["name"]
        for webhook in only("MutatingWebhookConfiguration")["webhooks"]
        if _selected(webhook["namespaceSelector"], of_namespace)
        and _selected(webhook["objectSelector"], of_pod)
        and all(_holds(each["expression"], pod) for each in webhook["matchConditions"])
    ]


def _selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert all(each["operator"] == "NotIn" for each in selector["matchExpressions"])
    return labels.items() >= selector.get("matchLabels", {}).items() and not any(
        labels.get(each["key"]) in each["values"] for each in selector["matchExpressions"]
    )


@functools.cache
def _compiled(expression: str) -> Any:
    return cel.NewEnv(variables={"object": cel.Type.DYN}).compile(expression)


def _holds(expression: str, pod: dict[str, Any]) -> bool:
    value = _compiled(expression).eval(data={"object": pod})
    assert value.type() != cel.Type.ERROR, f"{expression}: {value.value()}"
    return bool(value.plain_value())


def pod(*, asks: str = "", **more: Any) -> dict[str, Any]:
    annotations = {"annotations": {"fuse.muster.dev/mount": asks}} if asks else {}
    spec = {"containers": [{"name": "main"}], **more}
    return {"metadata": {"name": "a", **annotations}, "spec": spec}


ALLOWED: Final = {"fuse.muster.dev/allowed": "true"}
MOUNT: Final = "mount.fuse.muster.dev"
REPLACE: Final = "replace.fuse.muster.dev"
REQUESTS: Final[dict[str, Any]] = {
    "containers": [{"name": "a"}, {"name": "b", "resources": {"limits": SMARTER}}]
}


@pytest.mark.parametrize(
    ("shown", "labels", "webhooks"),
    [
        (pod(), ALLOWED, []),
        (pod(asks="true"), {}, [MOUNT]),
        (pod(asks="yes"), ALLOWED, [MOUNT]),
        (pod(**REQUESTS), {}, []),
        (pod(**REQUESTS), {"fuse.muster.dev/allowed": "false"}, []),
        (pod(**REQUESTS), ALLOWED, [REPLACE]),
        (pod(asks="true", **REQUESTS), ALLOWED, [MOUNT]),
        (
            pod(initContainers=[{"name": "i", "resources": {"requests": SMARTER}}]),
            ALLOWED,
            [REPLACE],
        ),
        (pod(containers=[{"name": "a", "resources": {"limits": {"cpu": "1"}}}]), ALLOWED, []),
        (pod(containers=[{"name": "a", "resources": {}}]), ALLOWED, []),
    ],
)
def test_only_pods_that_may_need_a_change_are_sent(
    shown: dict[str, Any], labels: dict[str, str], webhooks: list[str]
) -> None:
    assert sent(shown, labels=labels) == webhooks


@pytest.mark.parametrize("namespace", ["kube-system", "kube-public", "kube-node-lease", "muster"])
def test_no_pod_of_muster_or_of_the_system_is_ever_sent(namespace: str) -> None:
    shown = pod(asks="true", **REQUESTS)
    assert sent(shown, labels=ALLOWED, namespace=namespace) == []
    shown["metadata"]["labels"] = {"app.kubernetes.io/part-of": "muster"}
    assert sent(shown, labels=ALLOWED) == []
    # if another client sends the pod, the webhook excludes the namespace itself
    assert namespace in {*server.EXCLUDED, config.Settings().kubernetes.namespace}


def of_chart(namespace: str) -> list[manifests.Object]:
    rendered = manifests.of_chart({"fuse": {"webhook": {"enabled": True}}}, namespace=namespace)
    return [o for o in rendered if o["metadata"]["name"] == NAME]


def test_the_chart_says_what_the_component_says() -> None:
    assert manifests.by_name(of_chart("muster")) == manifests.by_name(installed())


def test_the_chart_spares_the_pods_of_the_namespace_where_it_is_installed() -> None:
    (made,) = [o for o in of_chart("elsewhere") if o["kind"] == "MutatingWebhookConfiguration"]
    for webhook in made["webhooks"]:
        (of_namespaces,) = webhook["namespaceSelector"]["matchExpressions"]
        assert of_namespaces["values"][-1] == "elsewhere"
        assert webhook["clientConfig"]["service"]["namespace"] == "elsewhere"
