"""Patches, selectors and the ownership of fields."""

import dataclasses
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muster.local.kubernetes import ownership, refusals, selectors, trees

few = settings(max_examples=40, deadline=None)
NAMES = st.sampled_from(["a", "b", "c", "conditions", "type"])
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(NAMES, JSON, max_size=4)


@few
@given(target=JSON, patch=JSON)
def test_merging_twice_is_merging_once(target: trees.Json, patch: trees.Json) -> None:
    once = trees.merge(target, patch)
    assert trees.merge(once, patch) == once


@few
@given(target=OBJECTS)
def test_an_empty_patch_changes_nothing(target: trees.Tree) -> None:
    assert trees.merge(target, {}) == target
    assert trees.strategic(target, {}) == target
    assert trees.json_patch(target, []) == target


@few
@given(target=OBJECTS, patch=OBJECTS)
def test_a_patch_never_changes_its_input(target: trees.Tree, patch: trees.Tree) -> None:
    before = orjson.dumps([target, patch])
    trees.merge(target, patch)
    try:
        trees.strategic(target, patch)
    except refusals.RequestError as error:
        assert error.code == 400  # noqa: PT017 - an item without its merge key
    assert orjson.dumps([target, patch]) == before


def conditions(**states: str) -> trees.Json:
    return [{"type": kind, "status": status} for kind, status in states.items()]


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        (
            {"status": {"conditions": conditions(Ready="True", Disk="False")}},
            {"status": {"conditions": conditions(Disk="True", Gpu="True")}},
            {"status": {"conditions": conditions(Ready="True", Disk="True", Gpu="True")}},
        ),
        (
            {"conditions": conditions(Ready="True", Disk="False")},
            {"conditions": [{"type": "Ready", "$patch": "delete"}]},
            {"conditions": conditions(Disk="False")},
        ),
        (
            {"conditions": conditions(Ready="True")},
            {"conditions": [{"$patch": "replace"}, *(conditions(Disk="False") or [])]},  # type: ignore[misc]
            {"conditions": conditions(Disk="False")},
        ),
        (
            {"addresses": [{"type": "Hostname", "address": "a"}]},
            {"addresses": [{"type": "Hostname", "address": "b"}], "$setElementOrder/addresses": []},
            {"addresses": [{"type": "Hostname", "address": "b"}]},
        ),
        # no patchMergeKey in k8s.io/api/core/v1/types.go: the whole list is replaced
        (
            {"spec": {"taints": [{"key": "a"}, {"key": "b"}]}},
            {"spec": {"taints": [{"key": "c"}]}},
            {"spec": {"taints": [{"key": "c"}]}},
        ),
        ({"labels": {"a": "1", "b": "2"}}, {"labels": {"a": None}}, {"labels": {"b": "2"}}),
        ({"spec": {"a": 1, "b": 2}}, {"spec": {"$patch": "replace", "c": 3}}, {"spec": {"c": 3}}),
        ({"spec": {"a": 1}, "b": 2}, {"spec": {"$patch": "delete"}}, {"spec": {}, "b": 2}),
        ({"a": 1, "b": 2}, {"$retainKeys": ["a", "c"], "c": 3}, {"a": 1, "c": 3}),
        ({"finalizers": ["x"]}, {"finalizers": ["x", "y"]}, {"finalizers": ["x", "y"]}),
        (
            {"finalizers": ["x", "y"]},
            {"$deleteFromPrimitiveList/finalizers": ["x"]},
            {"finalizers": ["y"]},
        ),
    ],
)
def test_a_strategic_patch_merges_lists_by_their_key(
    target: trees.Tree, patch: trees.Tree, result: trees.Tree
) -> None:
    assert trees.strategic(target, patch) == result


@pytest.mark.parametrize(
    ("operations", "result"),
    [
        ([{"op": "add", "path": "/m/x~1y", "value": "1"}], {"m": {"x/y": "1"}, "l": [1, 2]}),
        ([{"op": "add", "path": "/l/0", "value": 0}], {"m": {}, "l": [0, 1, 2]}),
        ([{"op": "add", "path": "/l/-", "value": 3}], {"m": {}, "l": [1, 2, 3]}),
        ([{"op": "replace", "path": "/l/1", "value": 9}], {"m": {}, "l": [1, 9]}),
        ([{"op": "remove", "path": "/l/0"}], {"m": {}, "l": [2]}),
        ([{"op": "remove", "path": "/l"}], {"m": {}}),
        ([{"op": "test", "path": "/l", "value": [1, 2]}], {"m": {}, "l": [1, 2]}),
        ([{"op": "move", "from": "/l", "path": "/m/l"}], {"m": {"l": [1, 2]}}),
        ([{"op": "replace", "path": "", "value": {}}], {}),
    ],
)
def test_a_json_patch_does_its_operations_in_order(
    operations: trees.Json, result: trees.Json
) -> None:
    assert trees.json_patch({"m": {}, "l": [1, 2]}, operations) == result


@pytest.mark.parametrize(
    ("operations", "code"),
    [
        ({}, 400),
        (["x"], 400),
        ([{"op": "jump", "path": "/a"}], 400),
        ([{"op": "copy", "from": "/m", "path": "/a"}], 400),
        ([{"op": "add", "path": "m", "value": 1}], 400),
        ([{"op": "add", "path": 7, "value": 1}], 400),
        ([{"op": "add", "path": "/m/x"}], 400),
        ([{"op": "add", "path": "/none/x", "value": 1}], 422),
        ([{"op": "replace", "path": "/m/x", "value": 1}], 422),
        ([{"op": "remove", "path": "/m/x"}], 422),
        ([{"op": "remove", "path": ""}], 422),
        ([{"op": "remove", "path": "/l/01"}], 422),
        ([{"op": "add", "path": "/l/7", "value": 1}], 422),
        ([{"op": "add", "path": "/l/0/x", "value": 1}], 422),
        ([{"op": "test", "path": "/l/0", "value": True}], 422),
    ],
)
def test_a_json_patch_that_does_not_fit_is_refused(operations: trees.Json, code: int) -> None:
    with pytest.raises(refusals.RequestError) as refused:
        trees.json_patch({"m": {}, "l": [1, 2]}, operations)
    assert refused.value.code == code


GPU = {"gpu": "h100", "zone": "a-1", "memory": "80"}


@pytest.mark.parametrize(
    ("written", "accepts"),
    [
        ("", True),
        ("gpu=h100", True),
        ("gpu==h100,zone=a-1", True),
        ("gpu = h100 , zone!=b", True),
        ("gpu!=h100", False),
        ("absent!=h100", True),
        ("gpu", True),
        ("!gpu", False),
        ("!absent", True),
        ("gpu in (a100, h100)", True),
        ("gpu in (a100)", False),
        ("gpu notin (a100,v100),zone", True),
        ("absent notin (x)", True),
        ("absent in (x)", False),
        ("memory>79", True),
        ("memory<80", False),
        ("gpu>1", False),
        ("nvidia.com/gpu.product", False),
        ("gpu=", False),
    ],
)
def test_a_label_selector_means_what_it_means_in_kubernetes(*, written: str, accepts: bool) -> None:
    assert selectors.labels(written).accepts(GPU) is accepts


@pytest.mark.parametrize(
    "written",
    ["=x", "a=b=c", "a in x", "a in (x", "a,,b", ",", "a>x", "a b", "-a", "a in (x y)", "é=1"],
)
def test_a_selector_that_cannot_be_read_is_refused(written: str) -> None:
    with pytest.raises(refusals.RequestError) as refused:
        selectors.labels(written)
    assert refused.value.code == 400


@few
@given(written=st.text(alphabet="ab=!<>(), innot/.-1", max_size=20))
def test_any_text_is_a_selector_or_a_refusal(written: str) -> None:
    for read in (selectors.labels, selectors.fields):
        try:
            read(written).accepts(GPU)
        except refusals.RequestError as error:
            assert error.code == 400  # noqa: PT017 - both outcomes are right


@few
@given(value=JSON)
def test_json_round_trips(value: trees.Json) -> None:
    assert trees.same(trees.from_json(orjson.dumps(value)), value)


def test_a_tree_too_deep_is_refused() -> None:
    deep = b'{"a":' * 101 + b"1" + b"}" * 101
    with pytest.raises(refusals.RequestError, match="deeper than 100"):
        trees.from_json(deep)


ANN = ownership.Writer(manager="ann", applies=True, api_version="v1")
BEN = ownership.Writer(manager="ben", applies=True, api_version="v1")
EDITOR = ownership.Writer(manager="editor", applies=False, api_version="v1")


def applies(
    live: trees.Tree, wanted: trees.Tree, writer: ownership.Writer, *, force: bool = False
) -> trees.Tree:
    new = ownership.applied(live, wanted, writer, force=force)
    named = frozenset(ownership.leaves(wanted))
    return ownership.recorded(live, new, writer, at="now", named=named)


def dense(value: trees.Json) -> trees.Json:
    if isinstance(value, dict):
        return {key: left for key, item in value.items() if (left := dense(item)) not in ({}, None)}
    return [dense(item) for item in value] if isinstance(value, list) else value


def edits(live: trees.Tree, **labels: str) -> trees.Tree:
    new = trees.with_value(live, dict(labels), "metadata", "labels")
    return ownership.recorded(live, new, EDITOR, at="now", named=None)


def labelled(**labels: str) -> trees.Tree:
    return {"metadata": {"labels": dict(labels)}}


def shares(tree: trees.Tree) -> dict[str, list[str]]:
    """Return the last step of each owned path, by manager."""
    return {
        entry.writer.manager: sorted(path[-1] for path in entry.fields)
        for entry in ownership.read(tree)
    }


def unmanaged(tree: trees.Tree) -> Any:
    return trees.without(trees.object_at(tree, "metadata"), "managedFields")


def test_fields_that_an_applier_drops_are_removed_and_those_of_others_stay() -> None:
    live = applies({}, labelled(a="1", b="2"), ANN)
    live = edits(live, a="1", b="2", c="3")
    live = applies(live, labelled(b="2"), ANN)
    assert unmanaged(live) == {"labels": {"b": "2", "c": "3"}}
    assert shares(live) == {"ann": ["f:b"], "editor": ["f:c"]}


def test_a_field_that_two_apply_alike_has_two_owners_and_stays_until_both_drop_it() -> None:
    live = applies(applies({}, labelled(a="1"), ANN), labelled(a="1"), BEN)
    assert shares(live) == {"ann": ["f:a"], "ben": ["f:a"]}
    live = applies(live, {}, ANN)
    assert (unmanaged(live), shares(live)) == ({"labels": {"a": "1"}}, {"ben": ["f:a"]})
    live = applies(live, {}, BEN)
    assert (unmanaged(live), shares(live)) == ({}, {})


def test_a_conflict_names_the_other_manager_and_the_field() -> None:
    live = edits({}, a="1")
    with pytest.raises(refusals.RequestError) as refused:
        applies(live, labelled(a="2"), ANN)
    assert refused.value.code == 409
    assert refused.value.causes == (
        refusals.Cause(
            field=".metadata.labels.a",
            message='conflict with "editor" using v1',
            reason="FieldManagerConflict",
        ),
    )


def test_force_takes_the_field_from_the_other_manager() -> None:
    live = applies(edits({}, a="1", b="2"), labelled(a="9"), ANN, force=True)
    assert unmanaged(live) == {"labels": {"a": "9", "b": "2"}}
    assert shares(live) == {"editor": ["f:b"], "ann": ["f:a"]}


def test_conditions_are_owned_one_by_one() -> None:
    live = applies({}, {"status": {"conditions": conditions(Gpu="True", Usb="True")}}, ANN)
    live = applies(live, {"status": {"conditions": conditions(Ready="True")}}, BEN)
    live = applies(live, {"status": {"conditions": conditions(Usb="False")}}, ANN)
    assert live["status"] == {"conditions": conditions(Usb="False", Ready="True")}
    with pytest.raises(refusals.RequestError, match=r'conditions\[type="Usb"\]\.status'):
        applies(live, {"status": {"conditions": conditions(Usb="True")}}, BEN)


def test_an_apply_that_gives_up_a_status_takes_along_what_nobody_owns() -> None:
    made: trees.Tree = {
        "metadata": {"labels": {"os": "linux"}},
        "status": {"capacity": {"cpu": "1"}, "conditions": conditions(Ready="True")},
    }
    live = ownership.recorded({}, made, EDITOR, at="now", named=None)
    ours = dataclasses.replace(ANN, subresource="status")
    with_ours = applies(live, {"status": {"conditions": conditions(Gpu="True")}}, ours)
    assert with_ours["status"] == {
        "capacity": {"cpu": "1"},
        "conditions": conditions(Ready="True", Gpu="True"),
    }
    assert trees.without(applies(with_ours, {}, ours), "metadata") == {}

    # if another manager owns a part of a list, fields without an owner stay
    kubelet = dataclasses.replace(EDITOR, manager="kubelet", subresource="status")
    seen = trees.with_value(
        with_ours, conditions(Ready="False", Gpu="True"), "status", "conditions"
    )
    owned = ownership.recorded(with_ours, seen, kubelet, at="now", named=None)
    assert applies(owned, {}, ours)["status"] == {
        "capacity": {"cpu": "1"},
        "conditions": conditions(Ready="False"),
    }


@few
@example(first={}, second={"conditions": [{"type": None}]})
@given(first=OBJECTS, second=OBJECTS)
def test_an_applier_alone_gets_what_it_names_and_applying_twice_changes_nothing(
    first: trees.Tree, second: trees.Tree
) -> None:
    # as a body of a request is parsed; a real server drops empty values
    first, second = (trees.object_at({"": dense(t)}, "") for t in (first, second))
    try:
        live = applies(applies({}, first, ANN), second, ANN)
    except refusals.RequestError as error:
        assert error.code == 400  # noqa: PT017 - an item without its merge key
        return
    assert ownership.leaves(second).keys() <= ownership.leaves(live).keys()
    assert trees.same(applies(live, second, ANN), live)


def test_a_write_dates_its_own_writer_only() -> None:
    kubelet = ownership.Writer(manager="kubelet", applies=False, api_version="v1")
    other = ownership.Writer(manager="other", applies=False, api_version="v1")
    first = ownership.recorded({}, {"spec": {"t": 1}}, kubelet, at="t1", named=None)
    second = ownership.recorded(
        first, {**first, "spec": {"t": 1, "u": 1}}, other, at="t2", named=None
    )
    third = ownership.recorded(
        second, {**second, "spec": {"t": 2, "u": 1}}, kubelet, at="t3", named=None
    )
    same = ownership.recorded(third, third, kubelet, at="t4", named=None)

    assert {e.writer.manager: e.time for e in ownership.read(third)} == {
        "kubelet": "t3",
        "other": "t2",
    }
    assert ownership.read(same) == ownership.read(third)
