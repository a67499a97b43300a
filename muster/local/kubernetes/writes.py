"""Pure: computes the result of a create, an update, a patch or an apply on an object.

The main resource and `/status` are separate, as in the API server's strategies. The main resource
never changes the status; `/status` changes only the status and the metadata (the kubelet relies on
this: `pkg/util/node/node.go`, PatchNodeStatus).
"""

import dataclasses
import enum
import re
from collections.abc import Iterator
from typing import assert_never

from muster.local.kubernetes import ownership, refusals, resources, trees

ANNOTATIONS_BYTES_MAX = 256 * 1024
LABEL_VALUE_MAX = 63
NAME_MAX = 253
_DNS_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_DNS_LABEL}(?:\.{_DNS_LABEL})*")
_QUALIFIED = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_CLUSTER_EVENTS = ("default", "kube-system")


class PatchFormat(enum.StrEnum):
    """The media types of a PATCH."""

    JSON = "application/json-patch+json"
    MERGE = "application/merge-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"
    APPLY = "application/apply-patch+yaml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Write:
    """The parameters of a write: its target, its writer, and values that the adapter generates."""

    place: resources.Place
    manager: str
    at: str
    uid: str
    suffix: str
    force: bool = False
    dry_run: bool = False

    def writer(self, *, applies: bool = False) -> ownership.Writer:
        """Return the writer that will own the fields of this write."""
        return ownership.Writer(
            manager=self.manager,
            applies=applies,
            api_version=self.place.resource.api_version,
            subresource=self.place.subresource,
        )


def created(body: trees.Json, write: Write) -> trees.Tree:
    """Return the new object in its stored form, without its version."""
    return _created(_object(body, write.place), write, named=None)


def updated(old: trees.Tree, body: trees.Json, write: Write) -> trees.Tree:
    """Return `old` replaced by `body`; 409 if `body` is out of date."""
    resource = write.place.resource
    new = _object(body, write.place)
    if not resource.updates_unconditionally and not _version(new):
        cause = refusals.Cause(
            field="metadata.resourceVersion",
            message="Invalid value: 0x0: must be specified for an update",
        )
        raise refusals.invalid(resource.kind, write.place.name, cause)
    if _uid(new) not in {"", _uid(old)}:
        why = f"UID in precondition: {_uid(new)}, UID in object meta: {_uid(old)}"
        raise _conflict(write.place, f"Precondition failed: {why}")
    return _replaced(old, new, write)


def patched(
    old: trees.Tree, patch: trees.Json, patch_format: PatchFormat, write: Write
) -> trees.Tree:
    """Return `old` with the patch applied; 409 if the patch names another version."""
    shown = write.place.resource.view(old)
    match patch_format:
        case PatchFormat.JSON:
            new = trees.json_patch(shown, patch)
        case PatchFormat.MERGE:
            new = trees.merge(shown, _tree(patch))
        case PatchFormat.STRATEGIC:
            new = trees.strategic(shown, _tree(patch))
        case PatchFormat.APPLY:
            return _applied(old, _wanted(patch, write), write)
        case _:
            assert_never(patch_format)
    trees.refuse_depth(new)
    return _replaced(old, _object(new, write.place), write)


def first_applied(patch: trees.Json, write: Write) -> trees.Tree:
    """Return the object that an apply creates if none exists."""
    wanted = _wanted(patch, write)
    uid = trees.string_at(wanted, "metadata", "uid")
    if uid:
        # apiserver pkg/registry/generic/registry/store.go, Update
        raise write.place.refusal(
            refusals.Reason.CONFLICT,
            f"cannot be applied: uid mismatch: the provided object specified uid {uid}, and no "
            "existing object was found",
        )
    named = frozenset(ownership.leaves(wanted))
    return _created(trees.strategic({}, wanted), write, named=named)


def _applied(old: trees.Tree, wanted: trees.Tree, write: Write) -> trees.Tree:
    new = ownership.applied(old, wanted, write.writer(applies=True), force=write.force)
    return _replaced(old, new, write, named=frozenset(ownership.leaves(wanted)))


def _wanted(patch: trees.Json, write: Write) -> trees.Tree:
    """Return the fields of an apply, without fields that an apply may not change."""
    if isinstance(patch, dict) and trees.value_at(patch, "metadata", "managedFields"):
        raise refusals.bad_request("metadata.managedFields must be nil")
    wanted = _object(patch, write.place)
    if write.place.subresource:
        return {key: wanted[key] for key in ("metadata", "status") if key in wanted}
    return trees.without(wanted, "status") if write.place.resource.has_status else wanted


def _created(new: trees.Tree, write: Write, *, named: ownership.Fields | None) -> trees.Tree:
    place = write.place
    metadata = trees.without(
        trees.object_at(new, "metadata"),
        "managedFields",
        "resourceVersion",
        "selfLink",
        "deletionTimestamp",
    )
    generated = trees.string_at(metadata, "generateName")
    if not metadata.get("name") and generated:
        metadata["name"] = generated + write.suffix
    if place.resource.namespaced:
        metadata["namespace"] = place.namespace
    metadata |= {"uid": write.uid, "creationTimestamp": write.at}
    new = {**new, "metadata": metadata}
    if place.resource.has_status and place.resource.first_status is not None:
        new = {**new, "status": place.resource.first_status}
    refuse_invalid(place.resource, new)
    writer = write.writer(applies=named is not None)
    return ownership.recorded({}, new, writer, at=write.at, named=named)


def _replaced(
    old: trees.Tree, new: trees.Tree, write: Write, *, named: ownership.Fields | None = None
) -> trees.Tree:
    place = write.place
    _refuse_stale(old, new, place)
    if _uid(new) not in {"", _uid(old)}:
        cause = refusals.Cause("metadata.uid", f'Invalid value: "{_uid(new)}": field is immutable')
        raise refusals.invalid(place.resource.kind, place.name, cause)
    kept = {
        key: value
        for key, value in trees.object_at(old, "metadata").items()
        if key in {"name", "namespace", "uid", "creationTimestamp", "generateName"}
    }
    metadata = {**trees.object_at(new, "metadata"), **kept}
    base = old
    if metadata.get("managedFields") in ([], [{}]):
        base = trees.with_value(old, None, "metadata", "managedFields")
    if place.subresource:
        new = {**trees.without(old, "status"), **_only(new, "status"), "metadata": metadata}
    elif place.resource.has_status:
        new = {**trees.without(new, "status"), **_only(old, "status"), "metadata": metadata}
    else:
        new = {**new, "metadata": metadata}
    refuse_invalid(place.resource, new)
    writer = write.writer(applies=named is not None)
    new = ownership.recorded(base, new, writer, at=write.at, named=named)
    return trees.with_value(new, _version(old), "metadata", "resourceVersion")


def _refuse_stale(old: trees.Tree, new: trees.Tree, place: resources.Place) -> None:
    """Refuse a write that is based on an outdated version of the object."""
    if _version(new) not in {"", _version(old)}:
        raise _conflict(
            place,
            "the object has been modified; please apply your changes to the latest version and "
            "try again",
        )


def _conflict(place: resources.Place, why: str) -> refusals.RequestError:
    return refusals.RequestError(
        refusals.Reason.CONFLICT,
        f'Operation cannot be fulfilled on {place.resource.qualified} "{place.name}": {why}',
        kind=place.resource.plural,
        name=place.name,
    )


def _uid(tree: trees.Tree) -> str:
    return trees.string_at(tree, "metadata", "uid")


def _object(body: trees.Json, place: resources.Place) -> trees.Tree:
    """Return the body in its stored form, if it is an object of the kind at `place`."""
    dense = trees.without_nulls(_tree(body))
    assert isinstance(dense, dict), "a tree stays a tree"
    resource = place.resource
    for field, expected in (("kind", resource.kind), ("apiVersion", resource.api_version)):
        if trees.string_at(dense, field) not in {"", expected}:
            raise refusals.bad_request(
                f"the {field} in the data ({dense[field]}) does not match the path's ({expected})"
            )
    for field, expected in (("name", place.name), ("namespace", place.namespace)):
        written = trees.string_at(dense, "metadata", field)
        if written and expected and written != expected:
            raise refusals.bad_request(
                f"the {field} of the object ({written}) does not match the {field} on the URL "
                f"({expected})"
            )
    metadata = trees.object_at(dense, "metadata")
    if place.name:
        metadata = {**metadata, "name": place.name}
    return resource.stored({**dense, "metadata": metadata})


def _tree(body: trees.Json) -> trees.Tree:
    if not isinstance(body, dict):
        raise refusals.bad_request(f"expected an object, got {trees.kind(body)}")
    return body


def _only(tree: trees.Tree, name: str) -> trees.Tree:
    return {name: tree[name]} if name in tree else {}


def _version(tree: trees.Tree) -> str:
    return trees.string_at(tree, "metadata", "resourceVersion")


def refuse_invalid(resource: resources.Resource, stored: trees.Tree) -> None:
    """Raise 422 Invalid, with all invalid fields, if there are any."""
    causes = tuple(_causes(resource, stored))
    if causes:
        raise refusals.invalid(resource.kind, trees.string_at(stored, "metadata", "name"), *causes)


def _causes(resource: resources.Resource, stored: trees.Tree) -> Iterator[refusals.Cause]:
    name = trees.string_at(stored, "metadata", "name")
    if not name:
        yield refusals.Cause("metadata.name", "Required value: name or generateName is required")
    elif not _is_name(name, LABEL_VALUE_MAX if resource == resources.NAMESPACES else NAME_MAX):
        yield refusals.Cause("metadata.name", f'Invalid value: "{name}": must be a DNS-1123 name')
    yield from _labels(trees.object_at(stored, "metadata", "labels"))
    yield from _annotations(trees.object_at(stored, "metadata", "annotations"))
    if resource == resources.PODS and not trees.value_at(stored, "spec", "containers"):
        yield refusals.Cause("spec.containers", "Required value")
    if resource.bucket == resources.EVENTS.bucket:
        yield from _event(stored)


def _is_name(name: str, length_max: int) -> bool:
    return len(name) <= length_max and bool(_SUBDOMAIN.fullmatch(name))


def _labels(labels: trees.Tree) -> Iterator[refusals.Cause]:
    for key, value in labels.items():
        if not _is_key(key):
            yield refusals.Cause("metadata.labels", f'Invalid value: "{key}": not a qualified name')
        if not isinstance(value, str):
            yield refusals.Cause("metadata.labels", f"Invalid value: {key}: expected a string")
        elif len(value) > LABEL_VALUE_MAX:
            yield refusals.Cause(
                "metadata.labels",
                f'Invalid value: "{value}": must be no more than {LABEL_VALUE_MAX} bytes',
            )
        elif value and not _QUALIFIED.fullmatch(value):
            yield refusals.Cause(
                "metadata.labels",
                f'Invalid value: "{value}": a valid label must be an empty string or consist of '
                "alphanumeric characters, '-', '_' or '.', and must start and end with an "
                "alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used "
                "for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')",
            )


def _annotations(annotations: trees.Tree) -> Iterator[refusals.Cause]:
    size_bytes = 0
    for key, value in annotations.items():
        if not _is_key(key.lower()):
            yield refusals.Cause(
                "metadata.annotations", f'Invalid value: "{key}": not a qualified name'
            )
        if isinstance(value, str):
            size_bytes += len(key.encode()) + len(value.encode())
        else:
            yield refusals.Cause("metadata.annotations", f"Invalid value: {key}: expected a string")
    if size_bytes > ANNOTATIONS_BYTES_MAX:
        yield refusals.Cause(
            "metadata.annotations", f"Too long: may not be more than {ANNOTATIONS_BYTES_MAX} bytes"
        )


def _is_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and not _is_name(prefix, NAME_MAX):
        return False
    return len(name) <= LABEL_VALUE_MAX and bool(_QUALIFIED.fullmatch(name))


def _event(stored: trees.Tree) -> Iterator[refusals.Cause]:
    namespace = trees.string_at(stored, "metadata", "namespace")
    about = trees.string_at(stored, "involvedObject", "namespace")
    if about != namespace and (about or namespace not in _CLUSTER_EVENTS):
        yield refusals.Cause(
            "involvedObject.namespace",
            f'Invalid value: "{about}": does not match event.namespace "{namespace}"; an event '
            "about a cluster-scoped object belongs in namespace default",
        )
