"""The store: versions, lists, watches, sub-resources, refusals, limits."""

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.local.kubernetes import objects, refusals, resources, selectors, trees, writes

AT = "2026-11-01T10:00:00Z"
LEASES = resources.find("coordination.k8s.io", "v1", "leases")
NEW_EVENTS = resources.find("events.k8s.io", "v1", "events")
MERGE = writes.PatchFormat.MERGE
APPLY = writes.PatchFormat.APPLY


def new_store(**limits: int) -> objects.Store:
    return objects.Store(at=AT, version=100, limits=objects.Limits(**limits))


def at(
    resource: resources.Resource, name: str = "", namespace: str = "", subresource: str = ""
) -> resources.Place:
    if resource.namespaced and name and not namespace:
        namespace = "default"
    return resources.Place(
        resource=resource, name=name, namespace=namespace, subresource=subresource
    )


def write(place: resources.Place, manager: str = "tester") -> writes.Write:
    return writes.Write(place=place, manager=manager, at=AT, uid="uid-1", suffix="x7k2p")


def add(store: objects.Store, place: resources.Place, **body: trees.Json) -> trees.Tree:
    metadata = {**trees.object_at(body, "metadata"), "name": place.name}
    return store.create({**body, "metadata": metadata}, write(dataclasses.replace(place, name="")))


def change(store: objects.Store, place: resources.Place, **patch: trees.Json) -> trees.Tree:
    return store.patch(patch, MERGE, write(place))[0]


def labels(**labels: str) -> trees.Tree:
    return {"labels": dict(labels)}


def refused(code: int, text: str | None = None) -> pytest.RaisesExc[refusals.RequestError]:
    return pytest.raises(refusals.RequestError, match=text, check=lambda e: e.code == code)


def names(page: trees.Tree) -> list[str]:
    items = page["items"]
    assert isinstance(items, list)
    return [trees.string_at(item, "metadata", "name") for item in items if isinstance(item, dict)]


def summaries(events: list[trees.Tree]) -> list[tuple[str, str, str]]:
    return [
        (
            trees.string_at(event, "type"),
            trees.string_at(event, "object", "metadata", "name"),
            trees.string_at(event, "object", "metadata", "resourceVersion"),
        )
        for event in events
    ]


NODE = at(resources.NODES, "node-a")
POD = at(resources.PODS, "pod-a")
SPEC: trees.Tree = {"containers": [{"name": "c"}]}
NODES = objects.Selection(place=at(resources.NODES))


def test_a_new_object_gets_its_server_side_fields() -> None:
    # the status of a new object has no owner
    assert add(new_store(), NODE, spec={"taints": []}, status={"phase": "x"}) == {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {
            "name": "node-a",
            "uid": "uid-1",
            "creationTimestamp": AT,
            "resourceVersion": "105",
            "managedFields": [
                {
                    "manager": "tester",
                    "operation": "Update",
                    "apiVersion": "v1",
                    "time": AT,
                    "fieldsType": "FieldsV1",
                    "fieldsV1": {"f:spec": {"f:taints": {}}},
                }
            ],
        },
        "spec": {"taints": []},
        "status": {"phase": "x"},
    }


def test_a_generated_name_gets_a_suffix() -> None:
    body: trees.Tree = {"metadata": {"generateName": "gpu-"}, "involvedObject": {}}
    shown = new_store().create(body, write(at(resources.EVENTS, namespace="default")))
    assert trees.string_at(shown, "metadata", "name") == "gpu-x7k2p"


def test_a_patch_that_changes_nothing_keeps_the_version() -> None:
    store = new_store()
    before = add(store, NODE, metadata=labels(a="1"))
    assert change(store, NODE, metadata=labels(a="1")) == before
    assert store.version == 105
    change(store, NODE, metadata=labels(a="2"))
    assert store.version == 106


def test_a_write_with_an_old_version_is_a_conflict() -> None:
    store = new_store()
    old = add(store, NODE)
    change(store, NODE, metadata=labels(a="1"))
    with refused(409, "the object has been modified"):
        store.update(old, write(NODE))
    with refused(409, "the object has been modified"):
        change(store, NODE, metadata={"resourceVersion": "105"})
    with refused(422, 'metadata.uid: Invalid value: "other": field is immutable'):
        change(store, NODE, metadata={"uid": "other"})
    with refused(409, "UID in precondition"):
        store.update({"metadata": {"uid": "other"}}, write(NODE))


def test_a_name_can_be_taken_once() -> None:
    store = new_store()
    add(store, NODE)
    with refused(409, 'nodes "node-a" already exists') as error:
        add(store, NODE)
    assert error.value.reason is refusals.Reason.ALREADY_EXISTS


def test_a_lease_can_be_created_by_put_and_is_never_replaced_blindly() -> None:
    store = new_store()
    lease = at(LEASES, "leader")
    shown, created = store.update({"spec": {"holderIdentity": "a"}}, write(lease))
    assert created
    with refused(422, "must be specified for an update"):
        store.update({"spec": {"holderIdentity": "b"}}, write(lease))
    shown, created = store.update({**shown, "spec": {"holderIdentity": "b"}}, write(lease))
    assert (created, shown["spec"]) == (False, {"holderIdentity": "b"})
    with refused(404):
        store.update({}, write(NODE))


def test_the_main_resource_and_its_status_are_kept_apart() -> None:
    store = new_store()
    add(store, POD, spec=SPEC)
    status = at(resources.PODS, "pod-a", subresource="status")
    shown = change(store, POD, spec={"nodeName": "node-a"}, status={"phase": "Failed"})
    assert (shown["spec"], shown["status"]) == (
        {**SPEC, "nodeName": "node-a"},
        {"phase": "Pending"},
    )
    shown = change(store, status, spec={"nodeName": "b"}, status={"phase": "Running"})
    assert (shown["spec"], shown["status"]) == (
        {**SPEC, "nodeName": "node-a"},
        {"phase": "Running"},
    )
    shown = change(store, status, metadata=labels(seen="yes"))
    assert trees.value_at(shown, "metadata", "labels") == {"seen": "yes"}


def test_an_apply_creates_what_is_not_there_and_each_part_is_its_own_share() -> None:
    store = new_store()
    shown, created = store.patch({"metadata": labels(a="1")}, APPLY, write(NODE, "ann"))
    assert created
    status = at(resources.NODES, "node-a", subresource="status")
    gpu: trees.Tree = {"status": {"conditions": [{"type": "Gpu", "status": "True"}]}}
    shown, created = store.patch(gpu, APPLY, write(status, "ben"))
    assert not created
    assert shown["status"] == gpu["status"]
    with refused(409, r'conflict with "ben": .status.conditions'):
        gpu = {"status": {"conditions": [{"type": "Gpu", "status": "False"}]}}
        store.patch(gpu, APPLY, write(status, "ann"))
    shown, _ = store.patch({"metadata": {}}, APPLY, write(NODE, "ann"))
    assert "labels" not in trees.object_at(shown, "metadata")
    with refused(404):
        store.patch({}, APPLY, write(at(resources.NODES, "none", subresource="status")))


def test_the_fields_of_an_object_are_released_on_request() -> None:
    store = new_store()
    add(store, NODE, metadata=labels(a="1"))
    shown = change(store, NODE, metadata={"managedFields": []})
    assert "managedFields" not in trees.object_at(shown, "metadata")


def test_both_kinds_of_event_are_stored_as_one() -> None:
    store = new_store()
    add(store, at(resources.EVENTS, "e"), involvedObject={"name": "node-a"}, message="gone")
    page = store.page(objects.Selection(place=at(NEW_EVENTS)))
    assert page["kind"] == "EventList"
    (item,) = page["items"] if isinstance(page["items"], list) else []
    assert isinstance(item, dict)
    assert (item["regarding"], item["note"]) == ({"name": "node-a"}, "gone")
    about = objects.Selection(
        place=at(NEW_EVENTS), fields=selectors.fields("regarding.name=node-a")
    )
    assert names(store.page(about)) == ["e"]


@pytest.mark.parametrize(
    ("place", "body", "text"),
    [
        (NODE, {"metadata": labels(a="no spaces")}, "a valid label must be"),
        (NODE, {"metadata": labels(a="x" * 64)}, "must be no more than 63 bytes"),
        (NODE, {"metadata": {"labels": {"a": 1}}}, "expected a string"),
        (NODE, {"metadata": {"labels": {"-a": "1"}}}, "not a qualified name"),
        (NODE, {"metadata": {"labels": {"A_b/c": "1"}}}, "not a qualified name"),
        (NODE, {"metadata": {"annotations": {"a": "x" * 300_000}}}, "Too long"),
        (at(resources.NODES, "Node_A"), {}, "must be a DNS-1123 name"),
        (at(resources.NODES, ""), {}, "Required value"),
        (POD, {}, "spec.containers: Required value"),
        (
            at(resources.EVENTS, "e", namespace="kube-public"),
            {"involvedObject": {"kind": "Node", "name": "node-a"}},
            "does not match event.namespace",
        ),
    ],
)
def test_an_object_that_a_cluster_would_refuse_is_refused(
    place: resources.Place, body: trees.Tree, text: str
) -> None:
    with refused(422, text):
        add(new_store(), place, **body)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "text",
        {"metadata": []},
        {"metadata": {"name": 7}},
        {"metadata": {"name": "n", "labels": "x"}},
        {"metadata": {"name": "n"}, "kind": "Pod"},
        {"metadata": {"name": "n"}, "apiVersion": "v2"},
    ],
)
def test_a_body_of_the_wrong_shape_is_refused(body: trees.Json) -> None:
    with refused(400):
        new_store().create(body, write(at(resources.NODES)))


def test_an_object_needs_its_namespace_and_is_deleted_with_it() -> None:
    store = new_store()
    lease = at(LEASES, "l", namespace="gpu")
    with refused(404, 'namespaces "gpu" not found'):
        add(store, lease)
    add(store, at(resources.NAMESPACES, "gpu"))
    add(store, lease)
    store.delete(at(resources.NAMESPACES, "gpu"), None, dry_run=False)
    with refused(404, 'leases.coordination.k8s.io "l" not found'):
        store.get(lease)


def test_a_dry_run_answers_and_changes_nothing() -> None:
    store = new_store()
    before = add(store, NODE)
    dry = dataclasses.replace(write(NODE), dry_run=True)
    shown, _ = store.patch({"metadata": labels(a="1")}, MERGE, dry)
    assert trees.value_at(shown, "metadata", "labels") == {"a": "1"}
    store.delete(NODE, None, dry_run=True)
    assert (store.get(NODE), store.version) == (before, 105)


def test_a_delete_with_preconditions_is_only_for_that_object() -> None:
    store = new_store()
    add(store, NODE)
    with refused(409, "uid is not other"):
        store.delete(NODE, {"preconditions": {"uid": "other"}}, dry_run=False)
    store.delete(NODE, {"preconditions": {"uid": "uid-1"}}, dry_run=False)
    with refused(404):
        store.get(NODE)


def test_pages_show_the_objects_as_they_were_when_the_first_was_made() -> None:
    store = new_store()
    for name in "abcde":
        add(store, at(resources.NODES, name))
    first = store.page(NODES, limit=2)
    assert (names(first), trees.value_at(first, "metadata", "remainingItemCount")) == (
        ["a", "b"],
        3,
    )
    store.delete(at(resources.NODES, "c"), None, dry_run=False)
    add(store, at(resources.NODES, "cc"))
    token = trees.string_at(first, "metadata", "continue")
    rest = store.page(NODES, limit=9, token=token)
    assert names(rest) == ["c", "d", "e"]
    assert rest["metadata"] == {
        "resourceVersion": trees.string_at(first, "metadata", "resourceVersion")
    }
    assert names(store.page(NODES)) == ["a", "b", "cc", "d", "e"]
    store.compact()
    with refused(410):
        store.page(NODES, token=token)
    for nonsense in ("x", "é", "e30=", "bm90IGpzb24="):
        with refused(400):
            store.page(NODES, token=nonsense)


def test_a_watch_sends_each_change_in_order() -> None:
    store = new_store()
    add(store, NODE)
    change(store, NODE, metadata=labels(a="1"))
    add(store, POD, spec=SPEC)
    store.delete(NODE, None, dry_run=False)
    assert summaries(store.since(NODES, 104)) == [
        ("ADDED", "node-a", "105"),
        ("MODIFIED", "node-a", "106"),
        ("DELETED", "node-a", "108"),
    ]
    assert summaries(store.since(NODES, 106)) == [("DELETED", "node-a", "108")]
    assert store.since(NODES, 108) == []


def test_an_object_that_leaves_a_selector_is_sent_as_deleted() -> None:
    store = new_store()
    gpus = dataclasses.replace(NODES, labels=selectors.labels("gpu"))
    add(store, NODE)
    for gpu in ("h100", "h200", None):
        change(store, NODE, metadata={"labels": {"gpu": gpu}})
    events = store.since(gpus, 105)
    assert summaries(events) == [
        ("ADDED", "node-a", "106"),
        ("MODIFIED", "node-a", "107"),
        ("DELETED", "node-a", "108"),
    ]
    assert trees.value_at(events[-1], "object", "metadata", "labels") == {"gpu": "h200"}
    assert store.initial(gpus) == []


def test_a_watch_gets_its_own_namespace_only() -> None:
    store = new_store()
    add(store, at(LEASES, "one"))
    add(store, at(LEASES, "two", namespace="kube-system"))
    here = objects.Selection(place=at(LEASES, namespace="kube-system"))
    everywhere = objects.Selection(place=at(LEASES))
    assert summaries(store.since(here, 104)) == [("ADDED", "two", "106")]
    assert summaries(store.initial(everywhere)) == [
        ("ADDED", "one", "105"),
        ("ADDED", "two", "106"),
    ]


def test_a_version_that_the_log_does_not_have_is_expired() -> None:
    store = new_store(log_max=4, log_drop=2)
    add(store, NODE)
    assert summaries(store.since(NODES, 104)) == [("ADDED", "node-a", "105")]
    for version in (101, 200):
        with refused(410, "too old resource version"):
            store.since(NODES, version)


def test_the_store_is_bounded() -> None:
    store = new_store(objects_max=6, events_max=2, object_bytes_max=500)
    for name in ("one", "two", "three"):
        add(store, at(resources.EVENTS, name), involvedObject={"name": "node-a"})
    events = objects.Selection(place=at(resources.EVENTS))
    assert names(store.page(events)) == ["three", "two"]
    with refused(403, "holds 6 objects"):
        add(store, NODE)
    with refused(413):
        change(store, at(resources.EVENTS, "two"), message="x" * 500)


@pytest.mark.parametrize(
    "path",
    [
        "api",
        "api/v1",
        "api/v2/nodes",
        "apis/apps/v1",
        "apis/apps/v1/nodes",
        "api/v1/nodes/a/b",
        "api/v1/nodes/a/status/x",
        "api/v1/pods/a",
        "api/v1/namespaces/x/nodes",
        "api/v1/namespaces/x/configmaps/c/status",
        "api/v1/namespaces//pods",
        "x",
    ],
)
def test_an_unknown_path_is_not_found(path: str) -> None:
    with refused(404):
        resources.place(path.split("/"))


NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "label", "delete"]), NAMES, st.sampled_from("xy")),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, started=st.integers(0, 20))
def test_a_list_and_then_a_watch_give_the_current_objects(
    steps: list[tuple[str, str, str]], started: int
) -> None:
    store = new_store()
    chosen = dataclasses.replace(NODES, labels=selectors.labels("l in (x)"))
    replayed_objects: dict[str, trees.Tree] = {}
    since = store.version
    for step, (what, name, value) in enumerate(steps):
        if step == started:
            replayed_objects = replayed({}, store.initial(chosen))
            since = store.version
        try:
            take(store, at(resources.NODES, name), what, value)
        except refusals.RequestError as error:
            assert error.code in {404, 409}  # noqa: PT017 - there already, or not there
    replayed_objects = replayed(replayed_objects, store.since(chosen, since))
    listed = store.page(chosen)["items"]
    assert list(dict(sorted(replayed_objects.items())).values()) == listed


def take(store: objects.Store, place: resources.Place, what: str, value: str) -> None:
    match what:
        case "add":
            add(store, place, metadata=labels(l=value))
        case "label":
            change(store, place, metadata=labels(l=value))
        case _:
            store.delete(place, None, dry_run=False)


def replayed(
    objects_by_key: Mapping[str, trees.Tree], events: list[trees.Tree]
) -> dict[str, trees.Tree]:
    now = dict(objects_by_key)
    for event in events:
        stored = trees.without(trees.object_at(event, "object"), "kind", "apiVersion")
        name = trees.string_at(stored, "metadata", "name")
        if event["type"] == "DELETED":
            del now[name]
        else:
            assert (name in now) == (event["type"] == "MODIFIED")
            now[name] = stored
    return now


NAMED = (
    "metadata",
    "labels",
    "status",
    "conditions",
    "type",
    "spec",
    "containers",
    "managedFields",
)
MEANT = ("$patch", "$retainKeys", "op", "path", "value", "uid", "name", "resourceVersion", "kind")
FIELDS = st.sampled_from([*NAMED, *MEANT, "finalizers"])
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from(["", "add", "/metadata", "delete"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(FIELDS, ANYTHING, max_size=4) | ANYTHING


@settings(max_examples=100, deadline=None)
@given(
    body=OBJECTS,
    patch=OBJECTS,
    patch_format=st.sampled_from(writes.PatchFormat),
    subresource=st.sampled_from(["", "status"]),
)
def test_any_body_is_accepted_or_refused_with_a_reason(
    body: trees.Json, patch: trees.Json, patch_format: writes.PatchFormat, subresource: str
) -> None:
    store = new_store()
    add(store, POD, spec=SPEC)
    place = at(resources.PODS, "pod-a", subresource=subresource)
    for request in (
        lambda: store.create(body, write(at(resources.PODS, namespace="default"))),
        lambda: store.update(body, write(place)),
        lambda: store.patch(patch, patch_format, write(place)),
        lambda: store.patch(body, patch_format, write(place, "other")),
        lambda: store.delete(place, body, dry_run=False),
    ):
        try:
            request()
        except refusals.RequestError as error:
            assert error.code in {400, 404, 409, 422}  # noqa: PT017 - each with its reason
