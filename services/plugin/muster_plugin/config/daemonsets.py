"""Pure: makes one DaemonSet of the plugin into several, one for each label value in `nodes`.

The plugin has no right on the Kubernetes API, so it cannot read its node's labels. Each DaemonSet
selects the nodes with one value, and its pods get that value in `labels`; the first one keeps off
these nodes. Each has a plugin name of its own, because health expects a plugin wherever one
DaemonSet places it; the gate admits eight names, and only those in its settings.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from muster import vocabulary
from muster.service import validation
from muster_plugin.config import settings

Manifest = dict[str, object]

_PROGRAM: Final = "muster_plugin"
_OF_SERVER: Final = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields")
_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_MARK: Final = "configuration"
_PLUGIN: Final = "device-plugin"
"""The default of the setting `name`."""
_NAME_MAX: Final = 63
_UNUSABLE: Final = re.compile(r"[^a-z0-9]+")
_PATTERN: Final = re.compile(r"[*?\[]")


def plugins_of(documents: Sequence[object]) -> list[Manifest]:
    """Return the DaemonSets of the plugin among manifests."""
    listed: list[object] = []
    for document in documents:
        items = document.get("items") if isinstance(document, Mapping) else None
        listed += items if isinstance(items, list) else [document]
    return [each for each in listed if isinstance(each, dict) and _container(each) is not None]


def for_labels(document: settings.Document, daemonset: Manifest) -> list[Manifest]:
    """Return the DaemonSet for all other nodes, and one for each value. Raises Refused.

    An override that matches by the node's name needs no DaemonSet.
    """
    key, values = _label(document.nodes)
    base = _plain(daemonset)
    copies = [_for_value(base, key, value) for value in values]
    names = [str(_below(each, "metadata")["name"]) for each in (base, *copies)]
    if len({*names}) < len(names):
        raise validation.Refused(["nodes: two values would make DaemonSets of the same name"])
    _keep_off(base, key, values)
    _set_variable(base, "MUSTER_PLUGIN__LABELS", {key: ""})
    return [base, *copies]


def plugin_name(daemonset: Manifest) -> str:
    """Return the plugin's name on the bus."""
    container = _container(daemonset)
    assert container is not None, "it is a DaemonSet of the plugin"
    variables = container.get("env")
    for variable in variables if isinstance(variables, list) else []:
        if isinstance(variable, Mapping) and variable.get("name") == "MUSTER_PLUGIN__NAME":
            return str(variable.get("value"))
    return _PLUGIN


def name_of(daemonset: Manifest) -> str:
    """Return the DaemonSet's namespace and name, as health's settings name them."""
    metadata = _below(daemonset, "metadata")
    return f"namespace: {metadata.get('namespace', 'default')}, daemonset: {metadata['name']}"


def _label(nodes: Sequence[settings.NodeOverride]) -> tuple[str, list[str]]:
    """Return the key and the values that the overrides match."""
    problems: list[str] = []
    keys: dict[str, None] = {}
    values: dict[str, None] = {}
    for at, node in enumerate(nodes):
        if isinstance(node.match, str):
            continue
        (key, value), *more = node.match.items()
        if more or _PATTERN.search(value):
            problems.append(f"nodes[{at}].match: only one label with a plain value has a DaemonSet")
        keys[key] = values[value] = None
    if len(keys) > 1:
        problems.append(f"nodes: they match by several labels: {', '.join(keys)}")
    if len(values) >= vocabulary.PLUGINS_MAX:
        problems.append(f"nodes: {len(values)} values; at most {vocabulary.PLUGINS_MAX - 1}")
    if not keys:
        problems.append("nodes: none matches by a label, so one DaemonSet is enough")
    if problems:
        raise validation.Refused(problems)
    return next(iter(keys)), [*values]


def _for_value(base: Manifest, key: str, value: str) -> Manifest:
    made = copy.deepcopy(base)
    suffix = _UNUSABLE.sub("-", value.lower()).strip("-")
    metadata = _below(made, "metadata")
    metadata["name"] = f"{metadata['name']}-{suffix}"[:_NAME_MAX].rstrip("-")
    for labels in (
        _below(made, "metadata", "labels"),
        _below(made, "spec", "selector", "matchLabels"),
        _below(made, "spec", "template", "metadata", "labels"),
    ):
        labels[_MARK] = suffix
    _below(made, "spec", "template", "spec", "nodeSelector")[key] = value
    name = f"{plugin_name(base)}-{suffix}"
    try:
        msgspec.convert(name, vocabulary.PluginName)
    except msgspec.ValidationError:
        problem = f"{name}: not a plugin's name; shorten the label's value"
        raise validation.Refused([f"nodes: {problem}"]) from None
    _set_variable(made, "MUSTER_PLUGIN__NAME", name)
    _set_variable(made, "MUSTER_PLUGIN__LABELS", {key: value})
    return made


def _plain(daemonset: Manifest) -> Manifest:
    """Return a copy without what the API server adds."""
    made = copy.deepcopy(daemonset)
    made.pop("status", None)
    metadata = _below(made, "metadata")
    for key in _OF_SERVER:
        metadata.pop(key, None)
    annotations = metadata.get("annotations")
    if isinstance(annotations, dict):
        annotations.pop(_APPLIED, None)
    return made


def _keep_off(made: Manifest, key: str, values: Sequence[str]) -> None:
    required = _below(
        made,
        *("spec", "template", "spec", "affinity", "nodeAffinity"),
        "requiredDuringSchedulingIgnoredDuringExecution",
    )
    terms = required.setdefault("nodeSelectorTerms", [{}])
    for term in terms if isinstance(terms, list) else []:
        expressions = term.setdefault("matchExpressions", [])
        expressions.append({"key": key, "operator": "NotIn", "values": [*values]})


def _set_variable(made: Manifest, name: str, value: str | Mapping[str, str]) -> None:
    container = _container(made)
    assert container is not None, "it is a DaemonSet of the plugin"
    variables = container.setdefault("env", [])
    assert isinstance(variables, list), "the API server accepts only a list"
    variables[:] = [each for each in variables if each.get("name") != name]
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    variables.append({"name": name, "value": text})


def _container(daemonset: Mapping[str, object]) -> dict[str, object] | None:
    """Return the container that runs the plugin."""
    value: object = daemonset if daemonset.get("kind") == "DaemonSet" else None
    for key in ("spec", "template", "spec", "containers"):
        value = value.get(key) if isinstance(value, Mapping) else None
    for container in value if isinstance(value, list) else []:
        if isinstance(container, dict):
            words = (*(container.get("command") or ()), *(container.get("args") or ()))
            if _PROGRAM in words:
                return container
    return None


def _below(tree: Manifest, *keys: str) -> Manifest:
    """Return a section of a manifest; add it if it is missing."""
    for key in keys:
        inner = tree.get(key)
        if not isinstance(inner, dict):
            inner = tree[key] = {}
        tree = inner
    return tree
