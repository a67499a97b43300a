"""Pure: What the Kubernetes API refuses to store, as far as muster could get it wrong.

Names, label keys and values: apimachinery `pkg/util/validation`. Events and pods: kubernetes
`pkg/apis/core/validation` (v1.36). Fields of a `spec` are otherwise taken as they come.
"""

import re
from collections.abc import Iterator

from muster.local.kubernetes import refusals, resources, trees

ANNOTATIONS_BYTES_MAX = 256 * 1024
LABEL_VALUE_MAX = 63
NAME_MAX = 253

_DNS_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_DNS_LABEL}(?:\.{_DNS_LABEL})*")
_QUALIFIED = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_CLUSTER_EVENTS = ("default", "kube-system")


def refuse_invalid(resource: resources.Resource, stored: trees.Tree) -> None:
    """Raise 422 Invalid with every field that breaks a rule."""
    causes = tuple(_causes(resource, stored))
    if causes:
        raise refusals.invalid(resource.kind, trees.text(stored, "metadata", "name"), *causes)


def _causes(resource: resources.Resource, stored: trees.Tree) -> Iterator[refusals.Cause]:
    name = trees.text(stored, "metadata", "name")
    if not name:
        yield _cause("metadata.name", "Required value: name or generateName is required")
    elif not _is_name(name, LABEL_VALUE_MAX if resource == resources.NAMESPACES else NAME_MAX):
        yield _cause("metadata.name", f'Invalid value: "{name}": must be a DNS-1123 name')
    yield from _labels(trees.branch(stored, "metadata", "labels"))
    yield from _annotations(trees.branch(stored, "metadata", "annotations"))
    if resource == resources.PODS and not trees.look(stored, "spec", "containers"):
        yield _cause("spec.containers", "Required value")
    if resource.bucket == resources.EVENTS.bucket:
        yield from _event(stored)


def _is_name(name: str, length_max: int) -> bool:
    return len(name) <= length_max and bool(_SUBDOMAIN.fullmatch(name))


def _labels(labels: trees.Tree) -> Iterator[refusals.Cause]:
    for key, value in labels.items():
        if not _is_key(key):
            yield _cause("metadata.labels", f'Invalid value: "{key}": not a qualified name')
        if not isinstance(value, str):
            yield _cause("metadata.labels", f"Invalid value: {key}: expected a string")
        elif value and not (len(value) <= LABEL_VALUE_MAX and _QUALIFIED.fullmatch(value)):
            yield _cause(
                "metadata.labels",
                f'Invalid value: "{value}": a valid label must be an empty string or consist of '
                f"at most {LABEL_VALUE_MAX} alphanumeric characters, '-', '_' or '.', and must "
                "start and end with an alphanumeric character",
            )


def _annotations(annotations: trees.Tree) -> Iterator[refusals.Cause]:
    size_bytes = 0
    for key, value in annotations.items():
        if not _is_key(key.lower()):
            yield _cause("metadata.annotations", f'Invalid value: "{key}": not a qualified name')
        if isinstance(value, str):
            size_bytes += len(key.encode()) + len(value.encode())
        else:
            yield _cause("metadata.annotations", f"Invalid value: {key}: expected a string")
    if size_bytes > ANNOTATIONS_BYTES_MAX:
        yield _cause(
            "metadata.annotations", f"Too long: may not be more than {ANNOTATIONS_BYTES_MAX} bytes"
        )


def _is_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and not _is_name(prefix, NAME_MAX):
        return False
    return len(name) <= LABEL_VALUE_MAX and bool(_QUALIFIED.fullmatch(name))


def _event(stored: trees.Tree) -> Iterator[refusals.Cause]:
    namespace = trees.text(stored, "metadata", "namespace")
    about = trees.text(stored, "involvedObject", "namespace")
    if about != namespace and (about or namespace not in _CLUSTER_EVENTS):
        yield _cause(
            "involvedObject.namespace",
            f'Invalid value: "{about}": does not match event.namespace "{namespace}"; an event '
            "about a cluster-scoped object belongs into default",
        )


def _cause(field: str, message: str) -> refusals.Cause:
    return refusals.Cause(field=field, message=message)
