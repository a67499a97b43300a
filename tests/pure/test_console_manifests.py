"""The component `console`: read-only unless people may act, and protected by network policies."""

import functools
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml

from muster.service import settings
from muster_console import config
from tests.worlds import manifests

NAME: Final = "muster-console"
SETTINGS: Final = "muster-console-settings"
LABEL: Final = "app.kubernetes.io/name"
PAGE: Final = (manifests.ROOT / "docs/console.md").read_text("utf-8")
ACTING: Final = "MUSTER_CONSOLE__WRITING"


@functools.cache
def installed(overlay: str) -> tuple[manifests.Object, ...]:
    """Return the objects of an overlay with the component; in `production`, with both parts."""
    parts = ("console", "console-production") if overlay == "production" else ("console",)
    with tempfile.TemporaryDirectory() as folder:
        return tuple(manifests.with_component(overlay, *parts, where=Path(folder)))


def only(kind: str, name: str = NAME, *, overlay: str = "minimal") -> manifests.Object:
    """Return the one object of this kind and name, without kustomize's hash."""
    return manifests.by_name(installed(overlay))[kind, "muster", name]


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_the_component_only_adds_objects_of_kubernetes_that_an_uninstall_removes(
    overlay: str,
) -> None:
    before, after = (
        manifests.by_name(each) for each in (manifests.objects(overlay), installed(overlay))
    )
    assert {key: after[key] for key in before} == before
    added = {key: value for key, value in after.items() if key not in before}
    assert sorted((kind, name) for kind, _, name in added) == [
        ("ConfigMap", SETTINGS),
        ("Deployment", "muster-console"),
        ("NetworkPolicy", "muster-console"),
        ("NetworkPolicy", "muster-console-health"),
        ("Service", "muster-console"),
        ("Service", "muster-health"),
        ("ServiceAccount", "muster-console"),
    ]
    for (kind, namespace, _), manifest in added.items():
        # an uninstall deletes the whole namespace
        assert namespace == "muster"
        assert manifest["metadata"]["labels"]["app.kubernetes.io/part-of"] == "muster"
        if kind != "ConfigMap":
            manifests.validate(manifest)


@pytest.mark.parametrize("overlay", ["minimal", "openshift", "production"])
def test_the_chart_with_a_console_says_what_the_component_says(overlay: str) -> None:
    values = {"console": {"enabled": True}}
    if overlay != "minimal":
        values[overlay] = {"enabled": True}
    expected = [o for o in installed(overlay) if o["kind"] != "Namespace"]
    assert manifests.by_name(manifests.of_chart(values)) == manifests.by_name(expected)


@pytest.mark.parametrize("overlay", ["minimal", "production"])
def test_the_console_has_the_credentials_of_a_reader_and_no_others(overlay: str) -> None:
    pod = only("Deployment", overlay=overlay)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry for entry in container["env"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert pod["automountServiceAccountToken"] is False
    if overlay == "minimal":
        reference = {"name": "muster-nats-reader", "key": "password"}
        assert env["NATS_PASSWORD"]["valueFrom"]["secretKeyRef"] == reference
        assert env["MUSTER_CONSOLE__BUS__URL"]["value"] == (
            "nats://reader:$(NATS_PASSWORD)@muster-nats:4222"
        )
        assert volumes.keys() == {"configuration"}
        return
    assert env["NATS_CREDS"]["value"] == "/etc/nats-creds/nats.creds"
    assert env["NATS_CA"]["value"] == "/etc/nats-tls/ca.crt"
    assert env["MUSTER_CONSOLE__BUS__URL"]["value"] == "tls://muster-nats:4222"
    assert volumes.keys() == {"configuration", "creds", "tls"}
    assert volumes["creds"]["secret"] == {"secretName": "muster-reader-creds"}
    assert volumes["tls"]["configMap"] == {"name": "muster-nats-ca"}
    assert "NATS_PASSWORD" not in env


def test_the_console_takes_its_settings_and_asks_every_replica_of_health() -> None:
    chosen = loaded(installed("minimal"))
    ports = {each["name"]: each["containerPort"] for each in opened()}
    anywhere = "0.0.0.0"  # noqa: S104
    assert (chosen.http.host, chosen.http.port) == (anywhere, ports["pages"])
    assert chosen.metrics is not None
    assert (chosen.metrics.host, chosen.metrics.port) == (anywhere, ports["http"])
    service = only("Service", "muster-health")["spec"]
    assert chosen.health == (f"http://muster-health:{service['ports'][0]['port']}",)
    # a headless Service: its name resolves to the addresses of all pods, ready or not
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    health = only("Deployment", "muster-health")["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= health.items()


def opened() -> list[dict[str, Any]]:
    """Return the ports of the console's container."""
    ports: list[dict[str, Any]] = only("Deployment")["spec"]["template"]["spec"]["containers"][0][
        "ports"
    ]
    return ports


def loaded(rendered: Sequence[manifests.Object]) -> config.Settings:
    """Return the settings that the console reads from its file and its environment."""
    by_name = manifests.by_name(rendered)
    deployment = by_name["Deployment", "muster", NAME]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", "p") for entry in container["env"]}
    if ACTING in variables:
        (entry,) = [each for each in container["env"] if each["name"] == ACTING]
        reference = entry["valueFrom"]["configMapKeyRef"]
        data = by_name["ConfigMap", "muster", reference["name"]]["data"]
        variables[ACTING] = yaml.safe_dump(data[reference["key"]])
    tree = by_name["ConfigMap", "muster", SETTINGS]["data"]["console.yaml"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "console.yaml"
        file.write_text(yaml.safe_dump(tree))
        return settings.load(
            config.Settings, prefix="MUSTER_CONSOLE", file=file, environment=variables
        )


def test_the_name_of_an_ingress_is_set_as_the_page_says(tmp_path: Path) -> None:
    page = (manifests.ROOT / "docs/install.md").read_text("utf-8")
    patches = re.search(r"```yaml\n(patches:\n[^`]*MUSTER_CONSOLE__HOSTS.*?)```", page, re.DOTALL)
    assert patches is not None
    installed_before = manifests.with_component("minimal", "console", where=tmp_path)
    assert loaded(installed_before).hosts == ()
    with (tmp_path / "kustomization.yaml").open() as file:
        tree = yaml.safe_load(file) | yaml.safe_load(patches[1])
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    rendered = [each for each in yaml.safe_load_all(manifests.render(tmp_path)) if each]
    assert loaded(rendered).hosts == ("muster.example.com",)
    values = {
        "console": {"enabled": True},
        "settings": {"console": {"hosts": ["muster.example.com"]}},
    }
    rendered = manifests.of_chart(values)
    assert linked(rendered) == ""
    of_chart = loaded(rendered)
    assert (of_chart.hosts, of_chart.health) == (
        ("muster.example.com",),
        ("http://muster-health:8080",),
    )


@pytest.mark.parametrize("hosts", [[], ["muster.example.com"], ["other.example.com"]])
def test_the_chart_links_notifications_to_where_people_open_the_console(hosts: list[str]) -> None:
    values: dict[str, Any] = {
        "console": {"enabled": True, "url": "https://muster.example.com:8443/fleet"},
        "settings": {"console": {"hosts": hosts}},
    }
    rendered = manifests.of_chart(values)
    assert linked(rendered) == "https://muster.example.com:8443/fleet"
    assert set(loaded(rendered).hosts) == {*hosts, "muster.example.com"}
    values["settings"]["notifier"] = {"console_url": "https://elsewhere.example.com/"}
    assert linked(manifests.of_chart(values)) == "https://elsewhere.example.com/"


def linked(rendered: Sequence[manifests.Object]) -> str:
    """Return the URL to which the notifier's messages link, or an empty string."""
    tree = manifests.by_name(rendered)["ConfigMap", "muster", "muster-notifier-settings"]["data"]
    return str(yaml.safe_load(yaml.safe_dump(tree["notifier.yaml"])).get("console_url", ""))


def test_who_reaches_the_console_and_whom_it_reaches_is_said_by_a_rule() -> None:
    ports = {each["name"]: each["containerPort"] for each in opened()}
    policy = only("NetworkPolicy")["spec"]
    reader = {"matchLabels": {"muster.dev/reads-console": "true"}}
    assert policy["ingress"] == [
        {
            "from": [{"namespaceSelector": reader}],
            "ports": [{"port": ports["pages"], "protocol": "TCP"}],
        }
    ]
    assert only("Service")["spec"]["ports"][0]["targetPort"] == "pages"
    targets = [
        (rule["to"][0]["podSelector"]["matchLabels"][LABEL] if "to" in rule else "", each["port"])
        for rule in policy["egress"]
        for each in rule["ports"]
    ]
    assert targets == [("muster-nats", 4222), ("muster-health", 8080), ("", 53), ("", 53)]
    metrics = manifests.only("minimal", "NetworkPolicy", "muster-metrics")["spec"]
    # otherwise, a client that scrapes metrics could read the pages
    scraped = [each["port"] for rule in metrics["ingress"] for each in rule["ports"]]
    assert scraped == [ports["http"]]
    health = only("NetworkPolicy", "muster-console-health")["spec"]
    assert health["podSelector"] == {"matchLabels": {LABEL: "muster-health"}}
    assert health["ingress"] == [
        {
            "from": [{"podSelector": {"matchLabels": {LABEL: NAME}}}],
            "ports": [{"port": 8080, "protocol": "TCP"}],
        }
    ]


BLOCKS: Final = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
(HEADER, OIDC) = (block["writing"] for block in BLOCKS if "writing" in block)
(VALUES,) = (block for block in BLOCKS if "settings" in block)
(ADDED,) = (block for block in BLOCKS if "components" in block)
WAYS: Final = {"header": HEADER, "oidc": OIDC}


@functools.cache
def acting(overlay: str, way: str) -> tuple[manifests.Object, ...]:
    """Return an overlay's objects with the additions of docs/console.md that let people act."""

    def is_added(component: str) -> bool:
        return (way == "oidc" or not component.endswith("-oidc")) and (
            overlay == "production" or not component.endswith("-production")
        )

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "my-muster"
        folder.mkdir()
        (Path(directory) / "muster").symlink_to(manifests.ROOT)
        tree = ADDED | {
            "resources": [f"../muster/k8s/overlays/{overlay}"],
            "components": [each for each in ADDED["components"] if is_added(each)],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(tree))
        (folder / "writing.yaml").write_text(yaml.safe_dump(WAYS[way]))
        rendered = manifests.render(folder)
    return tuple(each for each in yaml.load_all(rendered, yaml.CSafeLoader) if each)


def of_values(overlay: str, writing: dict[str, Any], **console: Any) -> list[manifests.Object]:
    """Return the objects that the chart renders for the same settings."""
    values = {
        "console": {"enabled": True, **console},
        "settings": {"console": {"writing": writing}},
        "production": {"enabled": overlay == "production"},
    }
    return manifests.of_chart(values)


@pytest.mark.parametrize("overlay", ["minimal", "production"])
@pytest.mark.parametrize("way", WAYS)
def test_people_may_act_as_the_page_says_with_kustomize_and_helm_alike(
    overlay: str, way: str
) -> None:
    expected = manifests.by_name([o for o in acting(overlay, way) if o["kind"] != "Namespace"])
    rendered = manifests.by_name(of_values(overlay, WAYS[way]))
    labels = rendered["ConfigMap", "muster", "muster-console-writing"]["metadata"].pop("labels")
    assert labels == {LABEL: NAME, "app.kubernetes.io/part-of": "muster"}
    assert rendered == expected
    chosen = loaded(acting(overlay, way)).writing
    assert chosen == msgspec.convert(WAYS[way], config.Writing)
    assert chosen.is_on


@pytest.mark.parametrize("overlay", ["minimal", "production"])
@pytest.mark.parametrize("way", WAYS)
def test_who_acts_in_the_console_does_so_with_its_own_role_and_no_other(
    overlay: str, way: str
) -> None:
    plain = manifests.by_name(installed(overlay))["Deployment", "muster", NAME]
    changed = manifests.by_name(acting(overlay, way))["Deployment", "muster", NAME]
    before, after = (str(each["spec"]["template"]["spec"]) for each in (plain, changed))
    of_reader, of_console = (
        ("muster-reader-creds", "muster-console-creds")
        if overlay == "production"
        else ("muster-nats-reader", "muster-nats-console")
    )
    assert (of_reader in before, of_console in before) == (True, False)
    assert (of_reader in after, of_console in after) == (False, True)
    user = "nats://console:$(NATS_PASSWORD)@muster-nats:4222"
    assert (user in after) is (overlay == "minimal")
    assert ("'/etc/muster-oidc'" in after) is (way == "oidc")
    # the pods do not share sessions
    assert (changed["spec"]["strategy"]["type"] == "Recreate") is (way == "oidc")
    for manifest in acting(overlay, way):
        if NAME in manifest["metadata"]["name"]:
            manifests.validate(manifest)


def reached(rendered: Sequence[manifests.Object]) -> list[int]:
    """Return the ports, other than DNS, that the console may reach at any address."""
    return [
        port["port"]
        for each in rendered
        if each["kind"] == "NetworkPolicy"
        and each["spec"]["podSelector"] == {"matchLabels": {LABEL: NAME}}
        for rule in each["spec"].get("egress", [])
        for port in rule["ports"]
        if "to" not in rule and port["port"] != 53
    ]


def test_the_console_reaches_an_issuer_only_if_people_sign_in_there() -> None:
    assert reached(of_values("minimal", HEADER)) == []
    assert reached(of_values("minimal", OIDC)) == [443]
    elsewhere = OIDC | {"oidc": OIDC["oidc"] | {"issuer": "https://login.example.com:8443/realm"}}
    own = {"nats": {"external": {"url": "tls://nats.example.com:4333"}}}
    assert reached(of_values("minimal", elsewhere)) == [8443]
    values = {"console": {"enabled": True}, "settings": {"console": {"writing": elsewhere}}}
    assert reached(manifests.of_chart(values | own)) == [4333, 8443]


def test_the_values_of_the_page_need_no_second_address() -> None:
    rendered = manifests.of_chart(VALUES)
    chosen = loaded(rendered)
    assert chosen.writing == msgspec.convert(HEADER, config.Writing)
    assert chosen.hosts == ("console.example.com",)
    gone = VALUES | {"console": VALUES["console"] | {"enabled": False}}
    assert "writing" not in str(manifests.of_chart(gone))


def test_another_full_name_is_that_of_the_secrets_as_well() -> None:
    values = VALUES | {"fullnameOverride": "gpus"}
    values["settings"] = {"console": {"writing": OIDC}}
    text = str(manifests.of_chart(values | {"production": {"enabled": True}}))
    for name in ("console-writing", "console-creds", "console-oidc"):
        assert (f"'gpus-{name}'" in text, f"'muster-{name}'" in text) == (True, False)


@pytest.mark.parametrize(
    ("writing", "problem"),
    [
        ({"local": True}, "settings.console.writing has neither header nor oidc: set one of them"),
        ({"header": {"from": ["::1"]}}, "settings.console.writing needs console.url: the address"),
    ],
)
def test_the_chart_refuses_what_the_console_would_not_start_with(
    writing: dict[str, Any], problem: str
) -> None:
    # without Helm, the class of the exception cannot be imported
    with pytest.raises(Exception, match=problem):
        of_values("minimal", writing)
