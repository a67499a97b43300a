"""Statements about a Kubernetes API: lists, pages, selectors and watches."""

import asyncio
from typing import Final

import pytest

from tests.worlds.api_statements import (
    DEFAULT,
    NODES,
    Api,
    Object,
    statement,
    until,
)

CONFIG_MAPS: Final = f"{DEFAULT}/configmaps"


async def three(api: Api) -> str:
    """Create three ConfigMaps; return the selector of their label."""
    for name in "abc":
        metadata = {"name": f"{api.name}-{name}", "labels": {"statement": api.name}}
        await api.make(CONFIG_MAPS, {"metadata": metadata, "data": {"of": name}})
    return f"statement={api.name}"


def names(listed: Object) -> list[str]:
    """Return the last letters of the names of a list."""
    return [item["metadata"]["name"][-1] for item in listed["items"]]


def seen(events: list[Object]) -> list[tuple[str, str]]:
    """Return the kind of each event and the last letter of its object's name."""
    named = [event for event in events if event["type"] != "BOOKMARK"]
    return [(event["type"], event["object"]["metadata"]["name"][-1]) for event in named]


@statement
async def test_a_list_is_ordered_by_name_and_has_a_version(api: Api) -> None:
    listed = await api.good("GET", CONFIG_MAPS, labelSelector=await three(api))
    assert (listed["kind"], names(listed)) == ("ConfigMapList", ["a", "b", "c"])
    assert int(listed["metadata"]["resourceVersion"]) > 0


@statement
async def test_items_of_a_list_do_not_repeat_their_kind(api: Api) -> None:
    listed = await api.good("GET", CONFIG_MAPS, labelSelector=await three(api))
    assert not listed["items"][0].keys() & {"kind", "apiVersion"}


@statement
async def test_a_list_comes_in_pages_of_one_version(api: Api) -> None:
    of = {"labelSelector": await three(api), "limit": "2"}
    first = await api.good("GET", CONFIG_MAPS, **of)
    assert names(first) == ["a", "b"]
    # an object that is removed meanwhile is in the next page nevertheless
    await api.good("DELETE", f"{CONFIG_MAPS}/{api.name}-c")
    token = first["metadata"]["continue"]
    second = await api.good("GET", CONFIG_MAPS, **of, **{"continue": token})
    assert names(second) == ["c"]
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert "continue" not in second["metadata"]


@statement
async def test_a_bad_page_token_is_refused(api: Api) -> None:
    refused = await api.refused("GET", CONFIG_MAPS, limit="2", **{"continue": "bad"})
    assert refused[:2] == (400, "BadRequest")


@statement
async def test_a_list_of_version_0_is_answered(api: Api) -> None:
    of = {"labelSelector": await three(api), "resourceVersion": "0"}

    async def listed() -> bool:
        # such a list may be a moment old
        return names(await api.good("GET", CONFIG_MAPS, **of)) == ["a", "b", "c"]

    await until("the three", listed)


@statement
async def test_an_unknown_namespace_has_empty_lists(api: Api) -> None:
    assert (await api.good("GET", f"/api/v1/namespaces/{api.name}/pods"))["items"] == []


@statement
async def test_labels_are_selected_by_value_set_and_presence(api: Api) -> None:
    path = await api.node(statement=api.name, pool="a")
    assert path
    for selector, count in (
        ("pool=a", 1),
        ("pool!=a", 0),
        ("pool in (a,b)", 1),
        ("pool notin (a)", 0),
        ("pool", 1),
        ("!pool", 0),
    ):
        of = f"statement={api.name},{selector}"
        assert len((await api.good("GET", NODES, labelSelector=of))["items"]) == count, selector


@statement
async def test_a_bad_label_selector_is_refused(api: Api) -> None:
    refused = await api.refused("GET", NODES, labelSelector="a in b")
    assert refused[:2] == (400, "BadRequest")


@statement
async def test_pods_are_selected_by_their_node_and_phase(api: Api) -> None:
    spec = {"containers": [{"name": "c", "image": "i"}], "nodeName": api.name}
    await api.make(f"{DEFAULT}/pods", {"metadata": {"name": api.name}, "spec": spec})
    for selector, count in (
        (f"spec.nodeName={api.name}", 1),
        (f"spec.nodeName={api.name},status.phase!=Pending", 0),
        (f"spec.nodeName={api.name},status.phase=Pending", 1),
        (f"metadata.name={api.name}", 1),
    ):
        listed = await api.good("GET", "/api/v1/pods", fieldSelector=selector)
        assert len(listed["items"]) == count, selector


@statement
async def test_a_field_that_cannot_be_selected_is_refused(api: Api) -> None:
    status, reason, message = await api.refused("GET", NODES, fieldSelector="spec.x=1")
    assert (status, reason) == (400, "BadRequest")
    assert "field label not supported: spec.x" in message


# Watches


@statement
async def test_a_watch_without_a_version_begins_with_what_is_there(api: Api) -> None:
    selector = await three(api)
    events = await api.watch(CONFIG_MAPS, seconds=1, labelSelector=selector)
    assert seen(events) == [("ADDED", "a"), ("ADDED", "b"), ("ADDED", "c")]


@statement
async def test_a_watch_from_a_version_gives_what_came_after_it_in_order(api: Api) -> None:
    selector = await three(api)
    listed = await api.good("GET", CONFIG_MAPS, labelSelector=selector)
    path = f"{CONFIG_MAPS}/{api.name}"
    await api.patch(f"{path}-b", {"data": {"of": "x"}})
    await api.good("DELETE", f"{path}-a")
    await api.patch(f"{path}-c", {"metadata": {"labels": {"statement": "other"}}})
    of = {"labelSelector": selector, "resourceVersion": listed["metadata"]["resourceVersion"]}
    events = await api.watch(CONFIG_MAPS, seconds=1, **of)
    # an object that no longer matches is DELETED, as it last matched, with the new version
    assert seen(events) == [("MODIFIED", "b"), ("DELETED", "a"), ("DELETED", "c")]
    assert events[2]["object"]["metadata"]["labels"] == {"statement": api.name}
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(versions)
    assert versions[0] > int(of["resourceVersion"])


@statement
async def test_a_watch_sees_what_happens_while_it_is_open(api: Api) -> None:
    path = await api.config_map(a="1")
    version = (await api.good("GET", path))["metadata"]["resourceVersion"]
    of = {"fieldSelector": f"metadata.name={api.name}", "resourceVersion": version}
    watch = asyncio.create_task(api.watch(CONFIG_MAPS, seconds=2, **of))
    await api.patch(path, {"data": {"a": "2"}})
    events = await watch
    assert [(event["type"], event["object"]["data"]) for event in events] == [
        ("MODIFIED", {"a": "2"})
    ]
    assert events[0]["object"]["kind"] == "ConfigMap"


@statement
async def test_a_watch_ends_by_itself_after_its_time(api: Api) -> None:
    began = asyncio.get_running_loop().time()
    events = await api.watch(CONFIG_MAPS, seconds=2, fieldSelector=f"metadata.name={api.name}")
    assert events == []
    assert 1.5 < asyncio.get_running_loop().time() - began < 10


@statement
async def test_a_watch_from_a_version_that_is_forgotten_says_410(api: Api) -> None:
    leases = "/apis/coordination.k8s.io/v1/leases"
    events = await api.watch(leases, seconds=1, resourceVersion="1")
    if api.kind == "real" and events[0]["type"] != "ERROR":
        pytest.skip("this server is so young that it has not forgotten anything yet")
    assert [event["type"] for event in events] == ["ERROR"]
    said = events[0]["object"]
    assert (said["kind"], said["code"], said["reason"]) == ("Status", 410, "Expired")
    assert said["message"].startswith("too old resource version: 1 (")


@statement
async def test_a_watch_with_bookmarks_gets_one_before_it_ends(api: Api) -> None:
    selector = await three(api)
    listed = await api.good("GET", CONFIG_MAPS, labelSelector=selector)
    version = listed["metadata"]["resourceVersion"]
    of = {"labelSelector": selector, "resourceVersion": version, "allowWatchBookmarks": "true"}
    watch = asyncio.create_task(api.watch(CONFIG_MAPS, seconds=4, **of))
    # a real server sends no bookmark as long as nothing changes anywhere
    other = await api.config_map(a="0")
    number = 0
    while not watch.done():
        number += 1
        await api.patch(other, {"data": {"a": str(number)}})
        await asyncio.wait([watch], timeout=0.2)
    events = await watch
    assert {event["type"] for event in events} == {"BOOKMARK"}
    bookmark = events[-1]["object"]
    assert bookmark["kind"] == "ConfigMap"
    assert int(bookmark["metadata"]["resourceVersion"]) > int(version)
    # a watch can continue from there
    of["resourceVersion"] = bookmark["metadata"]["resourceVersion"]
    assert seen(await api.watch(CONFIG_MAPS, seconds=1, **of)) == []


@statement
async def test_a_watch_can_begin_with_a_list_that_a_bookmark_ends(api: Api) -> None:
    of = {
        "labelSelector": await three(api),
        "sendInitialEvents": "true",
        "allowWatchBookmarks": "true",
        "resourceVersionMatch": "NotOlderThan",
    }
    events = await api.watch(CONFIG_MAPS, seconds=1, **of)
    assert seen(events) == [("ADDED", "a"), ("ADDED", "b"), ("ADDED", "c")]
    assert events[3]["type"] == "BOOKMARK"
    marks = events[3]["object"]["metadata"]["annotations"]
    assert marks == {"k8s.io/initial-events-end": "true"}


@statement
async def test_a_watch_of_one_node_is_by_its_name(api: Api) -> None:
    await api.node(os="linux")
    events = await api.watch(NODES, seconds=1, fieldSelector=f"metadata.name={api.name}")
    assert {event["object"]["metadata"]["name"] for event in events} == {api.name}
