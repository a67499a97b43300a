"""Statements about a Kubernetes API: what a create, an update, a patch and a delete do."""

from muster.kubernetes import api as kubernetes_api
from tests.worlds.api_statements import (
    DEFAULT,
    JSON_PATCH,
    LEASES,
    NODES,
    STRATEGIC,
    Api,
    Object,
    condition,
    statement,
    types,
)

MODIFIED = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


@statement
async def test_a_new_object_has_a_uid_a_version_and_a_time(api: Api) -> None:
    path = await api.config_map(a="1")
    made = (await api.good("GET", path))["metadata"]
    assert {"uid", "resourceVersion", "creationTimestamp"} <= made.keys()
    assert (made["name"], made["namespace"]) == (api.name, "default")


@statement
async def test_a_name_can_be_taken_once(api: Api) -> None:
    await api.node()
    again = await api.refused("POST", NODES, {"metadata": {"name": api.name}})
    assert again == (409, "AlreadyExists", 'nodes "NAME" already exists')


@statement
async def test_a_name_is_a_dns_name(api: Api) -> None:
    status, reason, message = await api.refused("POST", NODES, {"metadata": {"name": "Bad_"}})
    assert (status, reason) == (422, "Invalid")
    assert message.startswith('Node "Bad_" is invalid: metadata.name: Invalid value: "Bad_": ')


@statement
async def test_a_name_is_made_of_a_prefix(api: Api) -> None:
    made = {"metadata": {"generateName": f"{api.name}-"}}
    created = await api.make(f"{DEFAULT}/configmaps", made)
    name = created["metadata"]["name"]
    assert name.startswith(f"{api.name}-")
    assert len(name) == len(api.name) + 6


@statement
async def test_what_is_not_there_is_not_found(api: Api) -> None:
    missing = (404, "NotFound", 'nodes "NAME" not found')
    path = f"{NODES}/{api.name}"
    labels = {"metadata": {"labels": {"a": "b"}}}
    assert await api.refused("GET", path) == missing
    assert await api.refused("DELETE", path) == missing
    assert await api.refused("PATCH", path, labels, STRATEGIC) == missing
    assert await api.refused("PUT", path, {"metadata": {"name": api.name}}) == missing


@statement
async def test_a_path_that_leads_nowhere_is_404(api: Api) -> None:
    assert (await api.ask("GET", "/apis/nobody.example/v1/things"))[0] == 404
    assert (await api.ask("GET", "/api/v1/nothings"))[0] == 404


@statement
async def test_a_namespace_must_exist(api: Api) -> None:
    path = f"/api/v1/namespaces/{api.name}/configmaps"
    refused = await api.refused("POST", path, {"metadata": {"name": "a"}})
    assert refused == (404, "NotFound", 'namespaces "NAME" not found')


@statement
async def test_a_label_with_a_bad_value_is_refused(api: Api) -> None:
    path = await api.node()
    rule = (
        "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or "
        "'.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or "
        "'my_value',  or '12345', regex used for validation is "
        "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
    )
    for value in ("NVIDIA H100", "-h100", "h100."):
        patch = {"metadata": {"labels": {"a": value}}}
        status, reason, message = await api.refused("PATCH", path, patch, STRATEGIC)
        assert (status, reason) == (422, "Invalid")
        text = f'Node "NAME" is invalid: metadata.labels: Invalid value: "{value}": {rule}'
        assert message == text


@statement
async def test_a_label_has_at_most_63_characters(api: Api) -> None:
    path = await api.node()
    await api.patch(path, {"metadata": {"labels": {"a": "x" * 63}}})
    patch = {"metadata": {"labels": {"a": "x" * 64}}}
    status, reason, message = await api.refused("PATCH", path, patch, STRATEGIC)
    assert (status, reason) == (422, "Invalid")
    assert "metadata.labels: " in message
    assert "63 " in message


@statement
async def test_a_label_may_be_empty(api: Api) -> None:
    path = await api.node()
    shown = await api.patch(path, {"metadata": {"labels": {"a": ""}}})
    assert shown["metadata"]["labels"]["a"] == ""


@statement
async def test_a_label_has_a_qualified_key(api: Api) -> None:
    path = await api.node()
    for key in ("a/b/c", "-a", "Example.com/a", "a b"):
        patch = {"metadata": {"labels": {key: "x"}}}
        status, reason, message = await api.refused("PATCH", path, patch, STRATEGIC)
        assert (status, reason) == (422, "Invalid"), key
        assert "metadata.labels: Invalid value: " in message


@statement
async def test_a_label_is_a_string(api: Api) -> None:
    path = await api.node()
    patch = {"metadata": {"labels": {"a": 1}}}
    assert (await api.ask("PATCH", path, patch, STRATEGIC))[0] in {400, 422}


@statement
async def test_annotations_have_256_kib(api: Api) -> None:
    path = await api.node()
    patch = {"metadata": {"annotations": {"a": "x" * 262_144}}}
    status, reason, message = await api.refused("PATCH", path, patch, STRATEGIC)
    assert (status, reason) == (422, "Invalid")
    assert "metadata.annotations: Too long: may not be more than 262144 bytes" in message


@statement
async def test_a_write_of_an_old_version_is_a_conflict(api: Api) -> None:
    path = await api.config_map(a="1")
    old = await api.good("GET", path)
    await api.patch(path, {"data": {"a": "2"}})
    text = f'Operation cannot be fulfilled on configmaps "NAME": {MODIFIED}'
    assert await api.refused("PUT", path, old) == (409, "Conflict", text)
    version = {"metadata": {"resourceVersion": old["metadata"]["resourceVersion"]}}
    for content in (STRATEGIC, kubernetes_api.MERGE):
        assert await api.refused("PATCH", path, version, content) == (409, "Conflict", text)


@statement
async def test_a_patch_of_another_object_of_the_name_is_refused(api: Api) -> None:
    path = await api.node()
    other = {"metadata": {"uid": "other", "labels": {"a": "b"}}}
    text = 'Node "NAME" is invalid: metadata.uid: Invalid value: "other": field is immutable'
    for below in ("", "/status"):
        for content in (STRATEGIC, kubernetes_api.MERGE):
            refused = await api.refused("PATCH", path + below, other, content)
            assert refused == (422, "Invalid", text)


@statement
async def test_an_update_of_another_object_of_the_name_is_a_conflict(api: Api) -> None:
    path = await api.config_map(a="1")
    other = {"metadata": {"name": api.name, "uid": "other"}}
    status, reason, message = await api.refused("PUT", path, other)
    assert (status, reason) == (409, "Conflict")
    assert "Precondition failed: UID in precondition: other, UID in object meta: " in message


@statement
async def test_a_delete_has_preconditions(api: Api) -> None:
    path = await api.config_map(a="1")
    for field, words in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        refused = await api.refused("DELETE", path, {"preconditions": {field: "1"}})
        assert refused[:2] == (409, "Conflict"), words
    uid = (await api.good("GET", path))["metadata"]["uid"]
    gone = await api.good("DELETE", path, {"preconditions": {"uid": uid}})
    assert (gone["kind"], gone["status"]) == ("Status", "Success")
    assert gone["details"] == {"name": api.name, "kind": "configmaps", "uid": uid}
    assert (await api.ask("GET", path))[0] == 404


@statement
async def test_a_patch_that_changes_nothing_keeps_the_version(api: Api) -> None:
    path = await api.config_map(a="1")
    before = await api.good("GET", path)
    assert await api.patch(path, {"data": {"a": "1"}}) == before
    after = await api.patch(path, {"data": {"a": "2"}})
    assert after["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]


@statement
async def test_a_dry_run_changes_nothing(api: Api) -> None:
    path = await api.config_map(a="1")
    before = await api.good("GET", path)
    patch = {"data": {"a": "2"}}
    shown = await api.good("PATCH", path, patch, STRATEGIC, dryRun="All")
    assert shown["data"] == {"a": "2"}
    assert await api.good("GET", path) == before


@statement
async def test_a_node_keeps_the_status_that_it_is_created_with(api: Api) -> None:
    path = await api.node(status={"conditions": [condition("Ready")]})
    assert types(await api.good("GET", path)) == ["Ready"]


@statement
async def test_a_new_pod_is_pending_whatever_its_creator_wrote(api: Api) -> None:
    spec = {"containers": [{"name": "c", "image": "i"}], "nodeName": "nowhere"}
    pod = {"metadata": {"name": api.name}, "spec": spec, "status": {"phase": "Running"}}
    assert (await api.make(f"{DEFAULT}/pods", pod))["status"]["phase"] == "Pending"


@statement
async def test_the_main_resource_leaves_the_status_and_the_subresource_the_spec(api: Api) -> None:
    path = await api.node(status={"conditions": [condition("Ready")]})
    both: Object = {"spec": {"unschedulable": True}, "status": {"phase": "x"}}
    of_status = await api.patch(f"{path}/status", both)
    assert "unschedulable" not in of_status.get("spec", {})
    assert of_status["status"]["phase"] == "x"
    both["status"] = {"phase": "y"}
    of_main = await api.patch(path, both)
    assert of_main["spec"]["unschedulable"] is True
    assert of_main["status"]["phase"] == "x"


@statement
async def test_the_status_subresource_changes_labels_too(api: Api) -> None:
    path = await api.node()
    shown = await api.patch(f"{path}/status", {"metadata": {"labels": {"a": "b"}}})
    assert shown["metadata"]["labels"]["a"] == "b"


@statement
async def test_a_strategic_merge_changes_conditions_one_by_one(api: Api) -> None:
    path = await api.node(status={"conditions": [condition("Ready"), condition("Gpu")]})
    patch = {"status": {"conditions": [condition("Gpu", "False"), condition("Fuse")]}}
    shown = await api.patch(f"{path}/status", patch)
    said = {entry["type"]: entry["status"] for entry in shown["status"]["conditions"]}
    assert said == {"Ready": "True", "Gpu": "False", "Fuse": "True"}


@statement
async def test_a_strategic_merge_removes_one_condition_by_name(api: Api) -> None:
    path = await api.node(status={"conditions": [condition("Ready"), condition("Gpu")]})
    gone = {"status": {"conditions": [{"$patch": "delete", "type": "Gpu"}]}}
    assert types(await api.patch(f"{path}/status", gone)) == ["Ready"]
    # removing it once more is no error
    assert types(await api.patch(f"{path}/status", gone)) == ["Ready"]


@statement
async def test_a_merge_patch_replaces_all_conditions(api: Api) -> None:
    path = await api.node(status={"conditions": [condition("Ready")]})
    patch = {"status": {"conditions": [condition("Gpu")]}}
    shown = await api.patch(f"{path}/status", patch, content=kubernetes_api.MERGE)
    assert types(shown) == ["Gpu"]


@statement
async def test_null_removes_a_label_in_either_merge(api: Api) -> None:
    path = await api.node(a="1", b="2")
    for key, content in (("a", STRATEGIC), ("b", kubernetes_api.MERGE)):
        patch = {"metadata": {"labels": {key: None}}}
        shown = await api.patch(path, patch, content=content)
        assert key not in shown["metadata"].get("labels", {})


@statement
async def test_a_json_patch_refuses_to_remove_what_is_not_there(api: Api) -> None:
    path = await api.config_map(a="1")
    operation = [{"op": "remove", "path": "/data/b"}]
    status, reason, message = await api.refused("PATCH", path, operation, JSON_PATCH)
    assert (status, reason) == (422, "Invalid")
    assert "the server rejected our request due to an error in our request" in message


@statement
async def test_a_json_patch_tests_before_it_writes(api: Api) -> None:
    path = await api.config_map(a="1")
    write = {"op": "replace", "path": "/data/a", "value": "2"}
    tests = [{"op": "test", "path": "/data/a", "value": value} for value in ("x", "1")]
    assert (await api.ask("PATCH", path, [tests[0], write], JSON_PATCH))[0] == 422
    shown = await api.patch(path, [tests[1], write], content=JSON_PATCH)
    assert shown["data"] == {"a": "2"}


@statement
async def test_a_slash_in_a_key_is_written_as_tilde_1(api: Api) -> None:
    path = await api.node()
    await api.patch(path, {"metadata": {"labels": {"example.com/a": "1"}}})
    operation = [{"op": "remove", "path": "/metadata/labels/example.com~1a"}]
    shown = await api.patch(path, operation, content=JSON_PATCH)
    assert "example.com/a" not in shown["metadata"].get("labels", {})


@statement
async def test_a_patch_of_an_unknown_kind_is_415(api: Api) -> None:
    path = await api.config_map(a="1")
    status, reason, _ = await api.refused("PATCH", path, {"data": {}}, "application/json")
    assert (status, reason) == (415, "UnsupportedMediaType")


@statement
async def test_an_object_of_another_name_or_kind_is_400(api: Api) -> None:
    path = await api.config_map(a="1")
    other_name = {"metadata": {"name": "other"}}
    assert (await api.refused("PUT", path, other_name))[:2] == (400, "BadRequest")
    other_kind = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": api.name}}
    assert (await api.refused("PUT", path, other_kind))[:2] == (400, "BadRequest")


@statement
async def test_an_unknown_field_is_refused_on_request(api: Api) -> None:
    path = await api.node()
    patch = {"spec": {"unknown": 1}}
    strict = {"fieldValidation": "Strict"}
    status, reason, _ = await api.refused("PATCH", path, patch, STRATEGIC, **strict)
    assert (status, reason) == (422, "Invalid")


@statement
async def test_quantities_are_kept_in_canonical_form(api: Api) -> None:
    counts = {"cpu": "0.5", "memory": "1024Mi", "a.example/b": "5000", "a.example/c": "1500"}
    path = await api.node(status={"capacity": counts})
    shown = (await api.good("GET", path))["status"]["capacity"]
    assert shown == {"cpu": "500m", "memory": "1Gi", "a.example/b": "5k", "a.example/c": "1500"}


# Leases


def lease(holder: str, *, version: str = "", seconds: int = 15) -> Object:
    """Return a Lease without a name."""
    spec = {
        "holderIdentity": holder,
        "leaseDurationSeconds": seconds,
        "renewTime": "2026-11-22T10:00:00.123456Z",
        "leaseTransitions": 1,
    }
    metadata = {"resourceVersion": version} if version else {}
    return {"metadata": metadata, "spec": spec}


async def put(api: Api, wanted: Object) -> tuple[int, Object]:
    """Write a Lease with the name of the statement; return status and answer."""
    body = {**wanted, "metadata": {**wanted["metadata"], "name": api.name}}
    return await api.ask("PUT", f"{LEASES}/{api.name}", body)


@statement
async def test_a_lease_is_created_by_a_post_and_read_back_as_written(api: Api) -> None:
    wanted = lease("a")
    wanted["metadata"] = {"name": api.name}
    made = await api.make(LEASES, wanted)
    assert made["spec"] == wanted["spec"]
    assert (await api.refused("POST", LEASES, wanted))[:2] == (409, "AlreadyExists")


@statement
async def test_a_lease_is_created_by_a_put_too(api: Api) -> None:
    api.goes(f"{LEASES}/{api.name}")
    assert (await put(api, lease("a")))[0] == 201


@statement
async def test_a_lease_is_not_renewed_without_its_version(api: Api) -> None:
    api.goes(f"{LEASES}/{api.name}")
    await put(api, lease("a"))
    status, answer = await put(api, lease("b"))
    assert (status, answer["reason"]) == (422, "Invalid")
    assert "metadata.resourceVersion: Invalid value: " in answer["message"]
    assert "must be specified for an update" in answer["message"]


@statement
async def test_of_two_that_renew_a_lease_one_wins(api: Api) -> None:
    api.goes(f"{LEASES}/{api.name}")
    version = (await put(api, lease("a")))[1]["metadata"]["resourceVersion"]
    assert (await put(api, lease("b", version=version)))[0] == 200
    status, answer = await put(api, lease("c", version=version))
    text = f'Operation cannot be fulfilled on leases.coordination.k8s.io "{api.name}": {MODIFIED}'
    assert (status, answer["reason"], answer["message"]) == (409, "Conflict", text)
    assert (await api.good("GET", f"{LEASES}/{api.name}"))["spec"]["holderIdentity"] == "b"


@statement
async def test_a_lease_lasts_more_than_no_time(api: Api) -> None:
    api.goes(f"{LEASES}/{api.name}")
    status, answer = await put(api, lease("a", seconds=0))
    assert status == 422
    assert "spec.leaseDurationSeconds" in answer["message"]


# Events


def event(api: Api, namespace: str) -> Object:
    """Return an Event about a node, as the labeler writes it."""
    about = {"apiVersion": "v1", "kind": "Node", "name": api.name, "uid": api.name}
    at = "2026-11-22T10:00:00Z"
    return {
        "metadata": {"generateName": f"{api.name}.", "namespace": namespace},
        "involvedObject": about,
        "type": "Normal",
        "reason": "LabelsApplied",
        "message": "text",
        "source": {"component": "muster-labeler"},
        "reportingComponent": "muster-labeler",
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


@statement
async def test_an_event_about_a_node_is_in_default(api: Api) -> None:
    made = await api.make(f"{DEFAULT}/events", event(api, "default"))
    assert made["reason"] == "LabelsApplied"
    other = "/api/v1/namespaces/kube-public"
    status, reason, message = await api.refused(
        "POST", f"{other}/events", event(api, "kube-public")
    )
    assert (status, reason) == (422, "Invalid")
    assert "involvedObject.namespace: Invalid value: " in message


@statement
async def test_an_event_is_shown_in_both_groups(api: Api) -> None:
    made = await api.make(f"{DEFAULT}/events", event(api, "default"))
    path = f"/apis/events.k8s.io/v1/namespaces/default/events/{made['metadata']['name']}"
    shown = await api.good("GET", path)
    assert (shown["note"], shown["regarding"]["name"]) == ("text", api.name)
    assert shown["reportingController"] == "muster-labeler"
