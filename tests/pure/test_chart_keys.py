"""The Job that creates an installation's passwords or keys, by Helm and by kustomize."""

from pathlib import Path
from typing import Any, Final

import pytest

from muster.nats.auth import accounts
from muster.nats.auth.cluster_secrets import Kind, Part, Wanted
from tests.worlds import manifests

Values = dict[str, Any]

PRODUCTION: Final[Values] = {"production": {"enabled": True}}
WORKLOADS: Final = {"DaemonSet", "Deployment", "StatefulSet"}


def hooks(values: Values) -> dict[str, Any]:
    """Return the objects of the chart's pre-install hooks, by kind."""
    return {o["kind"]: o for o in manifests.of_chart(values, hooks="pre-install")}


@pytest.mark.parametrize("values", [{}, PRODUCTION], ids=str)
def test_keys_are_made_before_anything_is_installed_or_upgraded(values: Values) -> None:
    made = hooks(values)
    assert list(made) == ["ServiceAccount", "Role", "RoleBinding", "Job"]
    weights = []
    for item in made.values():
        notes = item["metadata"]["annotations"]
        weights.append(int(notes["helm.sh/hook-weight"]))
        assert notes["helm.sh/hook"] == "pre-install,pre-upgrade"
        # the service account that may read keys is deleted once they exist
        assert notes["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
        manifests.validate(item)
    assert weights == [-5, -5, -5, 0]
    pod = made["Job"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "muster-keys"
    production = ["--production"] if values else []
    words = ["muster.cli.cluster_keys", "--namespace", "$(NAMESPACE)", *production]
    assert pod["containers"][0]["args"] == words


OWN: Final[Values] = {"nats": {"external": {"url": "tls://nats.example:4222"}}}


# the last case: `helm upgrade --reuse-values` of a release without the value `keys`
@pytest.mark.parametrize("values", [{"keys": {"create": False}}, OWN, {"keys": None}], ids=str)
def test_who_has_keys_gets_no_job(values: Values) -> None:
    assert hooks(values) == hooks({**values, **PRODUCTION}) == {}


@pytest.mark.parametrize("name", ["muster", "gpus"])
def test_the_job_may_read_what_there_may_be_and_change_what_lists_rights(name: str) -> None:
    made = hooks({"fullnameOverride": name, **PRODUCTION})
    wanted = Wanted(name)
    both = {*wanted.parts(production=False), *wanted.parts(production=True)}
    assert granted(made["Role"]) == {
        ("create", "secrets", ""),
        ("create", "configmaps", ""),
        *(("get", *named(part)) for part in both),
        *(("patch", *named(part)) for part in (*wanted.signed, wanted.seeds)),
        *(("patch", *named(wanted.credentials(role))) for role in MOVED),
    }
    (container,) = made["Job"]["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env.get("MUSTER_AUTH_NAME", "muster") == name


MOVED: Final = (accounts.Role.READER, accounts.Role.LABELER)
"""The roles whose credentials are signed again, because they have moved to another account."""


def granted(role: Any) -> set[tuple[str, str, str]]:
    return {
        (verb, resource, name)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
    }


def named(part: Part) -> tuple[str, str]:
    return ("secrets" if part.kind is Kind.SECRET else "configmaps"), part.name


@pytest.mark.parametrize("production", [False, True])
def test_pods_mount_what_the_job_makes_and_none_mounts_all_keys(*, production: bool) -> None:
    rendered = manifests.of_chart({"production": {"enabled": production}})
    text = str([o["spec"]["template"] for o in rendered if o["kind"] in WORKLOADS])
    wanted = Wanted("muster")
    parts = wanted.parts(production=production)
    unused = {part for part in parts if f"'{part.name}'" not in text}
    nobodys = {wanted.seeds, wanted.authority, *wanted.for_people} if production else set()
    assert unused == nobodys
    there = {(o["kind"], o["metadata"]["name"]) for o in rendered}
    made = {(str(part.kind), part.name) for part in parts}
    secrets = [tree for tree in values_of(rendered, "secret") if not tree.get("optional")]
    needed = {("Secret", tree["secretName"]) for tree in secrets}
    needed |= {("Secret", tree["name"]) for tree in values_of(rendered, "secretKeyRef")}
    needed |= {("ConfigMap", tree["name"]) for tree in values_of(rendered, "configMap")}
    assert needed - there - made == set()


def values_of(tree: Any, key: str) -> list[Any]:
    """Return the values of a key at any depth of a tree."""
    if isinstance(tree, list):
        return [value for item in tree for value in values_of(item, key)]
    if not isinstance(tree, dict):
        return []
    own = [tree[key]] if key in tree else []
    return own + [value for item in tree.values() for value in values_of(item, key)]


def test_no_policy_keeps_the_job_from_the_api() -> None:
    labels = hooks(PRODUCTION)["Job"]["spec"]["template"]["metadata"]["labels"]
    policies = [
        o["spec"]
        for o in manifests.of_chart({**PRODUCTION, "fuse": {"enabled": True}})
        if o["kind"] == "NetworkPolicy" and "Egress" in o["spec"]["policyTypes"]
    ]
    assert policies
    for policy in policies:
        selected = policy["podSelector"]["matchLabels"]
        assert not selected.items() <= labels.items()


def test_the_job_takes_the_values_that_services_take() -> None:
    given: Values = {
        "keys": {
            "nodeSelector": {"example.com/pool": "a"},
            "tolerations": [{"operator": "Exists"}],
            "serviceAccount": {"annotations": {"example.com/a": "b"}},
        },
        "image": {"repository": "registry.example/m", "tag": "2"},
        "imagePullSecrets": [{"name": "mine"}],
    }
    made = hooks(given)
    pod = made["Job"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example/m:2"
    assert pod["imagePullSecrets"] == [{"name": "mine"}]
    assert pod["nodeSelector"] == given["keys"]["nodeSelector"]
    assert pod["tolerations"] == given["keys"]["tolerations"]
    notes = made["ServiceAccount"]["metadata"]["annotations"]
    assert notes["example.com/a"] == "b"
    assert notes["helm.sh/hook"] == "pre-install,pre-upgrade"


@pytest.mark.parametrize("overlay", ["minimal", "production"])
def test_the_component_says_what_the_chart_says(overlay: str, tmp_path: Path) -> None:
    parts = ("keys", "keys-production") if overlay == "production" else ("keys",)
    with_job = manifests.with_component(overlay, *parts, where=tmp_path)
    plain = {(o["kind"], o["metadata"]["name"]) for o in manifests.objects(overlay)}
    expected = [o for o in with_job if (o["kind"], o["metadata"]["name"]) not in plain]
    rendered = list(hooks(PRODUCTION if overlay == "production" else {}).values())
    for item in rendered:
        del item["metadata"]["annotations"]
    assert manifests.by_name(rendered) == manifests.by_name(expected)
