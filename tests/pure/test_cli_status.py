"""The text of `muster status` and `muster why`."""

from datetime import UTC, datetime, timedelta

import msgspec
import orjson
import pytest

from muster import codec, matching, vocabulary
from muster.cli import status, why
from muster.fleet import health_state

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LEADS = health_state.Service(revision=3, leader="one", advisories="they come", cluster={})


def plugin(node: str, verdict: str | None = "HEALTHY", **more: object) -> health_state.Plugin:
    return msgspec.convert(
        {"node": node, "plugin": "p", "verdict": verdict, **more}, health_state.Plugin
    )


def state(
    *plugins: health_state.Plugin,
    fleet: health_state.Fleet | None = None,
    service: health_state.Service = LEADS,
) -> health_state.State:
    return health_state.State(plugins=plugins, fleet=fleet or health_state.Fleet(), service=service)


def past_events(count: int) -> list[codec.CloudEvent]:
    stopping = vocabulary.PluginStopping(
        node="a", at=AT, plugin="p", reason=vocabulary.StopReason.SIGNAL
    )
    return [
        codec.CloudEvent(
            id=f"i:{number}",
            source="/nodes/a/plugins/p",
            type=stopping.TYPE,
            time=AT + timedelta(seconds=number),
            instance="i",
            sequence=number,
            boot="",
            data=stopping,
        )
        for number in range(count)
    ]


def test_a_healthy_fleet_is_counted_and_not_listed() -> None:
    assert status.lines(state(plugin("a"), plugin("b")), source="here", everything=False) == [
        "health    here",
        "plugins   2 on 2 nodes: 2 HEALTHY",
        "suspects  0 silent, 0 mass failures",
        "alerts    0 firing",
        "",
        "all 2 plugins are HEALTHY; --all lists them",
    ]
    alone = status.lines(state(plugin("a")), source="here", everything=False)
    assert alone[-1] == "the only plugin is HEALTHY; --all lists it"
    resting = state(plugin("a"), plugin("b", "MAINTENANCE"))
    assert status.lines(resting, source="here", everything=False)[-1] == "alerts    0 firing"


def test_evidence_older_than_the_newest_heartbeat_has_its_time() -> None:
    def shown(beat_age_s: float | None) -> str:
        evidence = [{"source": "heartbeat", "observed": "alive"}]
        since = AT.isoformat()
        fleet = state(plugin("a", since=since, evidence=evidence, beat_age_s=beat_age_s))
        now = AT + timedelta(seconds=60)
        view = why.NodeView(node="a", source="x", state=fleet, events=None, since="1d", now=now)
        (line,) = [line for line in why.lines(view) if line.startswith("  evidence")]
        return line

    at = f"{AT.astimezone():%H:%M:%S}"
    assert shown(1.0) == f"  evidence   at {at}: heartbeat: alive"
    assert shown(60.0) == shown(61.0) == shown(None) == "  evidence   heartbeat: alive"


def test_evidence_of_a_problem_has_the_time_of_its_observation() -> None:
    evidence = [{"source": "heartbeat", "observed": "none for 53.0 s"}]
    down = plugin("a", "PLUGIN_DOWN", evidence=evidence, beat_age_s=71.1, evidence_age_s=18.1)
    now = AT + timedelta(seconds=18.1)
    view = why.NodeView(node="a", source="x", state=state(down), events=None, since="1d", now=now)
    at = f"{AT.astimezone():%H:%M:%S}"
    assert f"  evidence   at {at}: heartbeat: none for 53.0 s" in why.lines(view)


def test_a_plugin_whose_problem_is_gone_is_shown_as_recovering() -> None:
    evidence = ({"source": "heartbeat", "observed": "none for 53.0 s"},)
    recovery = {"since": AT, "until": AT + timedelta(seconds=120)}
    firing = {
        "kind": "stuck",
        "severity": "critical",
        "summary": "p is stuck",
        "evidence": evidence,
        "recovery": recovery,
    }
    stuck = plugin(
        "n", "STUCK", evidence=evidence, evidence_age_s=60.0, recovery=recovery, alerts=(firing,)
    )
    now = AT + timedelta(seconds=37.9)
    text = "\n".join(status.lines(state(stuck), source="here", everything=False, now=now))
    assert "STUCK (recovering: well for 37 of 120 s)" in text
    assert "[recovering: well for 37 of 120 s] p is stuck" in text
    view = why.NodeView(node="n", source="", state=state(stuck), events=None, since="1h", now=now)
    lines = why.lines(view)
    first = lines.index("  recovering well for 37 of 120 s")
    assert lines[first + 1].startswith("  evidence   past, at ")
    assert "    recovering well for 37 of 120 s" in lines


def test_a_silenced_alert_is_marked_and_comes_last() -> None:
    firing = [
        {"fingerprint": name, "node": "n", "kind": kind, "severity": "critical", "summary": kind}
        for name, kind in (("f1", "stuck"), ("f2", "mismatch"))
    ]
    failed = plugin("n", "STUCK", alerts=firing)
    fleet = state(failed)
    silences = [
        matching.Silence(
            id=f"s{hours}",
            matchers=("kind=stuck",),
            starts_at=AT,
            ends_at=AT + timedelta(hours=hours),
            author="ann",
            comment="new disk",
        )
        for hours in (2, 9, 1)
    ]
    labels = {alert.fingerprint: alert.labels for alert in fleet.alerts}
    now = AT + timedelta(hours=1)
    silenced = matching.silenced(labels, silences, now)
    assert silenced == {"f1": silences[1]}
    assert matching.silenced(labels, silences, AT + timedelta(hours=9)) == {}
    text = f"by ann until {(AT + timedelta(hours=9)).astimezone():%Y-%m-%d %H:%M}: new disk"
    lines = status.lines(fleet, source="here", everything=False, now=now, silences=silenced)
    assert "alerts    2 firing, 1 silenced" in lines
    assert lines[-1].endswith(f"[silenced {text}] stuck")
    view = why.NodeView(
        node="n", source="", state=fleet, events=None, since="1h", now=now, silences=silenced
    )
    shown = why.lines(view)
    assert [line for line in shown if "silenced" in line] == [f"    silenced   {text}"]
    assert shown[shown.index(f"    silenced   {text}") - 1].endswith(": stuck")


def test_changes_are_shown_for_a_last_period_or_since_a_time() -> None:
    def title(since: str) -> str:
        view = why.NodeView(node="a", source=None, state=None, events=[], since=since)
        return why.lines(view)[0]

    assert title("15m") == "latest changes (last 15m)"
    assert title("2026-01-02T03:04:05Z") == "latest changes (since 2026-01-02T03:04:05Z)"


def test_a_failure_to_notify_that_repeats_is_one_change_with_its_number() -> None:
    def event(data: vocabulary.Event, number: int) -> codec.CloudEvent:
        return msgspec.structs.replace(
            past_events(number + 1)[number], type=data.TYPE, data=data, id=f"n:{number}"
        )

    first = vocabulary.NotificationReason.FIRST
    failed = vocabulary.NotificationFailed(
        node="a", at=AT, receiver="ops", group="g", reason=first, error="HTTP 401"
    )
    delivered = vocabulary.NotificationDelivered(
        node="a", at=AT, receiver="mail", group="g", reason=first, answer="HTTP 200"
    )
    past = [event(delivered, 0)]
    past += [event(failed, number) for number in range(1, 40)]
    view = why.NodeView(node="a", source=None, state=None, events=past, since="1d")
    assert [line.split(maxsplit=3)[2:] for line in why.lines(view)[1:]] == [
        ["notification.delivered", "mail: 0 firing, 0 resolved (first) HTTP 200"],
        ["notification.failed", "ops: 0 firing, 0 resolved (first) HTTP 401 (39 times)"],
    ]


def test_plugins_with_problems_are_listed_first_and_healthy_ones_on_request() -> None:
    fleet = state(plugin("a"), plugin("c", "STUCK"), plugin("b", None), plugin("d", "MAINTENANCE"))
    shown = status.lines(fleet, source="here", everything=False)[5:]
    assert [line.split()[:3] for line in shown] == [
        ["NODE", "PLUGIN", "VERDICT"],
        ["b", "p", "UNKNOWN"],
        ["c", "p", "STUCK"],
    ]
    shown = status.lines(fleet, source="here", everything=True)[6:]
    assert [line.split()[0] for line in shown] == ["b", "c", "a", "d"]


def test_a_problem_that_a_plugin_reports_is_shown_even_without_an_alert() -> None:
    refused = "the changed configuration cannot be used: plugin.yaml: not YAML"
    reporting = plugin("a", problems=[refused])
    shown = status.lines(state(reporting, plugin("b")), source="here", everything=False)
    assert shown[-2:] == ["NODE  PLUGIN  PROBLEM", f"a     p       {refused}"]
    assert [line.split()[0] for line in shown[5:7]] == ["NODE", "a"]
    view = why.NodeView(node="a", source="here", state=state(reporting), events=None, since="1 h")
    assert f"  problem    {refused}" in why.lines(view)


def test_the_caveats_of_the_state_are_shown() -> None:
    service = health_state.Service(
        leader="two",
        is_disconnected=True,
        advisories="no advisory of our own connection",
        cluster={"nodes": "HTTP 403"},
    )
    assert state(fleet=health_state.Fleet(mass_failures=1), service=service).caveats() == [
        "health is disconnected from NATS; this is what it last received",
        "this health service is not the leader (two); its alerts may be out of date",
        "mass failure: many plugins became silent at the same time; verdicts are suspended",
        "connections: no advisory of our own connection",
        "Kubernetes: nodes: HTTP 403",
    ]
    assert state().caveats() == []


def test_a_long_list_is_cut_and_says_so() -> None:
    fleet = state(*(plugin(f"n{number}", "STUCK") for number in range(201)))
    assert status.lines(fleet, source="here", everything=False)[-1] == (
        "and 1 more; --all shows them"
    )
    assert status.lines(fleet, source="here", everything=True)[-1].startswith("n99 ")


def test_the_most_urgent_alert_comes_first_then_the_oldest() -> None:
    def alert(severity: str, seconds: int) -> dict[str, object]:
        return {"severity": severity, "starts_at": AT + timedelta(seconds=seconds)}

    alerts = [alert("info", 0), alert("critical", 9), alert("strange", 0), alert("critical", 3)]
    sorted_ = state(plugin("a", alerts=alerts)).alerts
    order = [(shown.severity, shown.starts_at) for shown in sorted_]
    assert order == [
        ("critical", AT + timedelta(seconds=3)),
        ("critical", AT + timedelta(seconds=9)),
        ("info", AT),
        ("strange", AT),
    ]


def test_unknown_keys_of_a_newer_service_are_ignored() -> None:
    body = {
        "plugins": [{"node": "a", "plugin": "p", "verdict": "BEWITCHED", "aura": 7}],
        "fleet": {"moon": "full"},
        "service": {"leads": 1},
        "more": [],
    }
    assert health_state.decode(orjson.dumps(body)).plugins == (plugin("a", "BEWITCHED"),)


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"{}", b'{"plugins": 1}', b"[" * 100_000, b"404"]
)
def test_a_body_that_is_no_state_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        health_state.decode(body)


def test_no_control_character_from_a_plugin_reaches_the_terminal() -> None:
    evil = "\x1b]0;x\x07\n\u202e"
    fleet = state(
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
        service=health_state.Service(leader=evil, cluster={evil: evil}),
    )
    view = why.NodeView(node="a", source=evil, state=fleet, events=past_events(1), since="1d")
    shown = [*status.lines(fleet, source=evil, everything=True), *why.lines(view)]
    assert [line for line in shown if not line.isprintable()] == []


def test_the_pods_that_a_failed_plugin_affects_are_named_or_counted() -> None:
    down = {"kind": "plugin_down", "severity": "critical", "summary": "s", "advice": "look"}
    alert = {
        **down,
        "pods": ["ml/a", "ml/b"],
        "pods_total": 40,
        "starts_at": "2026-01-01T12:00:00Z",
    }
    view = why.NodeView(
        node="a", source="x", state=state(plugin("a", alerts=[alert])), events=None, since="1d"
    )
    shown = why.lines(view)
    assert shown[1] == "alerts    1 firing; critical: s; used by ml/a, ml/b and 38 more"
    assert shown[-6:] == [
        "    pods       used by ml/a, ml/b and 38 more",
        "    what to do look",
        "",
        "pods (some may have ended)",
        "  ml/a: named by the alert plugin_down",
        "  ml/b: named by the alert plugin_down",
    ]


def test_the_most_urgent_alert_that_is_not_silenced_is_shown_first() -> None:
    late = {"severity": "critical", "summary": "late", "starts_at": AT + timedelta(seconds=1)}
    early = {"severity": "critical", "summary": "early", "starts_at": AT, "fingerprint": "f"}
    lost = {"severity": "warning", "summary": "lost", "devices": ["g"], "starts_at": AT}
    quiet = matching.Silence(
        id="s", matchers=("node=a",), starts_at=AT, ends_at=AT, author="ann", comment="disk"
    )

    def first(*alerts: dict[str, object], silences: dict[str, matching.Silence]) -> str:
        failed = state(plugin("a", alerts=alerts))
        view = why.NodeView(
            node="a", source="x", state=failed, events=None, since="1d", silences=silences
        )
        return why.lines(view)[1]

    three = (lost, late, early)
    assert first(*three, silences={}) == "alerts    3 firing; critical: early"
    assert first(*three, silences={"f": quiet}) == "alerts    3 firing; critical: late"
    assert first(early, silences={"f": quiet}) == "alerts    1 firing; silenced, critical: early"
    text = "alerts    1 firing; warning: lost; no pod is known to be affected"
    assert first(lost, silences={}) == text


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        ("training", "; the pod ml/training is on a: muster why a"),
        ("ml/training", "; the pod ml/training is on a: muster why a"),
        ("other/training", ""),
    ],
)
def test_a_pod_that_is_asked_for_as_a_node_leads_to_its_node(wanted: str, hint: str) -> None:
    firing = plugin("a", alerts=[{"node": "a", "pods": ["ml/training"]}])
    view = why.NodeView(node=wanted, source="x", state=state(firing), events=[], since="1d")
    assert why.unknown_name(view) == (
        f"no plugin and no event from node {wanted}{hint}; according to health at x"
    )


def test_an_unknown_node_is_named_with_the_nearest_name() -> None:
    view = why.NodeView(
        node="nod-a", source="x", state=state(plugin("node-a")), events=[], since="1d"
    )
    assert why.unknown_name(view) == (
        "no plugin and no event from node nod-a; did you mean node-a?; according to health at x"
    )


AMD = {
    "plugin": "watched-amd-com-gpu-5f0836213a6b",
    "watched": "amd.com/gpu",
    "resources": ["amd.com/gpu"],
    "devices": {"amd.com/gpu": 0},
    "agent": "p",
    "finding": "not_served",
    "text": "refused for 2 s",
    "socket": "device-plugins/amd.sock",
    "expected_devices": 4,
    "allocated": 1,
    "process": "amd-plugin (pid 7)",
    "rule": "watched_not_served",
}


def test_a_watched_plugin_is_shown_by_its_resource_and_marked() -> None:
    watched = plugin("a", "PLUGIN_DOWN", **AMD, observed=False)
    text = status.lines(state(plugin("a"), watched), source="here", everything=True)
    (row,) = (line for line in text if "amd.com/gpu" in line)
    shown = "a amd.com/gpu (watched) PLUGIN_DOWN (not observed) - amd.com/gpu 0 -"
    assert " ".join(row.split()) == shown


@pytest.mark.parametrize("name", ["amd.com/gpu", "watched-amd-com-gpu-5f0836213a6b"])
def test_one_plugin_of_a_node_is_shown_by_its_resource_or_name(name: str) -> None:
    observed = [
        codec.CloudEvent(
            id=f"i:{number}",
            source="/nodes/a/plugins/p",
            type=vocabulary.PluginObserved.TYPE,
            time=AT,
            instance="i",
            sequence=number,
            boot="",
            data=vocabulary.PluginObserved(
                node="a",
                at=AT,
                plugin="p",
                watched=vocabulary.Watched(
                    name=resource, finding=vocabulary.WatchedFinding.NOT_SERVED, text="refused"
                ),
            ),
        )
        for number, resource in enumerate(("amd.com/gpu", "x.example/y"))
    ]
    view = why.NodeView(
        node="a",
        source="s",
        state=state(plugin("a"), plugin("a", "PLUGIN_DOWN", **AMD)),
        events=[*past_events(1), *observed],
        since="1h",
        only=name,
    )
    assert why.unknown_name(view) == ""
    at = status.at(AT)
    assert why.lines(view)[1:] == [
        "alerts    0 firing",
        "",
        "a amd.com/gpu (watched) is PLUGIN_DOWN since - (watched_not_served)",
        "  observed   by p; socket device-plugins/amd.sock",
        "  finding    not_served: refused for 2 s",
        "  counts     4 expected, 1 held by pods",
        "  process    amd-plugin (pid 7)",
        "  devices    amd.com/gpu: 0",
        "",
        "latest changes (last 1h)",
        f"  {at}  plugin.observed amd.com/gpu: not_served: refused",
    ]


def test_a_plugin_that_nobody_observes_now_says_so() -> None:
    watched = plugin("a", "PLUGIN_DOWN", **AMD, observed=False)
    view = why.NodeView(node="a", source="s", state=state(watched), events=[], since="1h")
    assert (
        "  observed   not now, because p is silent; the last observation follows; "
        "socket device-plugins/amd.sock" in (why.lines(view))
    )


def test_an_unknown_plugin_of_a_node_is_named_with_the_nearest_name() -> None:
    view = why.NodeView(
        node="a",
        source="s",
        state=state(plugin("a"), plugin("a", "HEALTHY", **AMD)),
        events=past_events(1),
        since="1h",
        only="amd.com/gpus",
    )
    text = "no plugin or resource amd.com/gpus on node a; did you mean amd.com/gpu?"
    assert why.unknown_name(view) == text


def test_an_alert_about_a_whole_node_is_shown_with_the_node() -> None:
    body = {
        "plugins": [],
        "fleet": {
            "alerts": [
                {"node": "a", "kind": "noisy_node", "severity": "warning", "summary": "too much"},
                {"node": "b", "kind": "noisy_node", "severity": "warning", "summary": "other"},
            ]
        },
        "service": {},
    }
    view = why.NodeView(
        node="a",
        source="s",
        state=health_state.decode(msgspec.json.encode(body)),
        events=[],
        since="1h",
    )
    assert why.unknown_name(view) == ""
    assert [line for line in why.lines(view) if "alert " in line] == [
        "  alert      warning noisy_node since -: too much"
    ]
    assert why.report(view)["alerts"] == view.alerts


def test_a_removed_node_still_has_its_last_changes() -> None:
    view = why.NodeView(node="a", source="x", state=state(), events=past_events(1), since="1d")
    assert why.unknown_name(view) == ""
    assert why.lines(view)[:6] == [
        "health    x",
        "alerts    0 firing",
        "",
        "a: health tracks no plugin on this node",
        "",
        "latest changes (last 1d)",
    ]
    assert why.lines(view)[6].endswith("  plugin.stopping p stops (signal), not expected back")


def test_only_the_last_changes_are_shown_and_a_cut_is_noted() -> None:
    view = why.NodeView(node="a", source="x", state=None, events=past_events(10_000), since="1d")
    assert [change.sequence for change in view.changes] == list(range(9970, 10_000))
    assert why.lines(view)[-1] == "  later changes are omitted (too many); use a later --since"
    assert why.report(view)["changes_cut"]
    assert not why.NodeView(
        node="a", source="x", state=None, events=past_events(9), since="1d"
    ).is_cut


def mounts_event(sequence: int, *mounts: vocabulary.FuseMount) -> codec.CloudEvent:
    inventory = vocabulary.InventoryReported(
        node="a", at=AT, plugin="fuse-broker", devices=(), fuse_mounts=mounts
    )
    return codec.CloudEvent(
        id=f"i:{sequence}",
        source="/nodes/a/plugins/fuse-broker",
        type=inventory.TYPE,
        time=AT,
        instance="i",
        sequence=sequence,
        boot="",
        data=inventory,
    )


HANGING = vocabulary.FuseMount(
    id="51-7",
    pod="shop/web-0",
    connection=51,
    source="host:/data",
    subtype="sshfs",
    mount_point="/mnt",
    user_id=1000,
    conditions=(vocabulary.FuseCondition.HUNG, vocabulary.FuseCondition.LINGERING),
)


def test_a_node_shows_the_mounts_of_the_newest_inventory() -> None:
    other = vocabulary.FuseMount(id="9-1", pod="ml/train", connection=9)
    events = [mounts_event(1, other, other), mounts_event(2, HANGING, other)]
    view = why.NodeView(node="a", source="x", state=state(), events=events, since="1d")
    text = why.lines(view)
    at = text.index("FUSE mounts")
    assert text[at : at + 3] == [
        "FUSE mounts",
        "  ml/train: FUSE: works (user 0, connection 9)",
        "  shop/web-0: sshfs host:/data on /mnt: hung, lingering (user 1000, connection 51)",
    ]
    assert why.report(view)["fuse_mounts"] == (other, HANGING)


def test_a_change_after_the_newest_inventory_gives_a_mount_its_state() -> None:
    dead = vocabulary.FuseCondition.DEAD
    works = msgspec.structs.replace(HANGING, conditions=())
    data = vocabulary.FuseMountChanged(
        node="a", at=AT, plugin="fuse-broker", mount=works, condition=dead, holds=True
    )
    other = msgspec.structs.replace(data, mount=msgspec.structs.replace(works, id="ended"))
    changes = [
        msgspec.structs.replace(mounts_event(n), type=change.TYPE, data=change)
        for n, change in enumerate((data, other), 2)
    ]
    events = [mounts_event(1, works), *changes]
    view = why.NodeView(node="a", source="x", state=state(), events=events, since="1d")
    assert view.mounts == (msgspec.structs.replace(works, conditions=(dead,)),)
    ended = [*events, mounts_event(4)]
    view = why.NodeView(node="a", source="x", state=state(), events=ended, since="1d")
    assert view.mounts == ()


def test_a_resource_without_devices_has_no_line_of_devices_once_a_heartbeat_came() -> None:
    broker = plugin("a", "HEALTHY", resources=["fuse.muster.dev"], devices={}, beat_age_s=1.0)
    view = why.NodeView(node="a", source="x", state=state(broker), events=[], since="1d")
    assert [line for line in why.lines(view) if "devices" in line] == []


def test_of_many_mounts_the_first_are_shown_and_the_others_counted() -> None:
    many = [vocabulary.FuseMount(id=f"{n}-1", pod=f"a/p-{n:03}", connection=n) for n in range(150)]
    events = [mounts_event(1, *many)]
    view = why.NodeView(node="a", source=None, state=None, events=events, since="1d")
    text = why.lines(view)
    at = text.index("  and 50 more; --json has them all")
    assert text[at - 1] == "  a/p-099: FUSE: works (user 0, connection 99)"


def test_changes_of_mounts_are_shown_in_words() -> None:
    changed = vocabulary.FuseMountChanged(
        node="a",
        at=AT,
        plugin="fuse-broker",
        mount=HANGING,
        condition=vocabulary.FuseCondition.HUNG,
        holds=True,
        text="3 requests wait",
    )
    mounted = vocabulary.FuseMounted(node="a", at=AT, plugin="fuse-broker", mount=HANGING)
    events = [
        msgspec.structs.replace(mounts_event(n), type=data.TYPE, data=data)
        for n, data in enumerate((mounted, changed))
    ]
    view = why.NodeView(node="a", source=None, state=None, events=events, since="1d")
    mount = "shop/web-0: sshfs host:/data on /mnt (user 1000, connection 51)"
    assert [line[23:] for line in why.lines(view)[-2:]] == [
        f"fuse.mounted {mount}",
        f"fuse.mount_changed hung begins: 3 requests wait; {mount}",
    ]


@pytest.mark.parametrize(("count", "words"), [(0, "-"), (1, "1 FUSE mount"), (3, "3 FUSE mounts")])
def test_the_mounts_of_a_plugin_are_counted_with_its_devices(count: int, words: str) -> None:
    (line,) = [
        line
        for line in status.lines(
            state(plugin("node-a", "STUCK", mounts=count)), source="here", everything=False
        )
        if line.startswith("node-a")
    ]
    assert f"  {words}  " in line


def test_devices_that_pods_may_not_use_are_not_counted_as_if_they_could() -> None:
    down = plugin("a", "PLUGIN_DOWN", devices={"x/y": 20, "x/z": 2}, allocatable={"x/y": 0})
    shown = status.lines(state(down), source="here", everything=False)
    assert "x/y 0 of 20, x/z 2 listed, unconfirmed" in shown[-1]
    view = why.NodeView(node="a", source="x", state=state(down), events=None, since="1d")
    assert [line for line in why.lines(view) if "devices" in line] == [
        "  devices    x/y: 0 of 20",
        "  devices    x/z: 2 listed, unconfirmed",
    ]


def test_a_pod_whose_devices_another_pod_got_later_is_not_shown() -> None:
    def got(sequence: int, pod: str, *devices: str) -> codec.CloudEvent:
        data = vocabulary.AllocationObserved(
            node="a", at=AT, plugin="p", resource="x/y", device_ids=devices, pod=pod
        )
        event = past_events(1)[0]
        return msgspec.structs.replace(event, sequence=sequence, type=data.TYPE, data=data)

    events = [got(1, "ml/old", "0"), got(2, "ml/other", "1", "2"), got(3, "ml/new", "0", "1")]
    view = why.NodeView(node="a", source="x", state=state(plugin("a")), events=events, since="1d")
    assert [pod for pod, _ in view.pods] == ["ml/new", "ml/other"]
