"""How a client logs on to the NATS of an installation, from the pods that the manifests make."""

import json

import msgspec
import pytest

from muster.kubernetes import installation
from muster.kubernetes.installation import Role
from tests.worlds import manifests


def nats(overlay: str) -> installation.Pod:
    spec = {**manifests.pods(overlay)["muster-nats"], "subdomain": "muster-nats"}
    return msgspec.json.decode(json.dumps({"spec": spec}), type=installation.Pod)


@pytest.mark.parametrize("overlay", sorted(set(manifests.OVERLAYS) - {"production"}))
@pytest.mark.parametrize("role", Role)
def test_with_passwords_each_role_has_its_secret_and_no_tls(overlay: str, role: Role) -> None:
    login = installation.login(nats(overlay), role)
    secret = installation.SecretKey(name=f"muster-nats-{role}", key="password")
    assert (login.secret, login.is_password, login.authority) == (secret, True, "")
    assert login.address("127.0.0.1:1", "pass") == f"nats://{role}:pass@127.0.0.1:1"


@pytest.mark.parametrize("password", ["", "x\n", "a@b", "a/b", "a,b", "a:b", "%41", "ä"])
def test_a_password_that_an_address_cannot_have_is_refused_without_its_value(password: str) -> None:
    login = installation.login(nats("minimal"), Role.READER)
    with pytest.raises(ValueError, match="Secret muster-nats-reader: password is empty, or has"):
        login.address("127.0.0.1:1", password)


@pytest.mark.parametrize("role", Role)
def test_production_has_credentials_and_tls(role: Role) -> None:
    login = installation.login(nats("production"), role)
    secret = installation.SecretKey(name=f"muster-{role}-creds", key="nats.creds")
    assert (login.secret, login.is_password) == (secret, False)
    assert (login.authority, login.server) == ("muster-nats-ca", "muster-nats")
    assert login.address("127.0.0.1:1", "") == "tls://127.0.0.1:1"


def test_with_another_full_name_the_credentials_and_the_authority_have_it() -> None:
    values = {"fullnameOverride": "gpus", "production": {"enabled": True}}
    (server,) = [each for each in manifests.of_chart(values) if each["kind"] == "StatefulSet"]
    text = json.dumps({"spec": server["spec"]["template"]["spec"]})
    login = installation.login(msgspec.json.decode(text, type=installation.Pod), Role.READER)
    secret = installation.SecretKey(name="gpus-reader-creds", key="nats.creds")
    assert (login.secret, login.authority) == (secret, "gpus-nats-ca")


def test_only_ready_pods_of_a_part_that_stay_are_asked() -> None:
    def pod(name: str, part: str, *, is_ready: bool = True, **metadata: str) -> installation.Pod:
        labels = {"app.kubernetes.io/name": part}
        condition = {"type": "Ready", "status": str(is_ready)}
        tree = {
            "metadata": {"name": name, "labels": labels, **metadata},
            "status": {"phase": "Running", "conditions": [condition]},
        }
        return msgspec.json.decode(json.dumps(tree), type=installation.Pod)

    pods = [
        pod("b", "muster-health"),
        pod("a", "muster-health"),
        pod("c", "muster-health", is_ready=False),
        pod("d", "muster-health", deletionTimestamp="2026-11-23T00:00:00Z"),
        pod("e", "muster-nats"),
    ]
    assert [each.name for each in installation.ready(pods, "muster-health")] == ["a", "b"]
    assert installation.absent(pods[2:3], "muster-health", "muster") == (
        "no pod of muster-health is ready in the namespace muster: c (Running)"
    )


def notifier(overlay: str, secret: str = "") -> installation.Pod:
    labels = {"app.kubernetes.io/name": "muster-notifier"}
    text = json.dumps(
        {"metadata": {"labels": labels}, "spec": manifests.pods(overlay)["muster-notifier"]}
    )
    changed = text.replace("muster-notifier-receivers", secret) if secret else text
    return msgspec.json.decode(changed, type=installation.Pod)


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_the_notifiers_pod_names_its_secret_of_receivers_and_its_settings(overlay: str) -> None:
    pods = [nats(overlay), notifier(overlay), notifier(overlay)]
    assert installation.receivers_secret(pods, "muster") == "muster-notifier-receivers"
    name = installation.settings_map(pods, installation.NOTIFIER, "muster")
    assert name.startswith("muster-notifier-settings-")


def test_a_secret_of_receivers_that_is_not_certain_is_refused() -> None:
    def refusal(*pods: installation.Pod) -> str:
        with pytest.raises(installation.Unreachable) as refused:
            installation.receivers_secret(pods, "muster")
        return str(refused.value)

    ours = notifier("minimal")
    assert refusal(ours, notifier("minimal", "gpus-notifier-receivers")) == (
        "notifiers in the namespace muster read several Secrets: gpus-notifier-receivers, "
        "muster-notifier-receivers"
    )
    older = msgspec.structs.replace(ours, spec=nats("minimal").spec)
    assert refusal(older) == (
        "the notifier in the namespace muster reads no Secret of receivers: upgrade muster"
    )
    assert refusal(nats("minimal")) == "no pod of muster-notifier is in the namespace muster"
