"""What `muster status` and `muster why` make of what health says."""

from datetime import UTC, datetime, timedelta

import msgspec
import orjson
import pytest

from muster import codec, vocabulary
from muster.cli import status, why

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LEADS = status.Service(revision=3, leader="one", advisories="they come", cluster={})


def plugin(node: str, verdict: str | None = "HEALTHY", **more: object) -> status.Plugin:
    return msgspec.convert({"node": node, "plugin": "p", "verdict": verdict, **more}, status.Plugin)


def state(
    *plugins: status.Plugin, fleet: status.Fleet | None = None, service: status.Service = LEADS
) -> status.State:
    return status.State(plugins=plugins, fleet=fleet or status.Fleet(), service=service)


def heard(count: int) -> list[codec.CloudEvent]:
    told = vocabulary.PluginStopping(
        node="a", at=AT, plugin="p", reason=vocabulary.StopReason.SIGNAL
    )
    return [
        codec.CloudEvent(
            id=f"i:{number}",
            source="/nodes/a/plugins/p",
            type=told.TYPE,
            time=AT + timedelta(seconds=number),
            instance="i",
            sequence=number,
            boot="",
            data=told,
        )
        for number in range(count)
    ]


def test_a_fleet_that_is_well_is_four_lines() -> None:
    assert status.lines(state(plugin("a"), plugin("b")), source="here", everything=False) == [
        "health    here",
        "plugins   2 on 2 nodes: 2 HEALTHY",
        "suspects  0 silent, 0 mass failures",
        "alerts    0 firing",
    ]


def test_who_is_not_well_is_listed_first_and_who_is_well_on_request() -> None:
    found = state(plugin("a"), plugin("c", "STUCK"), plugin("b", None), plugin("d", "MAINTENANCE"))
    shown = status.lines(found, source="here", everything=False)[5:]
    assert [line.split()[:3] for line in shown] == [
        ["NODE", "PLUGIN", "VERDICT"],
        ["b", "p", "UNKNOWN"],
        ["c", "p", "STUCK"],
    ]
    shown = status.lines(found, source="here", everything=True)[6:]
    assert [line.split()[0] for line in shown] == ["b", "c", "a", "d"]


def test_what_a_plugin_says_is_wrong_is_shown_though_nobody_is_alerted_of_it() -> None:
    refused = "the changed configuration cannot be used: plugin.yaml: not YAML"
    found = plugin("a", problems=[refused])
    shown = status.lines(state(found, plugin("b")), source="here", everything=False)
    assert shown[-2:] == ["NODE  PLUGIN  PROBLEM", f"a     p       {refused}"]
    assert [line.split()[0] for line in shown[5:7]] == ["NODE", "a"]
    known = why.NodeView(node="a", source="here", state=state(found), events=None, since="1 h")
    assert f"  problem    {refused}" in why.lines(known)


def test_what_makes_the_state_less_true_is_said() -> None:
    service = status.Service(
        leader="two",
        is_disconnected=True,
        advisories="no advisory of our own connection",
        cluster={"nodes": "HTTP 403"},
    )
    assert status.caveats(state(fleet=status.Fleet(mass_failures=1), service=service)) == [
        "health is disconnected from NATS; this is what it last received",
        "this health service is not the leader (two); alerts are the leader's",
        "mass failure: many plugins went silent together; verdicts are suspended",
        "connections: no advisory of our own connection",
        "Kubernetes: nodes: HTTP 403",
    ]
    assert status.caveats(state()) == []


def test_a_long_list_is_cut_and_says_so() -> None:
    found = state(*(plugin(f"n{number}", "STUCK") for number in range(201)))
    assert status.lines(found, source="here", everything=False)[-1] == (
        "and 1 more; --all shows them"
    )
    assert status.lines(found, source="here", everything=True)[-1].startswith("n99 ")


def test_the_most_urgent_alert_comes_first_then_the_oldest() -> None:
    def alert(severity: str, seconds: int) -> dict[str, object]:
        return {"severity": severity, "starts_at": AT + timedelta(seconds=seconds)}

    alerts = [alert("info", 0), alert("critical", 9), alert("strange", 0), alert("critical", 3)]
    found = state(plugin("a", alerts=alerts)).alerts
    order = [(one.severity, one.starts_at) for one in found]
    assert order == [
        ("critical", AT + timedelta(seconds=3)),
        ("critical", AT + timedelta(seconds=9)),
        ("info", AT),
        ("strange", AT),
    ]


def test_a_newer_service_may_say_more() -> None:
    body = {
        "plugins": [{"node": "a", "plugin": "p", "verdict": "BEWITCHED", "aura": 7}],
        "fleet": {"moon": "full"},
        "service": {"leads": 1},
        "more": [],
    }
    assert status.decode(orjson.dumps(body)).plugins == (plugin("a", "BEWITCHED"),)


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"{}", b'{"plugins": 1}', b"[" * 100_000, b"404"]
)
def test_what_is_no_state_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        status.decode(body)


def test_nothing_that_a_plugin_wrote_reaches_the_terminal_as_a_command() -> None:
    evil = "\x1b]0;x\x07\n\u202e"
    found = state(
        plugin(
            "a",
            evil,
            rule=evil,
            state=evil,
            beat_age_s=1.0,
            evidence=[{"source": evil, "observed": evil}],
            devices={evil: 1},
            unhealthy=[{"device": evil, "why": evil}],
            alerts=[{"summary": evil, "advice": evil, "pods": [evil], "severity": evil}],
        ),
        service=status.Service(leader=evil, cluster={evil: evil}),
    )
    known = why.NodeView(node="a", source=evil, state=found, events=heard(1), since="1d")
    shown = [*status.lines(found, source=evil, everything=True), *why.lines(known)]
    assert [line for line in shown if not line.isprintable()] == []


def test_the_pods_that_a_failed_plugin_affects_are_named_and_the_others_counted() -> None:
    down = {"kind": "plugin_down", "severity": "critical", "summary": "s", "advice": "look"}
    told = {**down, "pods": ["ml/a", "ml/b"], "pods_total": 40, "starts_at": "2026-01-01T12:00:00Z"}
    known = why.NodeView(
        node="a", source="x", state=state(plugin("a", alerts=[told])), events=None, since="1d"
    )
    assert why.lines(known)[-6:] == [
        "    pods       40; the first 2 are named below",
        "    what to do look",
        "",
        "pods (some may have ended)",
        "  ml/a: named by the alert plugin_down",
        "  ml/b: named by the alert plugin_down",
    ]


def test_a_node_that_nobody_knows_is_named_with_its_neighbour() -> None:
    known = why.NodeView(
        node="nod-a", source="x", state=state(plugin("node-a")), events=[], since="1d"
    )
    assert why.unknown_node(known) == "no plugin and no event of node nod-a; did you mean node-a?"


def test_a_node_that_is_gone_still_has_its_past() -> None:
    known = why.NodeView(node="a", source="x", state=state(), events=heard(1), since="1d")
    assert why.unknown_node(known) == ""
    assert why.lines(known)[:5] == [
        "health    x",
        "",
        "a: health has no plugin of this node now",
        "",
        "last changes (since 1d)",
    ]
    assert why.lines(known)[5].endswith("  plugin.stopping plugin=p reason=signal")


def test_only_the_last_changes_are_shown_and_a_past_that_is_cut_says_so() -> None:
    known = why.NodeView(node="a", source="x", state=None, events=heard(10_000), since="1d")
    assert [one.sequence for one in known.changes] == list(range(9970, 10_000))
    assert why.lines(known)[-1] == "  and later ones: too many; give a later --since"
    assert why.report(known)["changes_cut"]
    assert not why.NodeView(node="a", source="x", state=None, events=heard(9), since="1d").is_cut
