"""Pure: the resources, discovery documents and paths of the API stand-in.

Selectable fields, the resources that a PUT may create, and those that require a resourceVersion are
taken from kubernetes `pkg/registry/<group>/<resource>/strategy.go` (v1.36).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from muster.local.kubernetes import refusals, trees

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
STATUS_VERBS = ("get", "patch", "update")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resource:
    """One kind of object under one group and version."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    short_names: tuple[str, ...] = ()
    namespaced: bool = True
    has_status: bool = False
    first_status: trees.Tree | None = None
    """The status of a new object, which overrides the written status; None keeps the written
    status.
    """
    creates_on_update: bool = False
    updates_unconditionally: bool = True
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Selectable fields besides name and namespace, with their values if absent."""
    renames: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """This version's names for top-level fields that are stored under other names."""
    reads: tuple[str, ...] = ()
    """Read-only subresources, each with its own right."""

    @property
    def api_version(self) -> str:
        """Return the `apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Return the path of its group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"

    @property
    def qualified(self) -> str:
        """Return the name used in messages, such as `leases.coordination.k8s.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def bucket(self) -> str:
        """Return the name under which its objects are stored: both kinds of Event share one."""
        return self.plural

    def view(self, stored: trees.Tree) -> trees.Tree:
        """Convert a stored object to this version."""
        renamed = {self.renames.get(key, key): value for key, value in stored.items()}
        return {"kind": self.kind, "apiVersion": self.api_version, **renamed}

    def stored(self, shown: trees.Tree) -> trees.Tree:
        """Convert an object of this version to its stored form."""
        back = {new: old for old, new in self.renames.items()}
        kept = trees.without(shown, "kind", "apiVersion")
        return {back.get(key, key): value for key, value in kept.items()}

    def selectable(self, shown: trees.Tree) -> dict[str, str]:
        """Return the selectable fields of an object."""
        return {
            field: _written(trees.value_at(shown, *field.split(".")), default)
            for field, default in self._all_fields().items()
        }

    def refuse_unknown_fields(self, fields: Iterable[str]) -> None:
        """Refuse a field selector that the real API server would refuse."""
        for field in sorted(set(fields) - self._all_fields().keys()):
            raise refusals.bad_request(
                f'Unable to find "{self.api_version}, Resource={self.plural}" that match field '
                f"selector: field label not supported: {field}"
            )

    def _all_fields(self) -> Mapping[str, str]:
        own = {"metadata.name": ""}
        if self.namespaced:
            own["metadata.namespace"] = ""
        return own | dict(self.fields)


_EVENT_RENAMES = {
    "involvedObject": "regarding",
    "message": "note",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
    "reportingComponent": "reportingController",
}
_REFERENCE = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")

NODES = Resource(
    plural="nodes",
    kind="Node",
    short_names=("no",),
    namespaced=False,
    has_status=True,
    fields={"spec.unschedulable": "false"},
)
NAMESPACES = Resource(
    plural="namespaces",
    kind="Namespace",
    short_names=("ns",),
    namespaced=False,
    has_status=True,
    first_status={"phase": "Active"},
    fields={"status.phase": ""},
)
PODS = Resource(
    plural="pods",
    kind="Pod",
    short_names=("po",),
    has_status=True,
    first_status={"phase": "Pending"},
    fields={
        "spec.nodeName": "",
        "spec.restartPolicy": "",
        "spec.schedulerName": "",
        "spec.serviceAccountName": "",
        "spec.hostNetwork": "false",
        "status.phase": "",
        "status.podIP": "",
        "status.nominatedNodeName": "",
    },
    reads=("log", "portforward"),
)
EVENTS = Resource(
    plural="events",
    kind="Event",
    short_names=("ev",),
    creates_on_update=True,
    fields={
        **{f"involvedObject.{part}": "" for part in _REFERENCE},
        "reason": "",
        "reportingComponent": "",
        "type": "",
    },
)
RESOURCES = (
    NODES,
    NAMESPACES,
    PODS,
    EVENTS,
    Resource(plural="configmaps", kind="ConfigMap", short_names=("cm",)),
    Resource(plural="secrets", kind="Secret"),
    Resource(
        group="coordination.k8s.io",
        plural="leases",
        kind="Lease",
        creates_on_update=True,
        updates_unconditionally=False,
    ),
    Resource(
        group="events.k8s.io",
        plural="events",
        kind="Event",
        short_names=("ev",),
        creates_on_update=True,
        fields={
            **{f"regarding.{part}": "" for part in _REFERENCE},
            "reason": "",
            "reportingController": "",
            "type": "",
        },
        renames=_EVENT_RENAMES,
    ),
    Resource(
        group="apps",
        plural="daemonsets",
        kind="DaemonSet",
        short_names=("ds",),
        has_status=True,
        first_status={},
    ),
    Resource(
        group="apps",
        plural="deployments",
        kind="Deployment",
        short_names=("deploy",),
        has_status=True,
        first_status={},
    ),
    Resource(
        group="apps",
        plural="statefulsets",
        kind="StatefulSet",
        short_names=("sts",),
        has_status=True,
        first_status={},
    ),
    Resource(
        group="resource.k8s.io",
        plural="resourceslices",
        kind="ResourceSlice",
        namespaced=False,
        fields={"spec.nodeName": "", "spec.driver": ""},
    ),
    Resource(
        group="resource.k8s.io",
        plural="resourceclaims",
        kind="ResourceClaim",
        has_status=True,
        first_status={},
    ),
    Resource(
        group="resource.k8s.io",
        plural="deviceclasses",
        kind="DeviceClass",
        namespaced=False,
    ),
    Resource(
        group="admissionregistration.k8s.io",
        plural="mutatingwebhookconfigurations",
        kind="MutatingWebhookConfiguration",
        namespaced=False,
    ),
    Resource(
        group="karpenter.sh",
        version="v1alpha1",
        plural="nodeoverlays",
        kind="NodeOverlay",
        namespaced=False,
    ),
)


def find(group: str, version: str, plural: str) -> Resource:
    """Return the resource that a path addresses. Raises 404."""
    for resource in RESOURCES:
        if (resource.group, resource.version, resource.plural) == (group, version, plural):
            return resource
    raise refusals.no_such_path()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The target of a path: a collection, a namespace's collection, an object or subresource."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def right(self) -> str:
        """Return the resource that an RBAC rule for this target names."""
        plural = self.resource.plural
        return f"{plural}/{self.subresource}" if self.subresource in self.resource.reads else plural

    def refusal(self, reason: refusals.Reason, why: str) -> refusals.RequestError:
        """Return an error that names the object."""
        return refusals.RequestError(
            reason,
            f'{self.resource.qualified} "{self.name}" {why}',
            kind=self.resource.plural,
            name=self.name,
        )


def place(segments: Sequence[str]) -> Place:
    """Return the target of a request path, which is split into decoded segments."""
    match segments:
        case ["api", version, *rest] if rest:
            group = ""
        case ["apis", group, version, *rest] if rest:
            pass
        case _:
            raise refusals.no_such_path()
    namespace = ""
    match rest:
        case ["namespaces", namespace, plural, *rest] if plural != "status":
            pass
        case [plural, *rest]:
            pass
    resource = find(group, version, plural)
    name, subresource = [*rest, "", ""][:2]
    if (
        len(rest) > len(("name", "subresource"))
        or "" in segments
        or (namespace and not resource.namespaced)
        or (name and resource.namespaced and not namespace)
        or (subresource == "status" and not resource.has_status)
        or (subresource not in {"", "status", *resource.reads})
    ):
        raise refusals.no_such_path()
    return Place(resource=resource, namespace=namespace, name=name, subresource=subresource)


def _written(value: trees.Json, default: str) -> str:
    match value:
        case None | dict() | list():
            return default
        case bool():
            return "true" if value else "false"
        case _:
            return str(value)


def documents() -> dict[str, trees.Tree]:
    """Return every discovery document by its path.

    `/openapi/v3` announces only that writes accept `fieldValidation`: kubectl checks that before it
    sends an object, and would otherwise validate against a schema that it builds itself.
    """
    versions: trees.Tree = {"kind": "APIVersions", "versions": ["v1"]}
    by_path: dict[str, trees.Tree] = {"/api": versions}
    groups: list[trees.Json] = []
    openapi: trees.Tree = {}
    for root in dict.fromkeys(resource.root for resource in RESOURCES):
        here = [resource for resource in RESOURCES if resource.root == root]
        by_path[root] = _resource_list(here)
        openapi[root[1:]] = {"serverRelativeURL": f"/openapi/v3{root}?hash=0"}
        by_path[f"/openapi/v3{root}"] = _openapi(here)
        if here[0].group:
            group = _group(here[0])
            groups.append(group)
            by_path[f"/apis/{here[0].group}"] = {"kind": "APIGroup", "apiVersion": "v1", **group}
    by_path["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    by_path["/openapi/v3"] = {"paths": openapi}
    return by_path


def _group(resource: Resource) -> trees.Tree:
    version: trees.Tree = {"groupVersion": resource.api_version, "version": resource.version}
    return {"name": resource.group, "versions": [version], "preferredVersion": version}


def _resource_list(here: list[Resource]) -> trees.Tree:
    listed: list[trees.Json] = []
    for resource in here:
        entry: trees.Tree = {
            "name": resource.plural,
            "singularName": resource.kind.lower(),
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": list(VERBS),
        }
        if resource.short_names:
            entry["shortNames"] = list(resource.short_names)
        if resource.first_status is not None and resource.namespaced:
            # the resources that `kubectl get all` shows
            entry["categories"] = ["all"]
        listed.append(entry)
        if resource.has_status:
            listed.append(
                {
                    "name": f"{resource.plural}/status",
                    "singularName": "",
                    "namespaced": resource.namespaced,
                    "kind": resource.kind,
                    "verbs": list(STATUS_VERBS),
                }
            )
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": here[0].api_version,
        "resources": listed,
    }


def _openapi(here: list[Resource]) -> trees.Tree:
    paths: trees.Tree = {}
    for resource in here:
        scope = "/namespaces/{namespace}" if resource.namespaced else ""
        operation: trees.Tree = {
            "parameters": [
                {"name": "dryRun", "in": "query", "schema": {"type": "string"}},
                {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}},
            ],
            "responses": {"200": {"description": "OK"}},
            "x-kubernetes-group-version-kind": {
                "group": resource.group,
                "version": resource.version,
                "kind": resource.kind,
            },
        }
        paths[f"{resource.root}{scope}/{resource.plural}"] = {"post": operation}
        paths[f"{resource.root}{scope}/{resource.plural}/{{name}}"] = {"patch": operation}
    info: trees.Tree = {"title": "muster's stand-in for Kubernetes", "version": "v1"}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}
