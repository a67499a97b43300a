"""Pure: generates a DaemonSet of the plugin for each label value in `nodes`.

The plugin has no access to the Kubernetes API, so it cannot read its node's labels. Each generated
DaemonSet selects the nodes with one value and sets that value in the plugin's `labels`; the
original DaemonSet avoids these nodes. Each DaemonSet has a different plugin name, because health
expects a plugin on every node that the plugin's DaemonSet selects. The gate admits at
most eight names, and only those in its settings.
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
_NAME: Final = "MUSTER_PLUGIN__NAME"
_LABELS: Final = "MUSTER_PLUGIN__LABELS"
_NODE_AFFINITY: Final = ("spec", "template", "spec", "affinity", "nodeAffinity")
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_NAME_MAX: Final = 63
_UNUSABLE: Final = re.compile(r"[^a-z0-9]+")
_PATTERN: Final = re.compile(r"[*?\[]")


def objects_of(documents: Sequence[object]) -> list[Manifest]:
    """Return the objects in manifests, including those in a List."""
    listed: list[object] = []
    for document in documents:
        items = document.get("items") if isinstance(document, Mapping) else None
        listed += items if isinstance(items, list) else [document]
    return [each for each in listed if isinstance(each, dict)]


def plugins_of(objects: Sequence[Manifest]) -> list[Manifest]:
    """Return the DaemonSets of the plugin."""
    return [each for each in objects if _container(each) is not None]


def for_labels(document: settings.Document, daemonset: Manifest) -> list[Manifest]:
    """Return the changed original DaemonSet, then one for each label value. Raises Refused.

    The changed DaemonSet avoids the nodes with these values. An override that matches by the node's
    name needs no DaemonSet. `daemonset` may be the first DaemonSet that an earlier call returned.
    """
    key, values = _label(document.nodes)
    base = _plain(daemonset)
    if _variable(base, _LABELS) == _text({key: ""}):
        _let_on(base, key)
    copies = [_for_value(base, key, value) for value in values]
    names = [str(_below(each, "metadata")["name"]) for each in (base, *copies)]
    if len({*names}) < len(names):
        raise validation.Refused(["nodes: two values would give two DaemonSets the same name"])
    _keep_off(base, key, values)
    _set_variable(base, _LABELS, _text({key: ""}))
    return [base, *copies]


def plugin_name(daemonset: Manifest) -> str:
    """Return the plugin's name on the bus."""
    return _variable(daemonset, _NAME) or _PLUGIN


def name_of(daemonset: Manifest) -> str:
    """Return the DaemonSet's namespace and name, in the format of health's settings."""
    metadata = _below(daemonset, "metadata")
    return f"namespace: {metadata.get('namespace', 'default')}, daemonset: {metadata['name']}"


def _label(nodes: Sequence[settings.NodeOverride]) -> tuple[str, list[str]]:
    """Return the label's key and the values that the overrides match. Raises Refused."""
    problems: list[str] = []
    keys: dict[str, None] = {}
    values: dict[str, None] = {}
    for at, node in enumerate(nodes):
        if isinstance(node.match, str):
            continue
        (key, value), *more = node.match.items()
        if more or _PATTERN.search(value):
            problems.append(f"nodes[{at}].match: a DaemonSet needs one label without wildcards")
        keys[key] = values[value] = None
    if len(keys) > 1:
        problems.append(f"nodes: the overrides match by {', '.join(keys)}; use only one label")
    if len(values) >= vocabulary.PLUGINS_MAX:
        problems.append(f"nodes: {len(values)} values; use at most {vocabulary.PLUGINS_MAX - 1}")
    if not keys:
        problems.append("nodes: no override matches by a label, so one DaemonSet is enough")
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
        problem = f"{name} is not a valid plugin name; shorten the label's value"
        raise validation.Refused([f"nodes: {problem}"]) from None
    _set_variable(made, _NAME, name)
    _set_variable(made, _LABELS, _text({key: value}))
    return made


def _plain(daemonset: Manifest) -> Manifest:
    """Return a copy without the fields that the API server and kubectl add."""
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
    required = _below(made, *_NODE_AFFINITY, _REQUIRED)
    terms = required.setdefault("nodeSelectorTerms", [{}])
    for term in terms if isinstance(terms, list) else []:
        expressions = term.setdefault("matchExpressions", [])
        expressions.append({"key": key, "operator": "NotIn", "values": [*values]})


def _let_on(made: Manifest, key: str) -> None:
    """Remove the expressions that `_keep_off` adds, and empty terms, which would select no node."""
    terms = _below(made, *_NODE_AFFINITY, _REQUIRED).get("nodeSelectorTerms")
    kept = [_without_last(term, key) for term in terms] if isinstance(terms, list) else []
    if any(kept):
        required = _below(made, *_NODE_AFFINITY, _REQUIRED)
        required["nodeSelectorTerms"] = [term for term in kept if term]
        return
    for *above, last in ((*_NODE_AFFINITY, _REQUIRED), _NODE_AFFINITY, _NODE_AFFINITY[:-1]):
        if last == _REQUIRED or not _below(made, *above, last):
            del _below(made, *above)[last]


def _without_last(term: Manifest, key: str) -> Manifest:
    """Return a node selector term without its last expression if `_keep_off` added it."""
    expressions = term.get("matchExpressions")
    *others, last = expressions if isinstance(expressions, list) and expressions else [{}]
    if (last.get("key"), last.get("operator")) != (key, "NotIn"):
        return term
    left = {name: value for name, value in term.items() if name != "matchExpressions"}
    return left | ({"matchExpressions": others} if others else {})


def _variable(daemonset: Manifest, name: str) -> str:
    """Return the value of a variable of the plugin's container; empty if it has none."""
    container = _container(daemonset)
    assert container is not None, "it is a DaemonSet of the plugin"
    variables = container.get("env")
    for variable in variables if isinstance(variables, list) else []:
        if isinstance(variable, Mapping) and variable.get("name") == name:
            return str(variable.get("value") or "")
    return ""


def _text(labels: Mapping[str, str]) -> str:
    return msgspec.json.encode(labels).decode()


def _set_variable(made: Manifest, name: str, value: str) -> None:
    container = _container(made)
    assert container is not None, "it is a DaemonSet of the plugin"
    variables = container.setdefault("env", [])
    assert isinstance(variables, list), "the API server accepts only a list"
    variables[:] = [each for each in variables if each.get("name") != name]
    variables.append({"name": name, "value": value})


def _container(daemonset: Mapping[str, object]) -> dict[str, object] | None:
    """Return the container that runs the plugin; None if there is none."""
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
