"""The model of a fleet: levels, silences, changes since a revision, and outdated data."""

import string
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import matching
from muster.fleet import health_state, kept_silences, model
from muster.fleet.model import Level
from muster.fleet.plugin_facts import Counts

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LEADS = health_state.Service(revision=3, advisories="received", cluster={})


def plugin(node: str, verdict: str | None = "HEALTHY", **more: object) -> health_state.Plugin:
    fields = {"node": node, "plugin": "device-plugin", "verdict": verdict, **more}
    return msgspec.convert(fields, health_state.Plugin)


def alert(node: str, severity: str = "critical", kind: str = "stuck") -> health_state.Alert:
    return health_state.Alert(
        fingerprint="0123456789abcdef",
        node=node,
        plugin="device-plugin",
        kind=kind,
        severity=severity,
        summary=f"{kind} on {node}",
        evidence=(health_state.Evidence(source="heartbeat", observed="none"),),
    )


def page(
    *plugins: health_state.Plugin,
    following: str = "",
    alerts: tuple[health_state.Alert, ...] = (),
    places: Mapping[str, health_state.Place] | None = None,
) -> health_state.State:
    return health_state.State(
        plugins=plugins,
        fleet=health_state.Fleet(alerts=alerts),
        service=LEADS,
        next=following,
        places=dict(places or {}),
    )


def counts(usable: int, total: int, *, is_confirmed: bool = True) -> Counts:
    return Counts(usable, total, is_confirmed)


def silence(*matchers: str, hours: int = 1) -> matching.Silence:
    return matching.Silence(
        id="s1",
        matchers=matchers,
        starts_at=AT,
        ends_at=AT + timedelta(hours=hours),
        author="ann",
        comment="driver update",
    )


def read(*pages: health_state.State) -> model.FleetModel:
    fleet, after = model.FleetModel(), ""
    for each in pages:
        fleet.receive_page(each, after=after, now=1.0, at=AT)
        after = each.next
    return fleet


def test_a_summary_has_the_worst_plugin_and_the_most_urgent_problem_of_its_node() -> None:
    firing = msgspec.structs.replace(
        alert("a", "warning", "device_unhealthy"), pods=("ml/train",), pods_total=3
    )
    fleet = read(
        page(
            plugin("a", devices={"gpu": 8}, allocatable={"gpu": 7}, alerts=(firing,)),
            plugin("a", "STUCK", plugin="other", since=AT, devices={"fuse": 20}),
            places={"a": health_state.Place(pool="p", zone="z")},
        )
    )
    assert fleet.nodes["a"] == model.NodeSummary(
        name="a",
        level=Level.WARNING,
        verdict="STUCK",
        label="STUCK",
        plugin="other",
        since=AT,
        reason="device_unhealthy on a",
        resources={"gpu": counts(7, 8), "fuse": counts(20, 20, is_confirmed=False)},
        alerts=1,
        silenced=0,
        pods=("ml/train",),
        pods_total=3,
        pool="p",
        zone="z",
        revision=fleet.nodes["a"].revision,
    )


def test_the_pods_of_the_most_urgent_alert_come_first_and_those_of_silenced_ones_last() -> None:
    def naming(number: int, severity: str, *pods: str) -> health_state.Alert:
        made = alert("a", severity, f"kind_{number}")
        return msgspec.structs.replace(made, pods=pods, pods_total=len(pods))

    many = tuple(f"ml/{number}" for number in range(model.PODS_MAX))
    fleet = read(
        page(
            plugin(
                "a",
                alerts=(
                    naming(0, "critical", "ml/silenced"),
                    naming(1, "warning", "ml/shared", *many),
                    naming(2, "critical", "ml/hurt", "ml/shared"),
                ),
            ),
            plugin("b"),
        )
    )
    fleet.receive_silence("s", silence("kind=kind_0"), at=AT)
    summary = fleet.nodes["a"]
    assert summary.pods == ("ml/hurt", "ml/shared", *many)[: model.PODS_MAX]
    assert summary.pods_total == model.PODS_MAX + 3
    assert (fleet.nodes["b"].pods, fleet.nodes["b"].pods_total) == ((), 0)


def test_each_resource_is_judged_by_the_plugins_that_serve_it() -> None:
    def resources(*plugins: health_state.Plugin) -> Mapping[str, Counts]:
        return read(page(*plugins)).nodes["a"].resources

    stuck = plugin("a", "STUCK", plugin="b", devices={"fuse": 20})
    assert resources(plugin("a", devices={"gpu": 8}), stuck) == {
        "gpu": counts(8, 8),
        "fuse": counts(20, 20, is_confirmed=False),
    }
    # the order of two plugins for one resource does not matter
    well = plugin("a", devices={"fuse": 20})
    unsure = {"fuse": counts(20, 20, is_confirmed=False)}
    assert resources(well, stuck) == resources(stuck, well) == unsure
    times = {"since": AT, "until": AT + timedelta(seconds=120)}
    recovery = msgspec.convert(times, health_state.Recovery)
    recovering = msgspec.structs.replace(stuck, recovery=recovery)
    assert resources(recovering) == {"fuse": counts(20, 20)}


def test_of_plugins_of_one_level_one_that_hands_out_no_devices_is_the_worst() -> None:
    summary = read(page(plugin("a", "DEGRADED"), plugin("a", "STUCK", plugin="other"))).nodes["a"]
    assert (summary.level, summary.verdict, summary.plugin) == (Level.WARNING, "STUCK", "other")


def test_an_alert_labels_a_node_whose_plugins_are_healthy() -> None:
    firing = msgspec.structs.replace(alert("a", kind="device_unhealthy"), starts_at=AT)
    summary = read(page(plugin("a", alerts=(firing,)))).nodes["a"]
    assert (summary.verdict, summary.label) == ("HEALTHY", "DEVICE_UNHEALTHY")
    assert (summary.level, summary.since) == (Level.CRITICAL, AT)


def test_a_node_whose_problem_is_gone_is_shown_as_recovering() -> None:
    times = {"since": AT, "until": AT + timedelta(seconds=120)}
    recovery = msgspec.convert(times, health_state.Recovery)
    firing = msgspec.structs.replace(alert("a"), recovery=recovery)
    stuck = plugin("a", "STUCK", alerts=(firing,), recovery=recovery)
    summary = read(page(stuck)).nodes["a"]
    assert (summary.verdict, summary.label, summary.level) == (
        "STUCK",
        "RECOVERING",
        Level.CRITICAL,
    )
    assert summary.reason == "recovering: must be well for 120 s: stuck on a"
    quiet = read(page(msgspec.structs.replace(stuck, alerts=()))).nodes["a"]
    assert quiet.reason == "recovering: must be well for 120 s"
    # another failed plugin that is not recovering takes precedence
    both = read(page(stuck, plugin("a", "PLUGIN_DOWN", plugin="other"))).nodes["a"]
    assert (both.label, both.plugin) == ("PLUGIN_DOWN", "other")


def test_a_plugin_that_health_suspects_is_a_notice_before_the_verdict() -> None:
    def shown(name: str, verdict: str | None, **more: object) -> tuple[str, Level, str]:
        node = read(page(plugin(name, verdict, state="suspect", **more))).nodes[name]
        return node.label, node.level, node.reason

    why = "suspected: silent, or it reports a problem; no verdict yet"
    assert shown("a", "HEALTHY") == ("SUSPECTED", Level.NOTICE, why)
    assert shown("a", None) == ("", Level.UNKNOWN, why)
    assert shown("a", "DEGRADED") == ("DEGRADED", Level.WARNING, why)
    suspended = "suspended: many plugins became silent at the same time"
    assert shown("a", "HEALTHY", frozen=True) == ("HEALTHY", Level.NOTICE, suspended)
    assert not plugin("a", state="suspect").is_well


def test_the_level_follows_from_alerts_verdict_and_problems() -> None:
    def level(*plugins: health_state.Plugin, alerts: tuple[health_state.Alert, ...] = ()) -> Level:
        return read(page(*plugins, alerts=alerts)).nodes["a"].level

    assert level(plugin("a")) is Level.OK
    assert level(plugin("a", "MAINTENANCE")) is Level.NOTICE
    assert level(plugin("a", None)) is Level.UNKNOWN
    assert level(plugin("a", "A_LATER_VERDICT")) is Level.WARNING
    assert level(plugin("a", problems=("x",))) is Level.NOTICE
    assert level(plugin("a", frozen=True)) is Level.NOTICE
    assert level(plugin("a", "STUCK", alerts=(alert("a"),))) is Level.CRITICAL
    assert level(plugin("a"), alerts=(alert("a", "info"),)) is Level.NOTICE
    # an alert about another node
    assert level(plugin("a"), alerts=(alert("b"),)) is Level.OK


def test_a_silenced_alert_is_a_notice_until_its_silence_ends() -> None:
    fleet = read(page(plugin("a", "STUCK", alerts=(alert("a"),)), plugin("b")))
    fleet.receive_silence("s1", silence("node=a"), at=AT)
    summary = fleet.nodes["a"]
    assert (summary.level, summary.alerts, summary.silenced) == (Level.NOTICE, 1, 1)
    assert fleet.silence_of(alert("a"), AT) == silence("node=a")
    assert fleet.silence_of(alert("b"), AT) is None
    later = AT + timedelta(hours=2)
    assert fleet.silence_of(alert("a"), later) is None
    fleet.receive_node(page(plugin("a", "STUCK", alerts=(alert("a"),))), "a", now=2.0, at=later)
    assert (fleet.nodes["a"].level, fleet.nodes["a"].silenced) == (Level.CRITICAL, 0)
    fleet.receive_silence("s1", None, at=AT)
    assert fleet.nodes["a"].level is Level.CRITICAL


def test_a_silence_that_names_no_node_concerns_the_alerts_of_every_node() -> None:
    fleet = read(page(*(plugin(name, alerts=(alert(name),)) for name in "abc")))
    fleet.receive_silence("s1", silence("node=~a|b"), at=AT)
    fleet.receive_silence("s2", silence("node=c", "node=a"), at=AT)
    assert {name: node.silenced for name, node in fleet.nodes.items()} == {"a": 1, "b": 1, "c": 0}


def test_a_silence_concerns_what_it_matches_and_repeated_it_changes_nothing() -> None:
    # the alert is listed for the fleet, not for a plugin
    fleet = read(page(plugin("a"), plugin("b"), alerts=(alert("a"),)))
    fleet.receive_silence("s1", silence("node=a"), at=AT)
    assert [(n.name, n.silenced) for n in fleet.nodes.values()] == [("b", 0), ("a", 1)]
    revision = fleet.revision
    fleet.receive_silence("s1", silence("node=a"), at=AT)
    fleet.receive_silence("s2", None, at=AT)
    assert fleet.revision == revision
    fleet.receive_silence("s1", silence("node=b"), at=AT)
    assert fleet.nodes["a"].silenced == 0


def test_of_very_many_silences_those_that_end_last_are_applied_and_a_caveat_says_so() -> None:
    fleet = read(page(*(plugin(name, alerts=(alert(name),)) for name in "abc")))
    assert kept_silences.SILENCES_MAX == 1_000
    fleet.receive_silence("a", silence("node=a", hours=2), at=AT)
    for number in range(999):
        fleet.receive_silence(f"s{number}", silence(f"node=n{number}", hours=3), at=AT)
    assert (len(fleet.silences), fleet.caveats()) == (1_000, [])
    fleet.receive_silence("b", silence("node=b", hours=4), at=AT)

    def silenced() -> dict[str, int]:
        return {name: node.silenced for name, node in fleet.nodes.items()}

    assert (len(fleet.silences), silenced()) == (1_000, {"a": 0, "b": 1, "c": 0})
    assert [text.partition(";")[0] for text in fleet.caveats()] == [
        "more than 1,000 silences have not ended"
    ]
    # a silence that ends before all others is left out
    revision = fleet.revision
    fleet.receive_silence("c", silence("node=c", hours=1), at=AT)
    assert (silenced(), fleet.revision) == ({"a": 0, "b": 1, "c": 0}, revision)
    # of those left out, the one that ends last replaces a removed or expired silence
    fleet.receive_silence("s1", None, at=AT)
    assert silenced() == {"a": 1, "b": 1, "c": 0}
    fleet.receive_silence("b", silence("node=b", hours=0), at=AT)
    assert silenced() == {"a": 1, "b": 0, "c": 1}
    # the only silence that is left out has ended
    assert (len(fleet.silences), fleet.caveats()) == (1_000, [])


@given(
    st.lists(
        st.tuples(st.integers(0, 1_200), st.integers(0, 3) | st.none()), min_size=1, max_size=40
    )
)
@settings(max_examples=30, deadline=None)
def test_the_silences_that_are_applied_are_always_those_that_end_last(
    changes: list[tuple[int, int | None]],
) -> None:
    kept, every = kept_silences.KeptSilences(), dict[str, matching.Silence]()

    def receive(number: int, hours: int | None) -> None:
        key = f"s{number:04}"
        value = None if hours is None else silence(f"node=n{number}", hours=hours)
        before = dict(kept.by_id)
        changed = kept.receive(key, value)
        every.pop(key, None)
        if value is not None:
            every[key] = value
        pairs = before.items() ^ kept.by_id.items()
        assert set(changed) == {matching.parse_all(each.matchers) for _, each in pairs}

    for number in range(998):
        receive(number, number % 3)
    for number, hours in changes:
        receive(number, hours)
        last = sorted(every, key=lambda key: (every[key].ends_at, key))[-1_000:]
        assert kept.by_id == {key: every[key] for key in last}


def test_a_page_replaces_the_nodes_of_its_range_only() -> None:
    first, second = page(plugin("a"), plugin("b"), following="b"), page(plugin("c"), plugin("d"))
    fleet = read(first, second)
    revision = fleet.revision
    fleet.receive_page(page(plugin("b", "STUCK"), following="b"), after="", now=2.0, at=AT)
    changes = fleet.changed_since(revision)
    assert set(fleet.nodes) == {"b", "c", "d"}
    assert ([node.name for node in changes.nodes], changes.removed) == (["b"], ("a",))
    fleet.receive_page(page(plugin("c")), after="b", now=2.0, at=AT)
    assert set(fleet.nodes) == {"b", "c"}
    fleet.receive_node(page(), "c", now=2.0, at=AT)
    assert set(fleet.nodes) == {"b"}


def test_alerts_are_sorted_by_urgency_and_shortened_when_there_are_very_many() -> None:
    many = [
        plugin(f"n{number:05}", "STUCK", alerts=(alert(f"n{number:05}", "warning"),))
        for number in range(model.ALERTS_MAX + 1)
    ]
    fleet = read(page(*many, alerts=(alert("z"),)))
    assert len(fleet.alerts) == model.ALERTS_MAX + 2
    assert fleet.alerts[0] == alert("z")
    assert (len(fleet.alerts[1].evidence), len(fleet.alerts[-1].evidence)) == (1, 0)
    fleet.receive_page(page(), after="", now=2.0, at=AT)
    fleet.receive_page(page(many[0]), after="", now=2.0, at=AT)
    assert len(fleet.alerts[0].evidence) == 1


def test_what_is_shown_says_why_it_is_old() -> None:
    fleet = model.FleetModel()
    assert fleet.problem(0.0) == "health has not been queried yet"
    fleet.receive_failure("Connection refused", now=0.0)
    assert fleet.problem(1.0) == "health has not answered yet: Connection refused"
    fleet.receive_page(page(plugin("a"), following="a"), after="", now=1.0, at=AT)
    assert fleet.problem(1.0) == "the nodes are still being read"
    fleet.receive_page(page(plugin("b")), after="a", now=2.0, at=AT)
    assert fleet.problem(2.0) == ""
    revision = fleet.revision
    fleet.receive_failure("Connection refused", now=8.0)
    assert fleet.revision > revision
    assert fleet.problem(8.0) == (
        "health has not answered for 6 s: Connection refused; this is what it last reported"
    )
    fleet.receive_page(page(plugin("a"), plugin("b")), after="", now=9.0, at=AT)
    assert (fleet.problem(9.0), fleet.caveats()) == ("", [])


def test_a_revision_of_another_process_leads_to_a_restart() -> None:
    assert read(page(plugin("a"))).changed_since(99).is_restart


NAMES = st.sampled_from(string.ascii_lowercase[:6])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["page", "node", "silence", "failure", "client"]),
        st.sets(NAMES),
        NAMES,
        st.booleans(),
    ),
    max_size=30,
)


@given(STEPS)
def test_a_client_that_reads_changes_at_any_time_has_the_same_nodes(
    steps: list[tuple[str, set[str], str, bool]],
) -> None:
    fleet = model.FleetModel()
    client: dict[str, model.NodeSummary] = {}
    known, revision = set[str](), 0

    def node(name: str, *, is_bad: bool) -> health_state.Plugin:
        bad = {"verdict": "STUCK", "alerts": (alert(name),)} if is_bad else {}
        return plugin(name, **bad)  # type: ignore[arg-type]

    for kind, names, name, is_bad in [*steps, ("client", set[str](), "a", False)]:
        match kind:
            case "page":
                inside = {each for each in names if each <= name}
                plugins = [node(each, is_bad=is_bad) for each in sorted(inside)]
                fleet.receive_page(page(*plugins, following=name), after="", now=1.0, at=AT)
                known = {each for each in known if each > name} | inside
            case "node":
                plugins = [node(name, is_bad=is_bad)] if name in names else []
                fleet.receive_node(page(*plugins), name, now=1.0, at=AT)
                known = known | {name} if plugins else known - {name}
            case "silence":
                value = silence(f"node={name}") if is_bad else None
                fleet.receive_silence("s1", value, at=AT)
            case "failure":
                fleet.receive_failure(name, now=1.0)
            case _:
                changes = fleet.changed_since(revision)
                assert not changes.is_restart
                for gone in changes.removed:
                    client.pop(gone, None)
                client |= {each.name: each for each in changes.nodes}
                revision = fleet.revision
        assert set(fleet.nodes) == known
        assert fleet.revision == max(
            [fleet.revision, *(each.revision for each in fleet.nodes.values())]
        )
    assert client == fleet.nodes
