"""The vocabulary of the bus: node tokens, subjects, filters."""

import fnmatch
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import vocabulary

NOW: Final = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LABEL: Final = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
NODE: Final = (
    st.lists(LABEL, min_size=1, max_size=12).map(".".join).filter(lambda name: len(name) <= 253)
)
REQUIRED: Final[Mapping[str, object]] = {
    "version": "0.1.0",
    "instance": "0123456789abcdef",
    "resource": "example.com/fuse",
    "endpoint": "muster-fuse-1-1.sock",
    "registrations": 1,
    "devices": [],
    "device": {"id": "fuse-0", "resource": "example.com/fuse"},
    "device_id": "fuse-0",
    "device_ids": ["fuse-0"],
    "health": "Unhealthy",
    "labels": {"example.com/gpu": "true"},
    "verdict": "PLUGIN_DOWN",
    "rule": "silence-and-no-answer",
    "kind": "plugin_down",
    "severity": "critical",
    "state": "firing",
    "fingerprint": "0123456789abcdef",
    "summary": "fuse is down",
    "starts_at": "2026-01-02T03:04:05Z",
    "receivers": {"ops": "slack"},
    "receiver": "Ops_chat",
    "actor": "ann@example.com",
    "identity": "oidc",
    "act": "silence",
    "group": "node-a",
    "error": "503",
    "short": "expected at least 2 devices, found 1",
    "config_hash": "0123456789ab",
    "problems": ["resources: none is given"],
    "leader": 7,
    "holder": "health-0",
    "outcome": "refused",
    "interval_s": 10,
    "messages": 9,
    "bytes": 9,
    "seconds": 1.0,
    "refused_s": 10.0,
    "mount": {"id": "a1b2:51", "pod": "shop/web-0", "connection": 51},
    "pod": "shop/web-0",
    "text": "blkdev is not allowed",
    "count": 2,
    "holds": True,
    "problem": "two resources hand out one node",
    "plugin": "device-plugin",
    "watched": {"name": "nvidia.com/gpu"},
}
REASONS: Final = {
    "plugin.registered": "start",
    "plugin.deregistered": "stream_closed",
    "plugin.stopping": "signal",
    "notification.delivered": "first",
    "notification.failed": "repeat",
}
CONDITIONS: Final = {"device.condition_changed": "degraded", "fuse.mount_changed": "hung"}


def example(kind: type[vocabulary.Event], node: str) -> vocabulary.Event:
    given_fields: dict[str, object] = {
        **REQUIRED,
        "node": node,
        "at": NOW,
        "reason": REASONS.get(kind.TYPE, "in words"),
        "condition": CONDITIONS.get(kind.TYPE),
    }
    needed = {f.name for f in msgspec.structs.fields(kind) if f.required}
    return msgspec.convert({k: v for k, v in given_fields.items() if k in needed}, kind)


def matches(subject_filter: str, subject: str) -> bool:
    """Return whether NATS matches: `*` stands for one token, a last `>` for one or more."""
    wanted, tokens = subject_filter.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(tokens) >= len(wanted) and matches(
            ".".join(wanted[:-1]) or "*", ".".join(tokens[: len(wanted) - 1]) or "x"
        )
    return len(wanted) == len(tokens) and all(
        w in {"*", f} for w, f in zip(wanted, tokens, strict=True)
    )


@given(NODE)
def test_a_node_name_survives_the_round_trip_through_a_subject_token(node: str) -> None:
    token = vocabulary.node_token(node)
    assert "." not in token
    assert vocabulary.node_of(token) == node


def test_the_longest_node_name_survives_too() -> None:
    node = ".".join(["a" * 63] * 3 + ["b" * 61])
    assert len(node) == 253
    event = example(vocabulary.PluginStarted, node)
    assert vocabulary.node_of(event.subject.split(".")[2]) == node


def test_the_fleet_is_a_node_of_its_own() -> None:
    assert vocabulary.node_token("_fleet") == "_fleet"
    assert vocabulary.node_of("_fleet") == "_fleet"


@given(NODE, st.sampled_from(vocabulary.EVENTS))
def test_the_node_is_the_third_token_of_every_event_subject(
    node: str, kind: type[vocabulary.Event]
) -> None:
    tokens = example(kind, node).subject.split(".")
    assert tokens[0] == "muster"
    assert vocabulary.node_of(tokens[2]) == node
    assert all(tokens)


def test_every_kind_of_event_is_listed() -> None:
    def below(kind: type[vocabulary.Event]) -> set[type[vocabulary.Event]]:
        return {kind}.union(*(below(k) for k in kind.__subclasses__()))

    defined = {k for k in below(vocabulary.Event) if "TYPE" in vars(k)}
    assert defined == set(vocabulary.EVENTS)
    assert len({k.TYPE for k in defined}) == len(vocabulary.EVENTS)
    assert all("SUBJECT" in vars(k) for k in defined)


def test_no_two_kinds_of_event_share_a_subject() -> None:
    subjects = {example(kind, "node-a").subject for kind in vocabulary.EVENTS}
    assert len(subjects) == len(vocabulary.EVENTS)


PATTERNS: Final = st.sampled_from(
    [
        "*",
        "device.*",
        "*.changed",
        "plugin.st*",
        "notification.[df]*",
        "alert.change?",
        *vocabulary.BY_TYPE,
    ]
)


@given(PATTERNS, st.sampled_from(["*", "node-a", "a.b.c", "node-?", "[an]*", "_fleet"]))
def test_filters_match_exactly_the_subjects_of_the_types_and_nodes_named(
    types: str, nodes: str
) -> None:
    filters = vocabulary.subject_filters(types, nodes)
    for kind in vocabulary.EVENTS:
        for node in ("node-a", "node-b", "a.b.c", "a", "_fleet"):
            wanted = fnmatch.fnmatchcase(kind.TYPE, types) and (
                nodes == node or any(mark in nodes for mark in "*?[")
            )
            subject = example(kind, node).subject
            assert any(matches(f, subject) for f in filters) == wanted, (subject, filters)
    beat = "muster.heartbeat.node-a.device-plugin"
    assert not any(matches(f, beat) for f in filters)


def test_a_pattern_that_matches_no_type_is_refused_with_the_types_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"no event type matches 'devices\.\*'; the types are: alert"
    ):
        vocabulary.subject_filters("devices.*")


@pytest.mark.parametrize("node", ["a b", "Node-A", "a.>", "", "a\n", "node!"])
def test_a_node_that_cannot_exist_is_refused_instead_of_never_matching(node: str) -> None:
    with pytest.raises(ValueError, match="not a Kubernetes node name"):
        vocabulary.subject_filters("*", node)


@pytest.mark.parametrize("node", ["", "Node", "a_b", "-a", "a-", ".a", "a" * 254, "a\n", "a b"])
def test_an_event_of_an_impossible_node_is_refused(node: str) -> None:
    with pytest.raises(ValueError, match="node"):
        vocabulary.DeviceAdded(
            node=node,
            at=NOW,
            plugin="p",
            device=vocabulary.Device(id="d", resource="example.com/d"),
        )


def test_an_event_at_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="time zone"):
        vocabulary.PluginStopping(
            node="a", at=NOW.replace(tzinfo=None), plugin="p", reason=vocabulary.StopReason.SIGNAL
        )


def test_an_alert_that_starts_or_ends_at_a_time_without_a_zone_is_refused() -> None:
    alert = example(vocabulary.AlertChanged, "a")
    with pytest.raises(ValueError, match="starts_at: the time has no time zone"):
        msgspec.structs.replace(alert, starts_at=NOW.replace(tzinfo=None))
    with pytest.raises(ValueError, match="ends_at: the time has no time zone"):
        msgspec.structs.replace(alert, ends_at=NOW.replace(tzinfo=None))


@pytest.mark.parametrize("plugin", ["a.b", "a b", "*", ">", "", "a\n"])
def test_a_name_that_cannot_be_part_of_a_subject_is_refused(plugin: str) -> None:
    event = vocabulary.PluginStopping(
        node="a", at=NOW, plugin=plugin, reason=vocabulary.StopReason.SIGNAL
    )
    with pytest.raises(ValueError, match=r"plugin: .* cannot be part of a subject"):
        _ = event.subject
    beat = vocabulary.Heartbeat(node="a", plugin=plugin, instance="i", seq=1, interval_s=5)
    with pytest.raises(ValueError, match=r"plugin: .* cannot be part of a subject"):
        _ = beat.subject


def test_a_heartbeat_of_an_impossible_node_has_no_subject() -> None:
    beat = vocabulary.Heartbeat(node="a b", plugin="p", instance="i", seq=1, interval_s=5)
    with pytest.raises(ValueError, match="node: 'a b' is not a Kubernetes node name"):
        _ = beat.subject


def test_the_node_is_the_third_token_of_requests_too() -> None:
    assert vocabulary.rpc_subject("a.b", "device-plugin", "probe") == (
        "muster.rpc.a_b.device-plugin.probe"
    )
