"""`muster doctor`: what it concludes from what it observes."""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import muster
from muster.cli import doctor, doctor_findings
from muster.cli.doctor_facts import (
    Broken,
    Bus,
    Check,
    Commands,
    Finding,
    Leader,
    Level,
    NotSeen,
    Observations,
    Receivers,
)
from muster.fleet import health_state
from muster.kubernetes import installation
from muster.nats import streams
from tests.worlds import manifests

NOW: Final = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HERE: Final = Commands(muster="muster --context c", kubectl="kubectl --context c -n muster")
LEADS: Final = health_state.Service(revision=3, advisories="received", cluster={})
NAMES: Final = [
    *(stream.name for stream in streams.STREAMS),
    *(f"KV_{bucket.name}" for bucket in streams.BUCKETS),
]
RUNBOOKS: Final = muster.RUNBOOKS_URL


def pod(
    part: str,
    name: str = "",
    *,
    image: str = "muster:1",
    ready: bool = True,
    phase: str = "Running",
    container: Mapping[str, object] | None = None,
) -> installation.Pod:
    conditions = [{"type": "Ready", "status": str(ready), "message": "" if ready else "it waits"}]
    return msgspec.convert(
        {
            "metadata": {
                "name": name or f"{part}-0",
                "labels": {"app.kubernetes.io/name": part},
            },
            "spec": {"containers": [{"name": "x", "image": image}]},
            "status": {
                "phase": phase,
                "conditions": conditions,
                "containerStatuses": [{"name": "x", "ready": ready, **(container or {})}],
            },
        },
        installation.Pod,
    )


PODS: Final = [pod("muster-health"), pod("muster-notifier"), pod("muster-plugin")]


def plugin(node: str, verdict: str | None = "HEALTHY") -> health_state.Plugin:
    return health_state.Plugin(node=node, plugin="device-plugin", verdict=verdict)


def state(
    *plugins: health_state.Plugin, service: health_state.Service = LEADS
) -> health_state.State:
    return health_state.State(plugins=plugins, fleet=health_state.Fleet(), service=service)


def stores(**changed: Any) -> dict[str, streams.Usage | None]:
    usual: dict[str, streams.Usage | None] = {
        name: streams.Usage(name=name, stored_bytes=1024, bytes_max=1024 * 1024) for name in NAMES
    }
    for name, change in changed.items():
        usage = usual[name]
        assert usage is not None
        usual[name] = None if change is None else dataclasses.replace(usage, **change)
    return usual


def durable(stream: str = "MUSTER_ALERTS", **more: int) -> streams.Durable:
    return streams.Durable(stream=stream, name="notifier", **more)


WELL: Final = Observations(
    pods=PODS,
    bus=Bus(rights="as admin", server="nats-server 2.15.1", round_trip_s=0.002),
    stores=stores(),
    consumers=[durable()],
    leaders={"health": Leader("pod-a", NOW), "notifier": Leader("pod-b")},
    health=state(plugin("node-a")),
    versions={"muster-health-0": muster.__version__},
    certificates={},
    receivers=Receivers({"ops": "slack", "console": "console"}),
    refused={},
)


def judged(
    check: Check, changed: Mapping[str, Any], commands: Commands = HERE
) -> tuple[Level, str, str]:
    seen = dataclasses.replace(WELL, **changed)
    findings = {each.check: each for each in doctor_findings.evaluate(seen, commands, NOW)}
    assert list(findings) == list(Check)
    finding = findings[check]
    return finding.level, finding.text, finding.next_step


def test_a_well_muster_is_ok_in_every_check() -> None:
    findings = doctor_findings.evaluate(WELL, HERE, NOW)
    assert doctor_findings.exit_code(WELL, findings) == 0
    version = muster.__version__
    assert doctor.lines(findings, 0) == [
        "OK    pods           all 3 are ready (health 1, notifier 1, plugin 1); 0 restarts",
        "OK    images         muster:1",
        "OK    bus            nats-server 2.15.1; as admin; a round trip takes 2 ms",
        (
            "OK    streams        all 13 streams and buckets exist; the fullest is MUSTER_EVENTS "
            "with 0.0 of 1 MiB"
        ),
        "OK    consumers      1 durable consumer, 0 messages waiting",
        "OK    dead letters   none",
        "OK    leaders        health: pod-a since 2026-01-02 03:04 UTC; notifier: pod-b",
        "OK    health         it answers; 0 alerts firing",
        "OK    plugins        1 on 1 node, all well",
        f"OK    versions       {version}: this command and 1 other",
        "OK    certificates   none: NATS is used without TLS",
        "OK    receivers      ops (slack)",
        "OK    configuration  no plugin has refused its configuration",
        "",
        "muster works",
    ]


def test_muster_is_not_called_well_while_a_check_warns() -> None:
    seen = dataclasses.replace(WELL, receivers=Receivers({"ops": "slack"}, dead=["ops"]))
    findings = doctor_findings.evaluate(seen, HERE, NOW)
    code = doctor_findings.exit_code(seen, findings)
    assert (code, doctor.lines(findings, code)[-1]) == (0, "muster works, but see receivers")


DESCRIBE: Final = "kubectl --context c -n muster describe pods -l app.kubernetes.io/part-of=muster"
NOTIFIER_LOGS: Final = (
    "kubectl --context c -n muster logs deployment/muster-notifier --tail=50; "
    f"{RUNBOOKS}notifier_cannot_deliver.html"
)
RECENT: Final = {
    "restartCount": 3,
    "lastState": {
        "terminated": {
            "reason": "OOMKilled",
            "exitCode": 137,
            "finishedAt": "2026-01-02T02:30:00Z",
        }
    },
}
WAITING: Final = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}
NO_NODE: Final = {"type": "PodScheduled", "status": "False", "message": "no volume"}
UNSCHEDULED: Final = msgspec.convert(
    {
        "metadata": {"name": "muster-nats-0", "labels": {"app.kubernetes.io/name": "muster-nats"}},
        "status": {"phase": "Pending", "conditions": [NO_NODE]},
    },
    installation.Pod,
)
ROWS: Final = [
    (
        Check.PODS,
        {"pods": [*PODS[:2], pod("muster-plugin", ready=False, container=WAITING)]},
        (
            Level.FAIL,
            "no ready pod: muster-plugin (muster-plugin-0 CrashLoopBackOff)",
            DESCRIBE,
        ),
    ),
    (
        Check.PODS,
        {"pods": PODS[1:]},
        (Level.FAIL, "no ready pod: muster-health (there is no pod)", DESCRIBE),
    ),
    (
        Check.PODS,
        {"pods": [*PODS[1:], pod("muster-gate", ready=False), UNSCHEDULED]},
        (
            Level.FAIL,
            (
                "no ready pod: muster-nats (muster-nats-0 no volume), "
                "muster-gate (muster-gate-0 it waits), muster-health (there is no pod)"
            ),
            DESCRIBE,
        ),
    ),
    (
        Check.PODS,
        {"pods": [*PODS, pod("muster-plugin", "b", ready=False)]},
        (Level.WARN, "not ready: b: it waits", DESCRIBE),
    ),
    (
        Check.PODS,
        {"pods": [*PODS, pod("muster-gate", container=RECENT)]},
        (
            Level.WARN,
            "muster-gate-0: 3 restarts of x, the last at 02:30 UTC (OOMKilled, exit code 137)",
            "kubectl --context c -n muster logs muster-gate-0 --previous --tail=50",
        ),
    ),
    (
        Check.PODS,
        {
            "pods": [
                *PODS,
                pod("muster-keys", ready=False, phase="Succeeded"),
                # pods of `helm test`
                pod("muster-test", ready=False, phase="Failed"),
                pod("muster-test-device", ready=False, phase="Pending"),
            ]
        },
        (Level.OK, "all 3 are ready (health 1, notifier 1, plugin 1); 0 restarts", ""),
    ),
    (
        Check.IMAGES,
        {"pods": [*PODS, pod("muster-plugin", "b", image="muster:2")]},
        (
            Level.WARN,
            "muster-plugin runs muster:1 and muster:2",
            "kubectl --context c -n muster get deployments,daemonsets,statefulsets -o wide",
        ),
    ),
    (
        Check.BUS,
        {"bus": Broken("NATS at nats://a has not answered for 3 s: Connection refused")},
        (
            Level.FAIL,
            "NATS at nats://a has not answered for 3 s: Connection refused",
            (
                "kubectl --context c -n muster get pods -l app.kubernetes.io/name=muster-nats; "
                f"{RUNBOOKS}nats_down.html"
            ),
        ),
    ),
    (
        Check.BUS,
        {"bus": Bus(rights="as admin", server="nats-server 2", round_trip_s=0.6)},
        (
            Level.WARN,
            "nats-server 2; as admin; a round trip takes 600 ms",
            f"{RUNBOOKS}nats_down.html",
        ),
    ),
    (
        Check.STREAMS,
        {"stores": stores(MUSTER_ALERTS=None)},
        (
            Level.FAIL,
            "MUSTER_ALERTS: missing; health creates them when it connects",
            (
                "kubectl --context c -n muster rollout restart deployment/muster-health; "
                f"{RUNBOOKS}nats_down.html"
            ),
        ),
    ),
    (
        Check.STREAMS,
        {"stores": stores(MUSTER_OUTBOX={"stored_bytes": 1024 * 1024})},
        (
            Level.FAIL,
            "full and refusing messages: MUSTER_OUTBOX with 1.0 of 1 MiB",
            f"{RUNBOOKS}evictions.html",
        ),
    ),
    (
        Check.STREAMS,
        {"stores": stores(KV_muster_state={"stored_bytes": 900 * 1024})},
        (
            Level.WARN,
            "KV_muster_state with 0.9 of 1 MiB is nearly full",
            f"{RUNBOOKS}evictions.html",
        ),
    ),
    (
        Check.STREAMS,
        {"stores": stores(MUSTER_ALERTS={"away": ("muster-nats-2",)})},
        (
            Level.WARN,
            "MUSTER_ALERTS has no current copy on muster-nats-2",
            f"{RUNBOOKS}nats_down.html",
        ),
    ),
    (
        Check.STREAMS,
        {"stores": stores(MUSTER_ALERTS={"stored_bytes": 250 << 20, "bytes_max": 256 << 20})},
        (
            Level.WARN,
            (
                "MUSTER_ALERTS has 250 of 256 MiB, and its oldest message is 0 s old; messages "
                "should stay for at least 86400 s"
            ),
            f"{RUNBOOKS}evictions.html",
        ),
    ),
    (
        Check.CONSUMERS,
        {"consumers": [durable("MUSTER_OUTBOX")]},
        (Level.FAIL, "MUSTER_ALERTS has no consumer: no notifier runs", NOTIFIER_LOGS),
    ),
    (
        Check.CONSUMERS,
        {"consumers": [durable(waiting=2000, redelivered=1)]},
        (
            Level.WARN,
            "notifier of MUSTER_ALERTS: 2000 messages waiting, 1 redelivered",
            NOTIFIER_LOGS,
        ),
    ),
    (
        Check.DEAD_LETTERS,
        {"stores": stores(MUSTER_DLQ={"messages": 2})},
        (
            Level.WARN,
            "2 that could not be delivered or processed",
            f"muster --context c dlq list; {RUNBOOKS}dead_letters.html",
        ),
    ),
    (
        Check.DEAD_LETTERS,
        {"stores": stores(MUSTER_DLQ=None)},
        (Level.NOT_CHECKED, "MUSTER_DLQ is missing", ""),
    ),
    (
        Check.LEADERS,
        {"leaders": {"health": None, "notifier": Leader("pod-b")}},
        (
            Level.FAIL,
            "no leader for health",
            (
                "kubectl --context c -n muster logs deployment/muster-health --tail=50; "
                f"{RUNBOOKS}health_silent.html"
            ),
        ),
    ),
    (
        Check.LEADERS,
        {"leaders": {"health": Leader("pod-a"), "notifier": Leader("pod-b"), "labeler": None}},
        (
            Level.FAIL,
            "no leader for labeler",
            (
                "kubectl --context c -n muster logs deployment/muster-labeler --tail=50; "
                f"{RUNBOOKS}labeler_waits.html"
            ),
        ),
    ),
    (
        Check.HEALTH,
        {"health": Broken("health does not answer: HTTP 503")},
        (
            Level.FAIL,
            "health does not answer: HTTP 503",
            (
                "kubectl --context c -n muster logs deployment/muster-health --tail=50; "
                f"{RUNBOOKS}health_silent.html"
            ),
        ),
    ),
    (
        Check.HEALTH,
        {"health": state(service=msgspec.structs.replace(LEADS, is_disconnected=True))},
        (
            Level.FAIL,
            "health is disconnected from NATS; this is what it last received",
            (
                "kubectl --context c -n muster logs deployment/muster-health --tail=50; "
                f"{RUNBOOKS}health_impaired.html"
            ),
        ),
    ),
    (
        Check.HEALTH,
        {"health": state(service=msgspec.structs.replace(LEADS, notified="nobody", cluster="x"))},
        (
            Level.WARN,
            "Kubernetes: x",
            (
                "kubectl --context c -n muster logs deployment/muster-health --tail=50; "
                f"{RUNBOOKS}health_impaired.html"
            ),
        ),
    ),
    (
        Check.PLUGINS,
        {"health": state(plugin("a"), plugin("b", "PLUGIN_DOWN"), plugin("c", "MAINTENANCE"))},
        (
            Level.WARN,
            "1 of 3 not well: b device-plugin is PLUGIN_DOWN",
            f"muster --context c status; {RUNBOOKS}plugins_unwell.html",
        ),
    ),
    (
        Check.PLUGINS,
        {"health": state(*(plugin(node, None) for node in "abcde"))},
        (
            Level.FAIL,
            (
                "5 of 5 not well: a device-plugin is UNKNOWN, b device-plugin is UNKNOWN, "
                "c device-plugin is UNKNOWN and 2 more"
            ),
            f"muster --context c status; {RUNBOOKS}plugins_unwell.html",
        ),
    ),
    (
        Check.PLUGINS,
        {"health": state()},
        (
            Level.WARN,
            "health tracks no plugin",
            "kubectl --context c -n muster get pods -l app.kubernetes.io/name=muster-plugin",
        ),
    ),
    (
        Check.PLUGINS,
        {"health": Broken("away")},
        (Level.NOT_CHECKED, "health does not answer", ""),
    ),
    (
        Check.VERSIONS,
        {"versions": {"a": "0.0.1", "b": muster.__version__}},
        (
            Level.WARN,
            f"0.0.1: a; {muster.__version__}: b; this command: {muster.__version__}",
            "kubectl --context c -n muster get deployments,daemonsets,statefulsets -o wide",
        ),
    ),
    (
        Check.CERTIFICATES,
        {"certificates": {"NATS": NOW + timedelta(days=31)}},
        (Level.OK, "NATS is valid until 2026-02-02", ""),
    ),
    (
        Check.CERTIFICATES,
        {"certificates": {"NATS": NOW + timedelta(days=30)}},
        (Level.WARN, "NATS is valid until 2026-02-01", f"{RUNBOOKS}nats_down.html"),
    ),
    (
        Check.CERTIFICATES,
        {"certificates": {"NATS": NOW - timedelta(days=1)}},
        (Level.FAIL, "NATS is valid until 2026-01-01", f"{RUNBOOKS}nats_down.html"),
    ),
    (
        Check.CERTIFICATES,
        {"certificates": {name: NOW + timedelta(days=31 - n) for n, name in enumerate("abcd")}},
        (
            Level.WARN,
            (
                "d is valid until 2026-01-30, c is valid until 2026-01-31, "
                "b is valid until 2026-02-01 and 1 more"
            ),
            f"{RUNBOOKS}nats_down.html",
        ),
    ),
    (
        Check.RECEIVERS,
        {"receivers": Receivers({"console": "console"})},
        (
            Level.WARN,
            "nobody is notified yet: alerts go only to the notifier's log",
            "muster --context c notify setup slack",
        ),
    ),
    (
        Check.RECEIVERS,
        {"receivers": Receivers({"ops": "slack"}, ["pager"])},
        (Level.WARN, "the notifier skips: pager", NOTIFIER_LOGS),
    ),
    (
        Check.RECEIVERS,
        {"receivers": Receivers({"ops": "slack", "pager": "pagerduty"}, dead=["ops"])},
        (
            Level.WARN,
            "not all notifications could be delivered to ops",
            f"muster --context c dlq list; {RUNBOOKS}dead_letters.html",
        ),
    ),
    (
        Check.RECEIVERS,
        {"receivers": None},
        (Level.FAIL, "no notifier has published its receivers", NOTIFIER_LOGS),
    ),
    (
        Check.RECEIVERS,
        {"leaders": {"health": Leader("pod-a", NOW), "notifier": None}},
        (Level.FAIL, "no notifier leads, so nobody is notified", NOTIFIER_LOGS),
    ),
    (
        Check.CONFIGURATION,
        {"refused": {"node-a device-plugin": "resources: unknown field"}},
        (
            Level.WARN,
            "node-a device-plugin: resources: unknown field",
            f"muster --context c why node-a; {RUNBOOKS}configuration_refused.html",
        ),
    ),
]


@pytest.mark.parametrize(("check", "changed", "expected"), ROWS)
def test_each_check_has_its_level_its_words_and_its_next_step(
    check: Check, changed: dict[str, object], expected: tuple[Level, str, str]
) -> None:
    assert judged(check, changed) == expected


def test_without_a_cluster_no_step_needs_kubectl() -> None:
    level, text, step = judged(Check.RECEIVERS, {"receivers": None}, Commands())
    assert (level, text) == (Level.FAIL, "no notifier has published its receivers")
    assert step == f"{RUNBOOKS}notifier_cannot_deliver.html"


def test_every_runbook_that_is_named_exists() -> None:
    named = {
        word.removeprefix(RUNBOOKS)
        for _, _, (_, _, step) in ROWS
        for word in step.split()
        if word.startswith(RUNBOOKS)
    }
    assert len(named) > 5
    pages = manifests.ROOT / "docs/runbooks"
    assert [page for page in named if not (pages / page).with_suffix(".md").is_file()] == []


PARTS: Final = [field.name for field in dataclasses.fields(Observations)]


@given(
    unseen=st.dictionaries(st.sampled_from(PARTS), st.booleans()),
    rows=st.lists(st.sampled_from(ROWS), max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_the_exit_code_says_what_the_findings_say_and_nothing_is_left_out(
    unseen: dict[str, bool], rows: Sequence[tuple[Check, dict[str, object], object]]
) -> None:
    changed: dict[str, Any] = {key: value for row in rows for key, value in row[1].items()}
    hidden = {part: NotSeen(f"no {part}", is_refused=should) for part, should in unseen.items()}
    seen = dataclasses.replace(WELL, **(changed | hidden))
    findings = doctor_findings.evaluate(seen, HERE, NOW)
    code = doctor_findings.exit_code(seen, findings)
    levels = {finding.level for finding in findings}
    assert [finding.check for finding in findings] == list(Check)
    assert (code == 1) == (Level.FAIL in levels)
    if code == 2:
        assert any(unseen.values())
    if code == 0:
        assert not any(unseen.values())
    texts = [each.text for each in findings if each.level is Level.NOT_CHECKED]
    assert {part.why for part in hidden.values()} <= set(texts)
    wrong = [each for each in findings if each.level in {Level.WARN, Level.FAIL}]
    assert [each for each in wrong if not each.next_step] == []


def test_what_was_not_checked_says_why() -> None:
    finding = Finding(Check.PODS, Level.NOT_CHECKED, "no cluster is named")
    assert doctor.lines([finding], 2) == [
        "?     pods  not checked: no cluster is named",
        "",
        "not everything could be checked",
    ]


def test_a_reason_that_many_checks_share_is_printed_once() -> None:
    unused = "the cluster cannot be used"
    checks = (Check.BUS, Check.STREAMS, Check.LEADERS)
    findings = [
        Finding(Check.PODS, Level.NOT_CHECKED, "no such context"),
        *(Finding(check, Level.NOT_CHECKED, unused) for check in checks),
    ]
    assert doctor.lines(findings, 2) == [
        "?     pods     not checked: no such context",
        f"?     not checked: bus, streams, leaders: {unused}",
        "",
        "not everything could be checked",
    ]
    assert len(doctor.lines(findings[:3], 2)) == len(findings[:3]) + 2
