"""The chart as Helm lints and renders it, and the values that it refuses."""

import contextlib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import muster
from muster.service import settings as service_settings
from muster_notifier.config import schema
from tests.worlds import manifests
from tests.worlds.manifests import CENTRAL

CHART: Final = manifests.ROOT / "k8s/chart/muster"

helm = pytest.importorskip("helm_python", reason="no Helm: pip install helm-python-sdk")


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    report = helm.lint(str(CHART))
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"image": {"repository": 1}}, "/image/repository"),
        ({"image": {"tag": ""}}, "/image/tag"),
        ({"nats": {"image": {"tag": ""}}}, "/nats/image/tag"),
        ({"settings": {"plugin": []}}, "/settings/plugin"),
        ({"monitoring": {"enabled": "yes"}}, "/monitoring/enabled"),
        ({"watch": {"enabled": "yes"}}, "/watch/enabled"),
        ({"watch": {"enabled": True, "expect": {"a.example/b": "8"}}}, "/watch/expect"),
        ({"watch": {"expect": {"a.example/b": 8}}}, "/watch/expect"),
        ({"watch": {"ignore": ["devices.kubevirt.io/*"]}}, "/watch/ignore"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"imagePullSecrets": ["mine"]}, "/imagePullSecrets/0"),
        ({"nats": {"storage": {"size": "2Gi"}}}, "/nats/storage/size"),
        ({"nats": {"external": {"url": "https://a.example"}}}, "/nats/external/url"),
        ({"nats": {"external": {"url": "tls://a.example"}}}, "/nats/external/url"),
        ({"kubelet": {"directory": "var/lib"}}, "/kubelet/directory"),
        ({"plugin": {"tolerations": {}}}, "/plugin/tolerations"),
        ({"devices": [{"groups": []}]}, "/devices/0"),
        ({"devices": [{"name": "a.example/b", "groups": [{"count": "3"}]}]}, "/count"),
        ({"receivers": [{"slack": {}}]}, "/receivers/0"),
        ({"receivers": [{"name": "a", "slack": {"webhook_from": "b"}}]}, "/webhook_from"),
        (
            {"receivers": [{"name": "a", "slack": {"webhook_from": {"secretRef": {"name": "b"}}}}]},
            "key",
        ),
        ({"settings": {"health": {"log": {"level": "DEBUG"}}}}, "/settings/health/log/level"),
    ],
    ids=str,
)
def test_values_of_another_shape_are_refused_by_their_place(
    values: dict[str, Any], where: str
) -> None:
    with (
        contextlib.closing(helm.Chart.load(str(CHART))) as chart,
        pytest.raises(helm.HelmValuesError, match=where),
    ):
        chart.render(values, name="muster", namespace="muster")


SETTINGS: Final = ("console", "fuse", "health", "labeler", "notifier", "plugin")
AT: Final = "settings.notifier.routes.0.routes.0"
DEVICE: Final = "devices.0.groups.0.devices.0"
SLACK_AT: Final = "receivers.0.slack"


@pytest.mark.parametrize(
    ("values", "printed"),
    [
        ({"imge": {}}, ["unknown value imge: did you mean image?"]),
        ({"image": {"tga": "1"}}, ["unknown value image.tga: did you mean image.tag?"]),
        (
            {"plugin": {"nodeselector": {}}, "fuse": {"nri": {"tolerations": [], "enable": True}}},
            [
                "unknown value fuse.nri.enable: did you mean fuse.nri.enabled?",
                "unknown value plugin.nodeselector: did you mean plugin.nodeSelector?",
            ],
        ),
        (
            {"settings": {"kubelet": {}}},
            [f"unknown value settings.kubelet; there are: {', '.join(SETTINGS)}"],
        ),
        (
            {"devices": [{"name": "a/b", "groups": [{"devices": [{"pth": "/dev/a"}]}]}]},
            [f"unknown value {DEVICE}.pth: did you mean {DEVICE}.path?"],
        ),
        (
            {"settings": {"notifier": {"routes": [{"routes": [{"matcher": []}]}]}}},
            [f"unknown value {AT}.matcher: did you mean {AT}.matchers?"],
        ),
        (
            {"receivers": [{"name": "ops", "slack": {"webhook": {"secretRef": {}}}}]},
            [f"unknown value {SLACK_AT}.webhook: did you mean {SLACK_AT}.webhook_from?"],
        ),
        ({"global": {"anything": 1}, "settings": {"labeler": {"mode": "apply"}}}, []),
        (
            {"gpu": {"enabled": True}, "watch": {"drivers": True}},
            ["watch.drivers and gpu.enabled both mount /var/run/cdi: choose one of them"],
        ),
    ],
    ids=str,
)
def test_a_name_that_no_value_has_is_refused_with_the_nearest(
    values: dict[str, Any], printed: list[str]
) -> None:
    with contextlib.closing(helm.Chart.load(str(CHART))) as chart:
        try:
            chart.render(values, name="muster", namespace="muster")
        except helm.HelmRenderError as error:
            lines = str(error).splitlines()[1:]
        else:
            lines = []
    assert lines == printed


def test_who_watches_and_serves_is_told_how() -> None:
    resource = {"name": "example.com/a", "groups": [{"devices": [{"path": "/dev/a"}]}]}
    for settings, named in (
        ({"resources": [resource]}, "has example.com/a: for both, .*settings.plugin.watch.enabled"),
        ({"gpus": {"migStrategy": "single"}}, "omit gpus, nodes and watch"),
    ):
        given = {"watch": {"enabled": True}, "settings": {"plugin": settings}}
        with (
            contextlib.closing(helm.Chart.load(str(CHART))) as chart,
            pytest.raises(helm.HelmRenderError, match=named),
        ):
            chart.render(given, name="muster", namespace="muster")


def test_what_is_expected_and_ignored_reaches_the_agent() -> None:
    watch = {"enabled": True, "expect": {"nvidia.com/gpu": 8}, "ignore": ["devices.kubevirt.io/*"]}
    tree = settings_of({"watch": watch}, "plugin")
    assert tree == {"apiVersion": "muster.dev/v1", "watch": watch}


def test_settings_that_are_given_are_the_settings_that_are_deployed() -> None:
    assert settings_of({"settings": {"labeler": {"mode": "apply"}}}, "labeler") == {"mode": "apply"}


def settings_of(values: dict[str, Any], service: str) -> Any:
    (text,) = [
        item["data"][f"{service}.yaml"]
        for item in manifests.of_chart(values)
        if f"{service}.yaml" in item.get("data", {})
    ]
    return yaml.safe_load(text)


EVERYTHING: Final[dict[str, Any]] = {
    "fuse": {name: {"enabled": True} for name in ("webhook", "nri", "dra")} | {"enabled": True},
    "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
    "console": {"enabled": True},
    "openshift": {"enabled": True},
}
SERVICES: Final = ("plugin", "health", "labeler", "notifier", "gate", "nats", "fuse", "console")
PARTS: Final = ("webhook", "nri", "dra")


def of_service(values: dict[str, Any]) -> dict[str, Any]:
    """Return EVERYTHING, with the values set for each service and each part of `fuse`."""
    given = dict.fromkeys(SERVICES, values) | {"openshift": {"enabled": False}}
    given["console"] = {"enabled": True, **values}
    parts = {name: {"enabled": True, **values} for name in PARTS}
    return {**EVERYTHING, **given, "fuse": {"enabled": True, **values, **parts}}


def workloads(values: dict[str, Any], **more: str) -> dict[str, Any]:
    """Return every object that has a pod template, by its name."""
    return {
        item["metadata"]["name"]: item
        for item in manifests.of_chart(values, **more)
        if "template" in item.get("spec", {})
    }


def pods(values: dict[str, Any], **more: str) -> dict[str, Any]:
    return {
        name: item["spec"]["template"]["spec"] for name, item in workloads(values, **more).items()
    }


@pytest.mark.parametrize("production", [False, True])
def test_every_object_with_every_switch_is_one_of_kubernetes(*, production: bool) -> None:
    values = {**EVERYTHING, "gpu": {"enabled": True}, "production": {"enabled": production}}
    values["receivers"] = [SLACK]
    values["nats"] = {"storage": {"className": "fast"}}
    rendered = manifests.of_chart(values)
    for manifest in rendered:
        if manifest["kind"] not in {*manifests.FOREIGN, "PodMonitor", "PrometheusRule"}:
            manifests.validate(manifest)
    labelled = [o for o in rendered if o["kind"] in {"PodMonitor", "PrometheusRule"}]
    assert {o["metadata"]["labels"]["release"] for o in labelled} == {"prometheus"}


def test_what_runs_on_every_node_may_have_an_image_of_its_own() -> None:
    digest = f"sha256:{'1' * 64}"
    own = pods({"nodeImage": {"repository": "r/muster-node"}, "image": {"digest": digest}})
    (plugin,) = own["muster-plugin"]["containers"]
    assert plugin["image"] == "r/muster-node:0.1.0"
    assert own["muster-health"]["containers"][0]["image"] == f"muster@{digest}"


@pytest.mark.parametrize("overlay", ["gpu", "openshift"])
def test_the_chart_says_what_the_overlay_says(overlay: str) -> None:
    expected = [o for o in manifests.objects(overlay) if o["kind"] != "Namespace"]
    rendered = manifests.of_chart({overlay: {"enabled": True}})
    assert manifests.by_name(rendered) == manifests.by_name(expected)


@pytest.mark.parametrize("part", ["nri", "dra"])
def test_the_chart_says_what_the_component_says(part: str, tmp_path: Path) -> None:
    expected = [
        o
        for o in manifests.with_component("minimal", f"fuse-{part}", where=tmp_path)
        if o["kind"] != "Namespace"
    ]
    rendered = manifests.of_chart({"fuse": {part: {"enabled": True}}})
    assert manifests.by_name(rendered) == manifests.by_name(expected)


def test_every_service_takes_the_values_that_charts_have() -> None:
    toleration = {"key": "example.com/gpu", "operator": "Exists"}
    spread = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
    }
    given = {
        "resources": {"limits": {"memory": "2Gi", "cpu": "1"}},
        "nodeSelector": {"example.com/pool": "a"},
        "tolerations": [toleration],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [spread],
        "priorityClassName": "mine",
        "podLabels": {"team": "ml", "app.kubernetes.io/name": "not-this"},
        "podAnnotations": {"example.com/a": "b"},
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraEnvFrom": [{"secretRef": {"name": "c"}}],
        "extraVolumes": [{"name": "d", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "d", "mountPath": "/d"}],
        "serviceAccount": {"annotations": {"example.com/role": "e"}},
    }
    before, after = workloads(of_service({})), workloads(of_service(given))
    assert len(after) == len(SERVICES) + len(PARTS)
    for name, item in after.items():
        plain = before[name]["spec"]["template"]
        pod, spec = item["spec"]["template"], item["spec"]["template"]["spec"]
        main, main_before = spec["containers"][0], plain["spec"]["containers"][0]
        assert main["resources"] == {
            "requests": main_before["resources"]["requests"],
            "limits": {"memory": "2Gi", "cpu": "1"},
        }
        assert spec["nodeSelector"] == plain["spec"].get("nodeSelector", {}) | given["nodeSelector"]
        for key in ("tolerations", "affinity", "topologySpreadConstraints", "priorityClassName"):
            assert spec[key] == given[key]
        # no value changes the labels that the selector uses
        assert pod["metadata"]["labels"] == plain["metadata"]["labels"] | {"team": "ml"}
        assert pod["metadata"]["annotations"]["example.com/a"] == "b"
        assert main["env"] == [*main_before["env"], {"name": "A", "value": "b"}]
        assert main["envFrom"] == given["extraEnvFrom"]
        assert spec["volumes"][-1] == {"name": "d", "emptyDir": {}}
        assert main["volumeMounts"][-1] == {"name": "d", "mountPath": "/d"}
        manifests.validate(item)
    accounts = [o for o in manifests.of_chart(of_service(given)) if o["kind"] == "ServiceAccount"]
    annotations = {o["metadata"]["name"]: o["metadata"]["annotations"] for o in accounts}
    assert annotations == {name: {"example.com/role": "e"} for name in after}


def test_the_values_of_one_service_are_no_other_services() -> None:
    before, after = workloads({}), workloads({"labeler": {"priorityClassName": "mine"}})
    assert {name for name in before if before[name] != after[name]} == {"muster-labeler"}
    strategy = {"type": "OnDelete"}
    after = workloads({"plugin": {"updateStrategy": strategy}})
    assert {name for name in before if before[name] != after[name]} == {"muster-plugin"}
    assert after["muster-plugin"]["spec"]["updateStrategy"] == strategy


def test_images_come_from_where_the_values_say() -> None:
    digest = f"sha256:{'a' * 64}"
    values = {
        **EVERYTHING,
        "image": {"repository": "registry.example/m", "digest": digest, "pullPolicy": "Always"},
        "nats": {"image": {"repository": "registry.example/nats", "tag": "2.15.1"}},
        "imagePullSecrets": [{"name": "mine"}],
    }
    images = set()
    for pod in pods(values).values():
        assert pod["imagePullSecrets"] == [{"name": "mine"}]
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            images.add((container["image"], container.get("imagePullPolicy")))
    assert images == {
        (f"registry.example/m@{digest}", "Always"),
        ("registry.example/nats:2.15.1", None),
    }


def test_nats_keeps_its_data_where_the_values_say() -> None:
    storage = {"size": "20Gi", "className": "fast"}
    item = workloads({"nats": {"storage": storage}})["muster-nats"]
    (claim,) = item["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"] == {"requests": {"storage": "20Gi"}}
    assert claim["spec"]["storageClassName"] == "fast"


@pytest.mark.parametrize("production", [False, True])
def test_with_nats_of_ones_own_the_chart_installs_none(*, production: bool) -> None:
    url = "tls://nats.example.com:4333"
    values = {"nats": {"external": {"url": url}}, "production": {"enabled": production}}
    rendered = manifests.of_chart({**EVERYTHING, **values})
    assert not [o for o in rendered if o["metadata"]["name"] == "muster-nats"]
    addresses = {
        entry["value"].replace("$(NATS_PASSWORD)", "password")
        for pod in pods({**EVERYTHING, **values}).values()
        for entry in pod["containers"][0]["env"]
        if entry["name"].endswith("__BUS__URL")
    }
    names = ("gate", "reader", *CENTRAL)
    users = {f"tls://{name}:password@nats.example.com:4333" for name in names}
    assert addresses == ({url} if production else {url} | users)
    policies = {o["metadata"]["name"]: o["spec"] for o in rendered if o["kind"] == "NetworkPolicy"}
    for name in ("muster-plugin", "muster-fuse", "muster-console"):
        assert policies[name]["egress"][0] == {"ports": [{"port": 4333, "protocol": "TCP"}]}


def test_a_kubelet_with_another_root_directory_has_its_sockets_there() -> None:
    directory = "/var/lib/k0s/kubelet"
    values = {**EVERYTHING, "kubelet": {"directory": f"{directory}/"}}
    values["watch"] = {"drivers": True}
    with_root = pods(values)
    paths = {
        v["name"]: v.get("hostPath", {}).get("path") for v in with_root["muster-plugin"]["volumes"]
    }
    # kubelet pkg/kubelet/apis/deviceplugin: the only directory that --root-dir does not move
    assert paths["device-plugins"] == "/var/lib/kubelet/device-plugins"
    assert paths["plugins-registry"] == f"{directory}/plugins_registry"
    assert paths["pod-resources"] == f"{directory}/pod-resources"
    assert paths["plugins"] == f"{directory}/plugins"
    named = {
        "muster-plugin": ("MUSTER_PLUGIN__KUBELET__DIRECTORY", directory),
        "muster-fuse": ("MUSTER_FUSE__KUBELET__DIRECTORY", directory),
        "muster-fuse-dra": ("MUSTER_FUSE_DRA__REGISTRY", f"{directory}/plugins_registry"),
    }
    for name, (variable, value) in named.items():
        (container,) = with_root[name]["containers"]
        assert {"name": variable, "value": value} in container["env"]
        mounted = [m["mountPath"] for m in container["volumeMounts"]]
        assert not [path for path in mounted if path.startswith("/var/lib/kubelet")]
        assert [path for path in mounted if path.startswith(directory)]


@pytest.mark.parametrize("production", [False, True])
def test_another_full_name_is_in_all_names_and_in_no_label(*, production: bool) -> None:
    values = {**EVERYTHING, "production": {"enabled": production}}
    plain = manifests.of_chart(values)
    values |= {"fullnameOverride": "gpus"}
    renamed = manifests.of_chart(values)
    fixed = {"muster", "fuse.muster.dev", "device.fuse.muster.dev"}
    assert [o["metadata"]["name"] for o in renamed] == [
        name if (name := o["metadata"]["name"]) in fixed else name.replace("muster-", "gpus-", 1)
        for o in plain
    ]
    assert [o["metadata"]["labels"] for o in renamed] == [o["metadata"]["labels"] for o in plain]
    by_name = {(o["kind"], o["metadata"]["name"]) for o in renamed}
    assert references(renamed) - by_name == {
        ("Secret", "gpus-notifier-receivers"),
        *(("Secret", f"gpus-nats-{user}") for user in USERS if not production),
        *(("Secret", f"gpus-{name}-creds") for name in (*CENTRAL, "reader") if production),
        *((kind, name) for kind, name in OF_PRODUCTION if production),
    }
    env = {
        entry["name"]: entry.get("value")
        for pod in pods(values).values()
        for entry in pod["containers"][0]["env"]
    }
    assert env["MUSTER_GATE__TOKENS__ACCOUNT"] == "gpus-plugin"
    assert yaml.safe_load(env["MUSTER_GATE__TOKENS__OTHERS"]) == {"gpus-fuse": ["fuse-broker"]}
    assert env["MUSTER_LABELER__LEASE__NAME"] == "gpus-labeler"
    assert env["MUSTER_FUSE_WEBHOOK__KUBERNETES__NAME"] == "gpus-fuse-webhook"
    health = settings_of(values, "health")
    daemonsets = [scope["daemonset"] for scope in health["cluster"]["plugins"]]
    assert daemonsets == ["gpus-plugin", "gpus-fuse"]
    assert settings_of(values, "console")["health"] == ["http://gpus-health:8080"]


USERS: Final = ("health", "labeler", "notifier", "reader", "console", "admin", "gate")
OF_PRODUCTION: Final = (
    ("Secret", "gpus-gate"),
    ("Secret", "gpus-nats-tls"),
    ("ConfigMap", "gpus-nats-ca"),
    ("ConfigMap", "gpus-accounts"),
)


def references(rendered: list[Any]) -> set[tuple[str, str]]:
    """Return the kind and name of each object that the objects refer to."""
    names = set()
    waiting: list[Any] = list(rendered)
    while waiting:
        match waiting.pop():
            case dict() as tree:
                match tree:
                    case {"kind": kind, "name": name}:
                        names.add((kind, name))
                for key, kind in (
                    ("serviceAccountName", "ServiceAccount"),
                    ("secretName", "Secret"),
                    ("serviceName", "Service"),
                    ("policyName", "ValidatingAdmissionPolicy"),
                ):
                    if key in tree:
                        names.add((kind, tree[key]))
                for key, kind in (
                    *(("configMap", "ConfigMap"), ("secretKeyRef", "Secret")),
                    *(("service", "Service"), ("secretRef", "Secret")),
                ):
                    if isinstance(tree.get(key), dict):
                        names.add((kind, tree[key]["name"]))
                waiting.extend(tree.values())
            case list() as several:
                waiting.extend(several)
    return names


def test_everything_is_in_the_namespace_that_overrides_the_releases() -> None:
    values = {**EVERYTHING, "namespaceOverride": "gpus"}
    rendered = manifests.of_chart(values, namespace="elsewhere")
    places = {o["metadata"].get("namespace") for o in rendered}
    assert places == {None, "gpus", "kube-node-lease", "default"}
    assert "elsewhere" not in str(rendered)


SLACK: Final = {
    "name": "ops",
    "slack": {"webhook_from": {"secretRef": {"name": "chat", "key": "url"}}},
}


def test_receivers_read_their_secrets_from_secrets() -> None:
    signed = {"url": "https://a.example", "secrets": [{"secretRef": {"name": "b", "key": "c"}}]}
    values = {"receivers": [SLACK, {"name": "hook", "webhook": signed}]}
    tree = settings_of(values, "notifier")
    chosen = service_settings.validate(schema.Settings, tree, source="notifier")
    chat, hook = chosen.receivers
    assert chat.slack is not None
    assert chat.slack.webhook_from is not None
    assert chat.slack.webhook_from.file == "/etc/muster-secrets/chat/url"
    assert hook.webhook is not None
    assert [secret.file for secret in hook.webhook.secrets] == ["/etc/muster-secrets/b/c"]
    pod = pods(values)["muster-notifier"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "secrets"]
    assert volume["projected"]["sources"] == [
        {"secret": {"name": "b", "items": [{"key": "c", "path": "b/c"}]}},
        {"secret": {"name": "chat", "items": [{"key": "url", "path": "chat/url"}]}},
    ]
    mount = {"name": "secrets", "mountPath": "/etc/muster-secrets", "readOnly": True}
    assert mount in pod["containers"][0]["volumeMounts"]
    assert {name for name, pod in pods(values).items() if "chat" in str(pod)} == {"muster-notifier"}


def test_rules_link_to_the_runbooks_that_health_links_to() -> None:
    def links(settings: dict[str, Any]) -> set[str]:
        values = {"monitoring": {"enabled": True}, "settings": {"health": settings}}
        (rules,) = [o for o in manifests.of_chart(values) if o["kind"] == "PrometheusRule"]
        return {
            rule["annotations"]["runbook_url"].rpartition("/")[0]
            for group in rules["spec"]["groups"]
            for rule in group["rules"]
        }

    assert links({}) == {muster.RUNBOOKS_URL.rstrip("/")}
    assert links({"runbook_url": "https://wiki.example/muster/"}) == {"https://wiki.example/muster"}


def test_devices_are_what_the_plugin_serves() -> None:
    resource = {"name": "example.com/a", "groups": [{"devices": [{"path": "/dev/a"}]}]}
    assert settings_of({"devices": [resource]}, "plugin") == {
        "apiVersion": "muster.dev/v1",
        "resources": [resource],
    }


SERVES: Final = "Pods can request: smarter-devices/fuse"
NOBODY: Final = (
    "NOBODY IS NOTIFIED YET: alerts go only to the notifier's log. "
    "To notify a Slack channel (see `muster notify setup --help` for others):"
)


def notes(values: dict[str, Any], *, namespace: str = "muster") -> str:
    with contextlib.closing(helm.Chart.load(str(CHART))) as chart:
        files = chart.render(values, name="muster", namespace=namespace)
    return str(files["muster/templates/NOTES.txt"])


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({}, [SERVES, NOBODY]),
        ({"receivers": [{"name": "log", "console": {}}]}, [SERVES, NOBODY]),
        ({"receivers": [SLACK]}, [SERVES, "Notified: ops"]),
        ({"gpu": {"enabled": True}}, [f"{SERVES}, nvidia.com/gpu", NOBODY]),
        (
            {"watch": {"enabled": True}},
            ["It offers no devices itself; it watches the nodes' existing device plugins."],
        ),
    ],
    ids=str,
)
def test_the_notes_say_what_pods_get_and_who_is_notified(
    values: dict[str, Any], lines: list[str]
) -> None:
    printed = notes(values).splitlines()
    assert printed[1] == "muster 0.1.0 is in the namespace muster."
    assert [line for line in lines if line not in printed] == []


def test_the_notes_name_the_command_that_adds_a_receiver() -> None:
    add = '  muster notify setup slack --context "$(kubectl config current-context)"'
    assert add in notes({}).splitlines()
    assert f"{add} --namespace gpus" in notes({}, namespace="gpus").splitlines()
