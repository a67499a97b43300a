"""Statements about a Kubernetes API: server-side apply, and who owns which field."""

from muster.kubernetes import api as kubernetes_api
from tests.worlds.api_statements import (
    Api,
    Object,
    condition,
    owners,
    statement,
    types,
)


def data(**values: str) -> Object:
    """Return the body of an apply that sets data of a ConfigMap."""
    return {"data": values}


def labels(**values: str) -> Object:
    """Return the body of an apply that sets labels."""
    return {"metadata": {"labels": values}}


@statement
async def test_an_apply_creates_what_is_not_there(api: Api) -> None:
    path = f"/api/v1/namespaces/default/configmaps/{api.name}"
    api.goes(path)
    status, shown = await api.apply(path, data(a="1"))
    assert (status, shown["data"]) == (201, {"a": "1"})
    assert owners(shown) == {"applier Apply": {"f:data": {"f:a": {}}}}


@statement
async def test_an_apply_of_an_object_that_is_gone_is_a_conflict(api: Api) -> None:
    path = f"/api/v1/nodes/{api.name}"
    status, answer = await api.apply(path, {"metadata": {"uid": "gone", "labels": {"a": "b"}}})
    assert (status, answer["reason"]) == (409, "Conflict")
    assert (
        "uid mismatch: the provided object specified uid gone, and no existing object was found"
        in answer["message"]
    )
    assert (await api.ask("GET", path))[0] == 404


@statement
async def test_an_apply_to_another_object_of_the_name_is_refused(api: Api) -> None:
    path = await api.node()
    other = {"metadata": {"uid": "other", "labels": {"a": "b"}}}
    text = f'Node "{api.name}" is invalid: metadata.uid: Invalid value: "other": field is immutable'
    for below in ("", "/status"):
        status, answer = await api.apply(path + below, other)
        assert (status, answer["message"]) == (422, text)


@statement
async def test_an_apply_names_its_manager(api: Api) -> None:
    path = await api.config_map(a="1")
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": api.name}}
    status, reason, message = await api.refused("PATCH", path, body, kubernetes_api.APPLY)
    assert (status, reason) == (422, "Invalid")
    assert "fieldManager: Required value: is required for apply patch" in message


@statement
async def test_an_apply_is_not_about_owners(api: Api) -> None:
    path = await api.config_map(a="1")
    shown = await api.good("GET", path)
    managed = {"metadata": {"managedFields": shown["metadata"]["managedFields"]}}
    status, answer = await api.apply(path, managed)
    assert (status, "metadata.managedFields must be nil" in answer["message"]) == (400, True)


@statement
async def test_a_conflict_names_the_owner_and_the_field(api: Api) -> None:
    path = await api.node(a="1")
    status, answer = await api.apply(path, labels(a="2"))
    assert (status, answer["reason"]) == (409, "Conflict")
    text = 'Apply failed with 1 conflict: conflict with "kubelet" using v1: .metadata.labels.a'
    assert answer["message"] == text
    assert answer["details"]["causes"] == [
        {
            "reason": "FieldManagerConflict",
            "message": 'conflict with "kubelet" using v1',
            "field": ".metadata.labels.a",
        }
    ]


@statement
async def test_a_conflict_over_two_fields_names_both(api: Api) -> None:
    path = await api.node(a="1", b="1")
    status, answer = await api.apply(path, labels(a="2", b="2"))
    text = (
        'Apply failed with 2 conflicts: conflicts with "kubelet" using v1:\n'
        "- .metadata.labels.a\n- .metadata.labels.b"
    )
    assert (status, answer["message"]) == (409, text)


@statement
async def test_a_conflict_with_two_owners_names_both(api: Api) -> None:
    path = await api.node(a="1")
    assert (await api.apply(path, labels(b="1"), "other"))[0] == 200
    status, answer = await api.apply(path, labels(a="2", b="2"))
    text = (
        'Apply failed with 2 conflicts: conflicts with "kubelet" using v1:\n'
        '- .metadata.labels.a\nconflicts with "other":\n- .metadata.labels.b'
    )
    assert (status, answer["message"]) == (409, text)


@statement
async def test_a_conflict_over_a_condition_names_it_by_type(api: Api) -> None:
    path = f"{await api.node(os='linux')}/status"
    await api.patch(path, {"status": {"conditions": [condition("Gpu")]}}, "kubelet")
    wanted = {"status": {"conditions": [{"type": "Gpu", "status": "False"}]}}
    status, answer = await api.apply(path, wanted)
    text = (
        'Apply failed with 1 conflict: conflict with "kubelet" with subresource "status" using v1: '
        '.status.conditions[type="Gpu"].status'
    )
    assert (status, answer["message"]) == (409, text)


@statement
async def test_a_forced_apply_takes_the_field(api: Api) -> None:
    path = await api.node(manager="editor", a="1", b="1")
    status, shown = await api.apply(path, labels(a="2"), force=True)
    assert (status, shown["metadata"]["labels"]["a"]) == (200, "2")
    owned = owners(shown)
    assert owned["applier Apply"] == {"f:metadata": {"f:labels": {"f:a": {}}}}
    assert "f:a" not in owned["editor Update"]["f:metadata"]["f:labels"]


@statement
async def test_what_two_apply_alike_has_two_owners_and_stays_until_both_drop_it(api: Api) -> None:
    path = await api.config_map(kept="1")
    await api.apply(path, data(a="1"), "first")
    status, shown = await api.apply(path, data(a="1"), "second")
    assert status == 200
    named: Object = {"f:data": {"f:a": {}}}
    assert (owners(shown)["first Apply"], owners(shown)["second Apply"]) == (named, named)
    assert (await api.apply(path, {}, "first"))[1]["data"] == {"kept": "1", "a": "1"}
    assert (await api.apply(path, {}, "second"))[1]["data"] == {"kept": "1"}


@statement
async def test_what_somebody_else_wrote_with_the_same_value_is_no_conflict(api: Api) -> None:
    path = await api.node(a="1")
    status, shown = await api.apply(path, labels(a="1"))
    assert status == 200
    assert "f:a" in owners(shown)["kubelet Update"]["f:metadata"]["f:labels"]
    # the label stays when the applier gives it up
    assert (await api.apply(path, {}))[1]["metadata"]["labels"]["a"] == "1"


@statement
async def test_a_field_that_is_not_applied_again_is_removed(api: Api) -> None:
    path = await api.node(kept="1")
    await api.apply(path, labels(a="1", b="1"))
    shown = (await api.apply(path, labels(b="1")))[1]
    assert shown["metadata"]["labels"].keys() & {"a", "b", "kept"} == {"b", "kept"}


@statement
async def test_labels_and_annotations_of_one_manager_are_one_entry(api: Api) -> None:
    path = await api.node(os="linux")
    wanted = {"metadata": {"labels": {"a": "1"}, "annotations": {"b": "2"}}}
    shown = (await api.apply(path, wanted))[1]
    assert owners(shown)["applier Apply"] == {
        "f:metadata": {"f:labels": {"f:a": {}}, "f:annotations": {"f:b": {}}}
    }


@statement
async def test_an_update_takes_a_field_from_who_applied_it(api: Api) -> None:
    path = await api.config_map(kept="1")
    await api.apply(path, data(a="1"))
    shown = await api.patch(path, data(a="2"), "editor")
    assert "applier Apply" not in owners(shown)
    assert owners(shown)["editor Update"]["f:data"].keys() >= {"f:a", "f:kept"}
    status, answer = await api.apply(path, data(a="1"))
    assert (status, answer["reason"]) == (409, "Conflict")


@statement
async def test_applying_the_same_twice_changes_nothing(api: Api) -> None:
    path = await api.config_map(kept="1")
    first = (await api.apply(path, data(a="1")))[1]
    assert (await api.apply(path, data(a="1")))[1] == first


@statement
async def test_each_subresource_has_an_entry_of_its_own(api: Api) -> None:
    path = await api.node(os="linux")
    await api.apply(path, labels(a="1"))
    wanted = {"status": {"conditions": [condition("Gpu")]}}
    shown = (await api.apply(f"{path}/status", wanted))[1]
    owned = owners(shown)
    assert owned["applier Apply"] == {"f:metadata": {"f:labels": {"f:a": {}}}}
    (item,) = owned["applier Apply status"]["f:status"]["f:conditions"]
    assert item == 'k:{"type":"Gpu"}'
    # giving up the label leaves the condition
    assert types((await api.apply(path, {}))[1]) == ["Gpu"]


@statement
async def test_an_applied_condition_leaves_the_others(api: Api) -> None:
    path = await api.node(os="linux", status={"conditions": [condition("Ready")]})
    wanted = {"status": {"conditions": [condition("Gpu")]}}
    shown = (await api.apply(f"{path}/status", wanted))[1]
    assert sorted(types(shown)) == ["Gpu", "Ready"]


@statement
async def test_who_creates_a_node_owns_nothing_of_its_status(api: Api) -> None:
    path = await api.node(os="linux", status={"conditions": [condition("Ready")]})
    owned = owners(await api.good("GET", path))
    assert "f:status" not in owned["kubelet Update"]


@statement
async def test_a_heartbeat_owns_the_time_of_a_condition_only(api: Api) -> None:
    path = await api.node(os="linux", status={"conditions": [condition("Ready")]})
    beat = {"type": "Ready", "lastHeartbeatTime": "2026-11-22T11:00:00Z"}
    shown = await api.patch(f"{path}/status", {"status": {"conditions": [beat]}}, "kubelet")
    assert owners(shown)["kubelet Update status"] == {
        "f:status": {"f:conditions": {'k:{"type":"Ready"}': {"f:lastHeartbeatTime": {}}}}
    }


@statement
async def test_giving_up_the_only_owned_part_of_a_status_takes_along_what_nobody_owns(
    api: Api,
) -> None:
    status = {"capacity": {"cpu": "1"}, "conditions": [condition("Ready")]}
    path = f"{await api.node(os='linux', status=status)}/status"
    await api.apply(path, {"status": {"conditions": [condition("Gpu")]}})
    shown = (await api.apply(path, {}))[1]
    assert (types(shown), shown.get("status", {}).get("capacity")) == ([], None)


@statement
async def test_giving_up_a_condition_leaves_the_others_once_the_kubelet_owns_one(api: Api) -> None:
    status = {"capacity": {"cpu": "1"}, "conditions": [condition("Ready"), condition("Disk")]}
    path = f"{await api.node(os='linux', status=status)}/status"
    beat = condition("Ready", lastHeartbeatTime="2026-11-22T11:00:00Z")
    await api.patch(path, {"status": {"conditions": [beat]}}, "kubelet")
    await api.apply(path, {"status": {"conditions": [condition("Gpu")]}})
    shown = (await api.apply(path, {}))[1]
    assert (types(shown), shown["status"]["capacity"]) == (["Ready", "Disk"], {"cpu": "1"})


@statement
async def test_a_removed_condition_has_no_owner_any_more(api: Api) -> None:
    path = f"{await api.node(os='linux', status={'conditions': [condition('Ready')]})}/status"
    await api.apply(path, {"status": {"conditions": [condition("Gpu")]}})
    gone = {"status": {"conditions": [{"$patch": "delete", "type": "Gpu"}]}}
    shown = await api.patch(path, gone, "applier")
    assert types(shown) == ["Ready"]
    assert "applier Apply status" not in owners(shown)


@statement
async def test_owners_can_be_forgotten_and_then_no_update_is_tracked(api: Api) -> None:
    path = await api.config_map(a="1")
    shown = await api.patch(
        path, {"metadata": {"managedFields": [{}]}}, content=kubernetes_api.MERGE
    )
    assert owners(shown) == {}
    assert owners(await api.patch(path, data(a="2"))) == {}


@statement
async def test_an_apply_finds_one_owner_of_what_has_none(api: Api) -> None:
    path = await api.config_map(a="1")
    await api.patch(path, {"metadata": {"managedFields": [{}]}}, content=kubernetes_api.MERGE)
    status, answer = await api.apply(path, data(a="2"))
    text = 'Apply failed with 1 conflict: conflict with "before-first-apply" using v1: .data.a'
    assert (status, answer["message"]) == (409, text)
    shown = (await api.apply(path, data(b="1")))[1]
    assert owners(shown)["applier Apply"] == {"f:data": {"f:b": {}}}
    assert "f:a" in owners(shown)["before-first-apply Update"]["f:data"]


@statement
async def test_who_creates_a_map_or_a_list_owns_it_too(api: Api) -> None:
    shown = await api.good("GET", await api.config_map(a="1"))
    assert owners(shown) == {"editor Update": {"f:data": {".": {}, "f:a": {}}}}


@statement
async def test_a_manager_is_dated_by_its_own_last_change(api: Api) -> None:
    path = await api.config_map(a="1")
    before = {entry["manager"]: entry["time"] for entry in await managed(api, path)}
    await api.patch(path, data(b="1"), "other")
    after = {entry["manager"]: entry["time"] for entry in await managed(api, path)}
    assert after.keys() == {"editor", "other"}
    assert after["editor"] == before["editor"]


@statement
async def test_a_writer_without_a_name_is_called_after_its_program(api: Api) -> None:
    made = {"metadata": {"name": api.name}, "data": {"a": "1"}}
    await api.make("/api/v1/namespaces/default/configmaps", made)
    (entry,) = await managed(api, f"/api/v1/namespaces/default/configmaps/{api.name}")
    assert entry["manager"] not in {"", "unknown"}


async def managed(api: Api, path: str) -> list[Object]:
    """Return the managed fields of an object."""
    entries: list[Object] = (await api.good("GET", path))["metadata"]["managedFields"]
    return entries
