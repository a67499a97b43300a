"""Upgrades have the order that events require, and an uninstall leaves only what the page says."""

import re
from typing import Final

import pytest

from muster_labeler.cli import uninstall
from tests.worlds import event_map, manifests

PAGE: Final = (manifests.ROOT / "docs/upgrade.md").read_text("utf-8")
UPGRADE, _, _ = PAGE.partition("\n## Rolling back\n")
TEXT: Final = " ".join(PAGE.split())
PART_OF: Final = "app.kubernetes.io/part-of"
NAME: Final = "app.kubernetes.io/name"


def steps() -> list[set[str]]:
    """Return which names each step of an upgrade applies; the last one applies everything."""
    selectors = re.findall(r"^kubectl apply -k DIR(?: -l (.+))?$", UPGRADE, re.MULTILINE)
    return [set(re.findall(r"muster-[a-z]+", selector)) for selector in selectors]


def test_subscribers_are_upgraded_before_publishers() -> None:
    order = {name.removeprefix("muster-"): at for at, names in enumerate(steps()) for name in names}
    order |= {name: order.get(name, len(steps()) - 1) for name in ("plugin", "fuse")}
    early = [
        (event, speaker, listener)
        for event, (_, speaker, listeners) in event_map.table().items()
        for listener in listeners - {"-"}
        # their events do not matter: an older health has no subscription for them
        if speaker not in {listener, "gate", "-"}
        and event != "ReceiversConfigured"
        and order[listener] >= order[speaker]
    ]
    assert early == []
    assert (order["nats"], order["gate"]) == (0, 0)
    assert steps()[-1] == set()


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_a_step_brings_all_that_its_workloads_read(overlay: str) -> None:
    maps = {
        o["metadata"]["name"]: o["metadata"]["labels"][NAME]
        for o in manifests.objects(overlay)
        if o["kind"] == "ConfigMap"
    }
    accounts = {
        o["metadata"]["name"]: o["metadata"]["labels"][NAME]
        for o in manifests.objects(overlay)
        if o["kind"] == "ServiceAccount"
    }
    for name, pod in manifests.pods(overlay).items():
        read = {v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v}
        # that one is created by hand, like Secrets
        assert {maps[source] for source in read - {"muster-nats-ca"}} <= {name}
        assert accounts[pod["serviceAccountName"]] == name


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_everything_has_the_label_by_which_an_uninstall_removes_it(overlay: str) -> None:
    singular = {plural: re.sub("ies$", "y", plural).rstrip("s") for _, plural in uninstall._KINDS}
    removed = {*singular.values(), "securitycontextconstraints"}
    for manifest in manifests.objects(overlay):
        what = (manifest["kind"], manifest["metadata"]["name"])
        assert manifest["metadata"]["labels"][PART_OF] == "muster", what
        place = manifest["metadata"].get("namespace", "")
        if what != ("Namespace", "muster") and place != "muster":
            assert manifest["kind"].lower() in removed, what


def test_what_services_make_in_the_cluster_is_named_on_the_page() -> None:
    rules = [
        rule
        for role in manifests.objects("minimal")
        if role["kind"] in {"Role", "ClusterRole"}
        for rule in role["rules"]
    ]
    created = {kind for rule in rules if "create" in rule["verbs"] for kind in rule["resources"]}
    texts = {"leases": "Lease `", "configmaps": "ConfigMap `", "events": "Events about nodes"}
    assert created == texts.keys()
    assert [kind for kind, words in texts.items() if words not in TEXT] == []
    named = {name for rule in rules for name in rule.get("resourceNames", ())}
    assert [name for name in named if f"`{name}`" not in PAGE] == []
