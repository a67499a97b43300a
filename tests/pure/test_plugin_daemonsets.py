"""One DaemonSet of the plugin for each label value, because the plugin cannot read labels."""

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml

from muster.service import validation
from muster_plugin.config import daemonsets, settings

KEY: Final = "nvidia.com/device-plugin.config"
BASE: Final = Path(__file__).parents[2] / "k8s" / "base" / "plugin.yaml"
SERVER: Final = {"uid": "1", "resourceVersion": "2", "managedFields": [], "generation": 3}


def document(*matches: Any) -> settings.Document:
    nodes = [{"match": match, "gpus": {}} for match in matches]
    return msgspec.convert({"apiVersion": "muster.dev/v1", "nodes": nodes}, settings.Document)


def base() -> dict[str, Any]:
    objects = daemonsets.objects_of([*yaml.safe_load_all(BASE.read_text("utf-8"))])
    (daemonset,) = daemonsets.plugins_of(objects)
    return daemonset


def made(*matches: Any) -> list[Any]:
    daemonset = base()
    daemonset["status"] = {"numberReady": 3}
    daemonset["metadata"] |= SERVER
    return daemonsets.for_labels(document(*matches), daemonset)


def variables(daemonset: Any) -> dict[str, Any]:
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each.get("value") for each in container["env"]}


def test_each_value_gets_a_daemonset_that_selects_its_nodes_and_tells_the_plugin_the_label() -> (
    None
):
    _, shared, small = made({KEY: "Shared_4"}, "edge-*", {KEY: "small"})
    assert [each["metadata"]["name"] for each in (shared, small)] == [
        "muster-plugin-shared-4",
        "muster-plugin-small",
    ]
    pod = shared["spec"]["template"]
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux", KEY: "Shared_4"}
    selector = shared["spec"]["selector"]["matchLabels"]
    assert selector == {"app.kubernetes.io/name": "muster-plugin", "configuration": "shared-4"}
    assert selector.items() <= pod["metadata"]["labels"].items()
    given = variables(shared)
    assert json.loads(given["MUSTER_PLUGIN__LABELS"]) == {KEY: "Shared_4"}
    assert (given["MUSTER_PLUGIN__NAME"], daemonsets.plugin_name(shared)) == (
        "device-plugin-shared-4",
        "device-plugin-shared-4",
    )
    assert daemonsets.name_of(shared) == "namespace: muster, daemonset: muster-plugin-shared-4"


def test_the_first_daemonset_keeps_off_these_nodes_and_changes_in_nothing_else() -> None:
    first, *_ = made({KEY: "shared"}, {KEY: "small"})
    pod = first["spec"]["template"]["spec"]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    expression = {"key": KEY, "operator": "NotIn", "values": ["shared", "small"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    assert pod.pop("affinity") == {"nodeAffinity": {required: terms}}
    assert json.loads(variables(first)["MUSTER_PLUGIN__LABELS"]) == {KEY: ""}
    pod["containers"][0]["env"].pop()
    assert first == base()


def test_a_node_gets_exactly_one_of_the_daemonsets_and_the_configuration_that_its_label_names() -> (
    None
):
    rules = document({KEY: "shared"}, {KEY: "small"})
    assert [
        rules.nodes[at].applies_to("a", json.loads(variables(each)["MUSTER_PLUGIN__LABELS"]))
        for each in made({KEY: "shared"}, {KEY: "small"})
        for at in (0, 1)
    ] == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("matches", "problem"),
    [
        (["edge-*"], "nodes: no override matches by a label, so one DaemonSet is enough"),
        ([{KEY: "a*"}], "nodes[0].match: a DaemonSet needs one label without wildcards"),
        (
            [{KEY: "a", "zone": "b"}],
            "nodes[0].match: a DaemonSet needs one label without wildcards",
        ),
        (
            [{KEY: "a"}, {"zone": "b"}],
            f"nodes: the overrides match by {KEY}, zone; use only one label",
        ),
        ([{KEY: str(number)} for number in range(8)], "nodes: 8 values; use at most 7"),
        (
            [{KEY: "a_b"}, {KEY: "a.b"}],
            "nodes: two values would give two DaemonSets the same name",
        ),
    ],
)
def test_what_no_daemonset_can_select_is_refused(matches: list[Any], problem: str) -> None:
    with pytest.raises(validation.Refused) as refused:
        made(*matches)
    assert refused.value.problems == (problem,)


def test_other_daemonsets_are_not_the_plugins() -> None:
    other = {"kind": "DaemonSet", "spec": {"template": {"spec": {"containers": [{"args": ["x"]}]}}}}
    objects = daemonsets.objects_of([other, {"kind": "List", "items": [base()]}, None, {}])
    assert daemonsets.plugins_of(objects) == [base()]


@pytest.mark.parametrize(
    "expressions", [[], [{"key": KEY, "operator": "NotIn", "values": ["mps"]}]]
)
def test_what_was_made_from_a_daemonset_can_be_made_again_from_the_result(
    expressions: list[Any],
) -> None:
    daemonset = base()
    if expressions:
        terms = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        daemonset["spec"]["template"]["spec"]["affinity"] = {"nodeAffinity": required}
    before = document({KEY: "shared"}, {KEY: "old"})
    now = document({KEY: "shared"}, {KEY: "new"})
    deployed, *_ = daemonsets.for_labels(before, daemonset)
    assert daemonsets.for_labels(now, deployed) == daemonsets.for_labels(now, daemonset)
