"""The manifests: every overlay renders, is valid, and has the documented properties."""

import json
import os
import posixpath
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec
import pytest
import yaml

from muster.cli import keyfiles
from muster.local import nats
from muster.nats.auth import permissions, server_conf
from muster.service import settings
from muster_gate import config as gate_config
from muster_gate import issuer
from muster_health.model import config as health_config
from muster_labeler import config as labeler_config
from muster_notifier.config import schema as notifier_config
from muster_plugin.config import settings as plugin_config
from scripts import manifests
from tests.worlds import manifests as worlds_manifests
from tests.worlds.manifests import (
    CENTRAL,
    FOREIGN,
    OVERLAYS,
    ROOT,
    Object,
    file_in,
    objects,
    of_chart,
    only,
    pods,
)


def test_what_is_generated_is_what_is_checked_in() -> None:
    stale = [str(p) for p, text in manifests.documents().items() if (ROOT / p).read_bytes() != text]
    assert stale == [], "run: make manifests"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_one_of_kubernetes(overlay: str) -> None:
    for manifest in objects(overlay):
        if manifest["kind"] not in FOREIGN:
            worlds_manifests.validate(manifest)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_namespaced_object_is_where_it_belongs(overlay: str) -> None:
    cluster_wide = {"Namespace", "ClusterRole", "ClusterRoleBinding", *FOREIGN}
    cluster_wide |= {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    places = {
        o["metadata"].get("namespace") for o in objects(overlay) if o["kind"] not in cluster_wide
    }
    assert places == {"muster", "kube-node-lease", "default"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_service_takes_the_settings_it_is_given(overlay: str) -> None:
    shapes: dict[str, type[msgspec.Struct]] = {
        "plugin": plugin_config.Settings,
        "health": health_config.Settings,
        "labeler": labeler_config.Settings,
        "notifier": notifier_config.Settings,
    }
    for name, shape in shapes.items():
        text = file_in(overlay, f"muster-{name}-settings", f"{name}.yaml")
        (tree,) = settings.parse(text.encode(), source=name)
        settings.validate(shape, tree, source=name)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_plugin_needs_more_than_the_restricted_level(overlay: str) -> None:
    for name, pod in pods(overlay).items():
        is_plugin = name == "muster-plugin"
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
        assert pod["securityContext"].get("runAsNonRoot", False) is not is_plugin
        host_paths = [v for v in pod["volumes"] if "hostPath" in v]
        assert bool(host_paths) is is_plugin
        for container in pod["containers"]:
            held = container["securityContext"]
            assert held["capabilities"] == {"drop": ["ALL"]}
            assert held["allowPrivilegeEscalation"] is False
            assert held["readOnlyRootFilesystem"] is True
            assert "privileged" not in held


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_plugin_has_no_rights_at_the_api_and_the_mounts_it_needs(overlay: str) -> None:
    pod = pods(overlay)["muster-plugin"]
    assert pod["automountServiceAccountToken"] is False
    bound = [
        subject["name"]
        for o in objects(overlay)
        if o["kind"].endswith("RoleBinding")
        for subject in o["subjects"]
    ]
    assert "muster-plugin" not in bound
    mounts = {
        m["mountPath"]: m.get("readOnly", False)
        for m in pod["containers"][0]["volumeMounts"]
        if m["mountPath"] not in {"/etc/nats-tls", "/var/run/cdi", "/var/run/secrets/muster-nats"}
    }
    # `watch` connects to sockets and creates none; it stores its state in a folder of its own
    makes_none = overlay == "watch"
    own = {"/var/lib/kubelet/device-plugins/muster": False} if makes_none else {}
    assert mounts == own | {
        "/var/lib/kubelet/device-plugins": makes_none,
        "/var/lib/kubelet/plugins_registry": makes_none,
        "/var/lib/kubelet/pod-resources": True,
        "/dev": True,
        "/dev/pts": True,
        "/dev/shm": True,
        "/etc/muster": True,
        "/tmp": False,
    }
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["priorityClassName"] == "system-node-critical"


def test_only_the_labeler_may_patch_nodes_and_only_health_sees_leases() -> None:
    def rights(kind: str, name: str) -> set[tuple[str, str]]:
        rules = only("minimal", kind, name)["rules"]
        return {(r, verb) for rule in rules for r in rule["resources"] for verb in rule["verbs"]}

    seeing = ("get", "list", "watch")
    assert rights("ClusterRole", "muster-health") == {("nodes", verb) for verb in seeing}
    assert rights("Role", "muster-health") == {
        *((kind, verb) for kind in ("pods", "daemonsets") for verb in seeing),
        ("events", "create"),
    }
    assert rights("ClusterRole", "muster-health-leases") == {("leases", "get")}
    assert rights("ClusterRole", "muster-health-pods") == {("pods", "list")}
    assert rights("ClusterRole", "muster-labeler") == {
        *(("nodes", verb) for verb in (*seeing, "patch")),
        ("nodes/status", "patch"),
    }
    roles = [o for o in objects("minimal") if o["kind"] in {"Role", "ClusterRole"}]
    settings = labeler_config.Settings()
    named = [name for o in roles for r in o["rules"] for name in r.get("resourceNames", [])]
    # here too, kustomize replaces the names of the ConfigMaps that it generates
    assert named == [settings.lease.name, "muster-inventory"]
    assert len(roles) == 7
    assert "secrets" not in json.dumps(roles)


def test_the_right_to_list_pods_can_be_taken_away_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs/security.md").read_text("utf-8")
    patches = re.search(r"```yaml\n(patches:\n.*muster-health-pods.*?)```", page, re.DOTALL)
    assert patches is not None
    base = os.path.relpath(ROOT / "k8s/overlays/minimal", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{base}]\n{patches[1]}")
    names = [
        manifest["metadata"]["name"]
        for manifest in yaml.safe_load_all(worlds_manifests.render(tmp_path))
    ]
    assert "muster-health-pods" not in names
    assert len(names) == len(objects("minimal")) - 2


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_node_can_read_what_would_make_it_somebody_else(overlay: str) -> None:
    # a kubelet may read every Secret that a pod on its node refers to, even if the pod uses one key
    # (kubernetes plugin/pkg/auth/authorizer/node), and there is a plugin on every node
    named = {name: secrets(pod) for name, pod in pods(overlay).items()}
    everywhere, nats = named.pop("muster-plugin"), named.pop("muster-nats")
    assert everywhere == set()
    named["muster-notifier"].remove("muster-notifier-receivers")
    if overlay == "production":
        assert nats == {"muster-nats-tls"}
        own = {f"muster-{name}": {f"muster-{name}-creds"} for name in CENTRAL}
        assert named == own | {"muster-gate": {"muster-gate"}}
        return
    users = [*(grant.user for grant in permissions.central()), "gate"]
    assert nats == {f"muster-nats-{user}" for user in users}
    assert named == {f"muster-{name}": {f"muster-nats-{name}"} for name in (*CENTRAL, "gate")}


def secrets(pod: Object) -> set[str]:
    """Return the names of all Secrets that a pod refers to, in any way."""
    names = set[str]()
    waiting: list[object] = [pod]
    while waiting:
        match waiting.pop():
            case {"secretName": str(name)}:
                names.add(name)
            case {"secretRef": {"name": str(name)}} | {"secretKeyRef": {"name": str(name)}}:
                names.add(name)
            case {"secret": {"name": str(name)}}:
                names.add(name)
            case dict() as tree:
                waiting.extend(tree.values())
            case list() as several:
                waiting.extend(several)
    return names


@pytest.mark.parametrize("overlay", sorted(set(OVERLAYS) - {"production"}))
def test_every_user_of_nats_has_its_password_from_the_secret_and_no_file_holds_one(
    overlay: str,
) -> None:
    for name in (*CENTRAL, "gate"):
        env = {e["name"]: e for e in pods(overlay)[f"muster-{name}"]["containers"][0]["env"]}
        assert env["NATS_PASSWORD"]["valueFrom"]["secretKeyRef"] == {
            "name": f"muster-nats-{name}",
            "key": "password",
        }
        url = env[f"MUSTER_{name.upper()}__BUS__URL"]["value"]
        assert url == f"nats://{name}:$(NATS_PASSWORD)@muster-nats:4222"
    assert [o for o in objects(overlay) if o["kind"] == "Secret"] == []


def test_nats_has_the_password_of_every_user_that_its_accounts_name() -> None:
    env = pods("minimal")["muster-nats"]["containers"][0]["env"]
    given = {
        e["name"]: e["valueFrom"]["secretKeyRef"]
        for e in env
        if "secretKeyRef" in e.get("valueFrom", {})
    }
    asked = re.findall(r"\$(NATS_PASSWORD_\w+)", file_in("minimal", "muster-nats", "accounts.conf"))
    users = {
        server_conf.password_variable(user): user
        for user in (*CENTRAL, "reader", "console", "admin", "gate")
    }
    assert given == {
        name: {"name": f"muster-nats-{users[name]}", "key": "password"} for name in set(asked)
    }


def test_in_production_nobody_has_a_password_and_each_shows_what_is_its_own() -> None:
    volumes = {
        name: {v["name"]: v for v in pod["volumes"]} for name, pod in pods("production").items()
    }
    environment = {
        name: {e["name"]: e.get("value", "") for e in pod["containers"][0]["env"]}
        for name, pod in pods("production").items()
    }
    assert "NATS_PASSWORD" not in worlds_manifests.rendered("production")
    for name in (*CENTRAL, "plugin", "gate"):
        variables = environment[f"muster-{name}"]
        assert variables[f"MUSTER_{name.upper()}__BUS__URL"] == "tls://muster-nats:4222"
        assert variables["NATS_CA"] == "/etc/nats-tls/ca.crt"
    for name in CENTRAL:
        assert environment[f"muster-{name}"]["NATS_CREDS"] == "/etc/nats-creds/nats.creds"
        assert volumes[f"muster-{name}"]["creds"]["secret"]["secretName"] == f"muster-{name}-creds"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_plugin_shows_a_token_of_its_own_everywhere(overlay: str) -> None:
    pod = pods(overlay)["muster-plugin"]
    (shown,) = [e for e in pod["containers"][0]["env"] if e["name"] == "NATS_TOKEN_FILE"]
    assert shown["value"] == "/var/run/secrets/muster-nats/token"
    (volume,) = [v for v in pod["volumes"] if v["name"] == "nats-token"]
    (token,) = volume["projected"]["sources"]
    assert token["serviceAccountToken"] == {
        "path": "token",
        "audience": gate_config.Tokens().audience,
        "expirationSeconds": 3600,
    }


def test_the_gate_takes_its_settings_and_believes_the_plugins_account() -> None:
    pod = pods("production")["muster-gate"]
    variables = {e["name"]: e.get("value", "muster") for e in pod["containers"][0]["env"]}
    loaded = settings.load(
        gate_config.Settings, prefix="MUSTER_GATE", file=None, environment=variables
    )
    assert (loaded.tokens.namespace, loaded.tokens.account) == ("muster", "muster-plugin")
    assert pods("production")["muster-plugin"]["serviceAccountName"] == loaded.tokens.account
    (keys,) = [v for v in pod["volumes"] if v["name"] == "keys"]
    assert loaded.signing == "/etc/muster-gate/gate.json"
    assert keys["secret"]["secretName"] == "muster-gate"
    assert only("production", "Deployment", "muster-gate")["spec"]["replicas"] == 2


def test_the_gate_and_nats_read_the_same_password() -> None:
    gate, nats = pods("minimal")["muster-gate"], pods("minimal")["muster-nats"]
    variables = {e["name"]: e.get("value", "muster") for e in gate["containers"][0]["env"]}
    loaded = settings.load(
        gate_config.Settings, prefix="MUSTER_GATE", file=None, environment=variables
    )
    (first,) = nats["initContainers"]
    assert first["args"] == ["muster_gate.issuer", loaded.password, "/etc/nats-gate/issuer.conf"]
    configured = posixpath.join("/etc/nats", server_conf.ISSUER_FILE)
    assert posixpath.normpath(configured) == first["args"][-1]
    of_gate = {v["name"]: v for v in gate["volumes"]}["keys"]
    of_nats = {v["name"]: v for v in nats["volumes"]}["gate-password"]
    assert of_gate["secret"] == of_nats["secret"] == {"secretName": "muster-nats-gate"}


def test_nats_server_takes_its_configuration(tmp_path: Path) -> None:
    etc = tmp_path / "nats"
    etc.mkdir()
    for name in ("nats.conf", "accounts.conf"):
        (etc / name).write_text(file_in("minimal", "muster-nats", name))
    (tmp_path / "nats-gate").mkdir()
    (tmp_path / "password").write_text("p" * 32)
    issuer.main(["issuer", f"{tmp_path}/password", f"{tmp_path}/nats-gate/issuer.conf"])
    users = [*(grant.user for grant in permissions.central()), "gate"]
    taken(etc, {server_conf.password_variable(user): "p" for user in users})


def test_nats_server_takes_the_configuration_of_production(tmp_path: Path) -> None:
    (configuration,) = [
        v for v in pods("production")["muster-nats"]["volumes"] if v["name"] == "configuration"
    ]
    files = {
        item["path"]: source["configMap"]["name"]
        for source in configuration["projected"]["sources"]
        for item in source["configMap"]["items"]
    }
    assert files.keys() == {"nats.conf", "base.conf", "accounts.conf"}
    assert files["accounts.conf"] == "muster-accounts"
    keyfiles.make(tmp_path, at=1_800_000_000)
    for name in ("nats.conf", "base.conf"):
        text = file_in("production", "muster-nats", name).replace("/etc/nats-tls", str(tmp_path))
        (tmp_path / name).write_text(text)
    keyfiles.make_certificates(
        tmp_path, ["muster-nats"], at=datetime.now(UTC), lasts=timedelta(days=1)
    )
    taken(tmp_path, {"POD_NAME": "n"})


def taken(where: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [nats.binary(), "-t", "-c", str(where / "nats.conf")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_fuse_is_as_skypilot_asks_for_it() -> None:
    tree = yaml.safe_load(file_in("fuse", "muster-plugin-settings", "plugin.yaml"))
    (resource,) = tree["resources"]
    assert resource["name"] == "smarter-devices/fuse"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_critical_pods_are_allowed_where_a_quota_must_say_so(overlay: str) -> None:
    (expression,) = only(overlay, "ResourceQuota", "muster-critical-pods")["spec"]["scopeSelector"][
        "matchExpressions"
    ]
    assert set(expression["values"]) == {p["priorityClassName"] for p in pods(overlay).values()}


def test_in_production_nats_tells_everybody_before_it_ends(tmp_path: Path) -> None:
    pod = pods("production")["muster-nats"]
    (container,) = pod["containers"]
    program, *arguments = container["lifecycle"]["preStop"]["exec"]["command"]
    conf = file_in("production", "muster-nats", "base.conf")
    (lasts,) = re.findall(r'lame_duck_duration: "(\d+)s"', conf)
    assert int(lasts) < pod["terminationGracePeriodSeconds"]
    conf = re.sub(r"(?s)^jetstream .*", "", conf, flags=re.MULTILINE).replace("/tmp", str(tmp_path))
    for port in ("4222", "8222"):
        conf = conf.replace(port, str(nats.free_port()))
    (tmp_path / "nats.conf").write_text(conf)
    assert program == "nats-server"
    command = [str(nats.binary()), "-c", str(tmp_path / "nats.conf")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = iter(server.stderr)
        assert any("Server is ready" in line for line in said)
        words = [word.replace("/tmp", str(tmp_path)) for word in arguments]
        subprocess.run([nats.binary(), *words], check=True)
        assert any("Entering lame duck mode" in line for line in said)
        assert server.wait(timeout=100) == 0


def test_production_keeps_a_majority_of_nats_on_machines_of_their_own() -> None:
    assert only("production", "StatefulSet", "muster-nats")["spec"]["replicas"] == 3
    assert "podAntiAffinity" in pods("production")["muster-nats"]["affinity"]
    budget = only("production", "PodDisruptionBudget", "muster-nats")
    assert budget["spec"]["maxUnavailable"] == 1
    env = {e["name"]: e for e in pods("production")["muster-health"]["containers"][0]["env"]}
    # each stream has a replica on each server; otherwise, it would end with its server
    assert env["MUSTER_HEALTH__STREAMS__REPLICAS"]["value"] == "3"


def test_the_chart_says_what_the_minimal_overlay_says() -> None:
    expected = [o for o in objects("minimal") if o["kind"] != "Namespace"]
    assert worlds_manifests.by_name(of_chart({})) == worlds_manifests.by_name(expected)


def test_the_chart_for_production_says_what_the_overlay_says() -> None:
    expected = [o for o in objects("production") if o["kind"] != "Namespace"]
    assert worlds_manifests.by_name(
        of_chart({"production": {"enabled": True}})
    ) == worlds_manifests.by_name(expected)


def test_the_chart_with_monitoring_says_what_the_component_says(tmp_path: Path) -> None:
    expected = [
        o
        for o in worlds_manifests.with_component("minimal", "monitoring", where=tmp_path)
        if o["kind"] != "Namespace"
    ]
    assert worlds_manifests.by_name(
        of_chart({"monitoring": {"enabled": True}})
    ) == worlds_manifests.by_name(expected)


WATCHES: Final = {"watch": {"enabled": True}}


def test_who_only_watches_offers_nothing_and_no_plugin_is_asked_by_two() -> None:
    tree = yaml.safe_load(file_in("watch", "muster-plugin-settings", "plugin.yaml"))
    assert tree == {"apiVersion": "muster.dev/v1", "watch": {"enabled": True}}
    strategy = only("watch", "DaemonSet", "muster-plugin")["spec"]["updateStrategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": "10%", "maxSurge": 0}


def test_who_only_watches_has_the_rights_and_mounts_of_a_plugin_and_none_for_more() -> None:
    minimal, watch = pods("minimal")["muster-plugin"], pods("watch")["muster-plugin"]
    (ours,), (theirs,) = watch["containers"], minimal["containers"]
    hosts = [[v for v in pod["volumes"] if "hostPath" in v] for pod in (minimal, watch)]
    assert hosts[0] == hosts[1]
    assert [m for m in ours["volumeMounts"] if m not in theirs["volumeMounts"]] == [
        {"name": f"{name}", "mountPath": f"/var/lib/kubelet/{folder}", "readOnly": True}
        for name, folder in (
            ("device-plugins", "device-plugins"),
            ("plugins-registry", "plugins_registry"),
        )
    ] + [
        {
            "name": "device-plugins",
            "mountPath": "/var/lib/kubelet/device-plugins/muster",
            "subPath": "muster",
        }
    ]
    assert ours["securityContext"] == theirs["securityContext"]


@pytest.mark.parametrize("overlay", ["minimal", "watch", "openshift", "production"])
def test_the_nodes_processes_are_seen_only_with_the_component_for_it(
    overlay: str, tmp_path: Path
) -> None:
    before = worlds_manifests.by_name(objects(overlay))
    after = worlds_manifests.by_name(
        worlds_manifests.with_component(overlay, "watch-processes", where=tmp_path)
    )
    changed = {key for key in before if before[key] != after[key]}
    plugin = after["DaemonSet", "muster", "muster-plugin"]["spec"]["template"]["spec"]
    assert plugin.pop("hostPID") is True
    assert plugin == pods(overlay)["muster-plugin"] | {"volumes": plugin["volumes"]}
    constraints = ("SecurityContextConstraints", "", "muster-plugin")
    assert after.get(constraints, {"allowHostPID": True})["allowHostPID"] is True
    assert {kind for kind, _, _ in changed} <= {"DaemonSet", "SecurityContextConstraints"}


def test_the_folders_of_drivers_are_read_only_and_keep_no_volume_mounted(tmp_path: Path) -> None:
    installed = worlds_manifests.with_component("watch", "watch-drivers", where=tmp_path)
    (plugin,) = [o["spec"]["template"]["spec"] for o in installed if o["kind"] == "DaemonSet"]
    before = pods("watch")["muster-plugin"]["containers"][0]["volumeMounts"]
    added = [m for m in plugin["containers"][0]["volumeMounts"] if m not in before]
    assert added == [
        {
            "name": "plugins",
            "mountPath": "/var/lib/kubelet/plugins",
            "readOnly": True,
            "mountPropagation": "HostToContainer",
        },
        {"name": "cdi-static", "mountPath": "/etc/cdi", "readOnly": True},
        {"name": "cdi-dynamic", "mountPath": "/var/run/cdi", "readOnly": True},
    ]
    paths = {v["name"]: v["hostPath"]["path"] for v in plugin["volumes"] if "hostPath" in v}
    assert {m["name"]: m["mountPath"] for m in added}.items() <= paths.items()


def test_the_chart_that_watches_says_what_the_overlay_says() -> None:
    expected = [o for o in objects("watch") if o["kind"] != "Namespace"]
    assert worlds_manifests.by_name(of_chart(WATCHES)) == worlds_manifests.by_name(expected)


@pytest.mark.parametrize("overlay", ["watch", "production"])
def test_the_chart_that_sees_more_says_what_the_components_say(
    overlay: str, tmp_path: Path
) -> None:
    components = ("watch-processes", "watch-drivers")
    expected = [
        o
        for o in worlds_manifests.with_component(overlay, *components, where=tmp_path)
        if o["kind"] != "Namespace"
    ]
    more = {"hostPID": True, "drivers": True, "enabled": overlay == "watch"}
    values = {"watch": more, "production": {"enabled": overlay == "production"}}
    assert worlds_manifests.by_name(of_chart(values)) == worlds_manifests.by_name(expected)


def test_the_chart_for_production_watches_as_the_overlay_does() -> None:
    def plugin(installed: Sequence[Object]) -> Object:
        (daemonset,) = [o for o in installed if o["kind"] == "DaemonSet"]
        return {
            "strategy": daemonset["spec"]["updateStrategy"],
            "mounts": daemonset["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][:6],
        }

    both = of_chart({**WATCHES, "production": {"enabled": True}})
    assert plugin(both) == plugin(objects("watch"))


def test_the_chart_puts_everything_where_it_is_installed() -> None:
    both = {"monitoring": {"enabled": True}, "production": {"enabled": True}}
    manifests = of_chart(both, namespace="elsewhere")
    places = {o["metadata"].get("namespace") for o in manifests}
    assert places == {None, "elsewhere", "kube-node-lease", "default"}
    subjects = [s for o in manifests if o["kind"].endswith("RoleBinding") for s in o["subjects"]]
    assert {s["namespace"] for s in subjects} == {"elsewhere"}
    (health,) = [o["data"]["health.yaml"] for o in manifests if "health.yaml" in o.get("data", {})]
    # the namespace in which health looks for the plugin's pods
    assert [scope["namespace"] for scope in yaml.safe_load(health)["cluster"]["plugins"]] == [
        "elsewhere"
    ]
    named = {k: v for o in manifests for k, v in o.items() if k != "metadata"}
    assert "muster-nats.muster" not in json.dumps(named)


@pytest.mark.parametrize("overlay", ["minimal", "production"])
def test_whoever_reads_settings_at_its_start_is_restarted_by_new_ones(overlay: str) -> None:
    def pods_with(**settings: Object) -> dict[str, Object]:
        values = {"production": {"enabled": overlay == "production"}, "settings": settings}
        manifests = of_chart(values)
        return {
            o["metadata"]["name"]: o["spec"] for o in manifests if "template" in o.get("spec", {})
        }

    before = pods_with()
    for name in CENTRAL:
        after = pods_with(**{name: {"log": {"level": "debug"}}})
        assert {n for n in before if before[n] != after[n]} == {f"muster-{name}"}
    # the plugin reads its file again itself; a restart would remove its devices for a moment
    assert pods_with(plugin={"log": {"level": "debug"}}) == before
    annotations = before["muster-nats"]["template"]["metadata"]["annotations"]
    assert re.fullmatch("[0-9a-f]{64}", annotations["checksum/settings"])


def test_nats_comes_from_where_the_values_say() -> None:
    image = {"repository": "registry.example.com/nats", "tag": "2.15.1-alpine"}
    for production in (False, True):
        manifests = of_chart({"production": {"enabled": production}, "nats": {"image": image}})
        (nats,) = [o for o in manifests if o["kind"] == "StatefulSet"]
        (container,) = nats["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "registry.example.com/nats:2.15.1-alpine"


def test_compose_runs_every_user_that_the_accounts_know() -> None:
    text = (ROOT / "compose.yaml").read_text("utf-8")
    for user in [*(g.user for g in permissions.central()), "plugin_node-a", "plugin_node-c"]:
        assert server_conf.password_variable(user) in text
    assert all(
        port.startswith("127.0.0.1:")
        for service in yaml.safe_load(text)["services"].values()
        for port in service.get("ports", [])
    )
