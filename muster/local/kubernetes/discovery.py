"""Pure: The documents in which the API stand-in announces what it serves."""

from muster.local.kubernetes import resources, trees

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
STATUS_VERBS = ("get", "patch", "update")


def documents() -> dict[str, trees.Tree]:
    """Return every discovery document by its path.

    `/openapi/v3` announces only that writes take `fieldValidation`: kubectl asks for that before
    it sends an object, and would validate against a schema of its own making otherwise.
    """
    versions: trees.Tree = {"kind": "APIVersions", "versions": ["v1"]}
    found: dict[str, trees.Tree] = {"/api": versions}
    groups: list[trees.Json] = []
    openapi: trees.Tree = {}
    for root in dict.fromkeys(resource.root for resource in resources.RESOURCES):
        here = [resource for resource in resources.RESOURCES if resource.root == root]
        found[root] = _resource_list(here)
        openapi[root[1:]] = {"serverRelativeURL": f"/openapi/v3{root}?hash=0"}
        found[f"/openapi/v3{root}"] = _openapi(here)
        if here[0].group:
            group = _group(here[0])
            groups.append(group)
            found[f"/apis/{here[0].group}"] = {"kind": "APIGroup", "apiVersion": "v1", **group}
    found["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    found["/openapi/v3"] = {"paths": openapi}
    return found


def _group(resource: resources.Resource) -> trees.Tree:
    version: trees.Tree = {"groupVersion": resource.api_version, "version": resource.version}
    return {"name": resource.group, "versions": [version], "preferredVersion": version}


def _resource_list(here: list[resources.Resource]) -> trees.Tree:
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
            # what `kubectl get all` shows
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


def _openapi(here: list[resources.Resource]) -> trees.Tree:
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
