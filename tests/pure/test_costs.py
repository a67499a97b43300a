"""No service does more than n log n work for n items that a peer can send or create.

Work is measured in calls of Python and C functions, which is exactly repeatable, and in processor
time, which is inexact but includes the work that a single call does on a large list.
"""

import collections
import datetime as dt
import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pytest

from muster import codec, vocabulary
from muster.vocabulary import AlertState
from muster_gate import callout
from muster_gate import config as gate_config
from muster_health.fleet import detector
from muster_health.model import config as health_config
from muster_health.model import signals, snapshot
from muster_labeler import config as labeler_config
from muster_labeler import model
from muster_labeler.kubernetes import projection
from muster_labeler.naming import feature_discovery
from muster_labeler.service import fleet, inventory_budget
from muster_notifier.routing import grouping, muting, routes
from muster_plugin.config import resources
from muster_plugin.discovery import resource_plan
from muster_plugin.inventory import inventory
from muster_plugin.model import advertised
from tests.worlds import gate_requests

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
SIZES: Final = (1, 4, 16)
CALLS_SLACK: Final = 1.2
TIME_SLACK: Final = 2.5
FOLLOWING_S: Final = 20.0
"""Enough time for suspicion, queries, verdicts and alerts."""
Work = Callable[[], object]
Prepare = Callable[[int], Work]
CASES: dict[str, tuple[int, Prepare]] = {}


def case(size: int) -> Callable[[Prepare], Prepare]:
    """Return a decorator that adds a case: `prepare(n)` returns the work for n from `size`."""

    def add(prepare: Prepare) -> Prepare:
        CASES[prepare.__name__] = size, prepare
        return prepare

    return add


def calls(work: Work) -> int:
    """Return how many functions are called, in Python and in C."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def seconds(work: Work) -> float:
    """Return the processor time that the work takes in this thread, in seconds."""
    gc.disable()
    try:
        began = time.thread_time()
        work()
        return time.thread_time() - began
    finally:
        gc.enable()


def excess(size: int, measure: Callable[[int], float]) -> float:
    """Return the largest factor by which the work of the larger sizes exceeds n log n."""
    first = measure(size)
    worst = 0.0
    for factor in SIZES[1:]:
        allowed = factor * math.log(factor * size) / math.log(size)
        worst = max(worst, measure(factor * size) / first / allowed)
    return worst


def event(data: vocabulary.Event, sequence: int = 1) -> codec.CloudEvent:
    """Return an event as its stream delivers it."""
    return codec.CloudEvent(
        id=str(sequence),
        source=f"/nodes/{data.node}/x",
        type=data.TYPE,
        time=data.at,
        instance="i",
        sequence=sequence,
        boot="",
        data=data,
        position=sequence,
    )


# health


def health(nodes: int) -> detector.Detector:
    """Return a detector that leads and expects a plugin on each node."""
    made = detector.Detector(
        health_config.Detection(),
        runbook_url="",
        at_zero=T0,
        has_cluster=True,
        restarts=None,
        bounds=None,
        leader=1,
    )
    expected = {f"n{number}": signals.Expected(age_s=0.0) for number in range(nodes)}
    made.receive(signals.ExpectedNodes(plugin="p", nodes=expected), 0.0)
    made.receive(signals.BusBack(at=T0), 0.0)
    return made


def beat(node: str, seq: int, plugin: str = "p") -> vocabulary.Heartbeat:
    resource = vocabulary.ResourceBeat(name="a/b", streams=1, probe_ok=True, probe_age_s=0.0)
    return vocabulary.Heartbeat(
        node=node, plugin=plugin, instance="i", seq=seq, interval_s=1.0, resources=(resource,)
    )


def fed(driven: detector.Detector, inputs: Iterable[signals.Input], now: float) -> None:
    """Give a detector inputs; answer its queries as if no plugin were running any more."""
    waiting = collections.deque(inputs)
    while waiting:
        for out in driven.receive(waiting.popleft(), now):
            waiting.extend(_answers(out))


def _answers(out: signals.Output) -> Iterator[signals.Input]:
    match out:
        case signals.Probe():
            yield signals.ProbeFailed(
                node=out.node, plugin=out.plugin, number=out.number, subscribed=False
            )
        case signals.AskCluster():
            yield signals.ClusterAnswered(
                node=out.node,
                plugin=out.plugin,
                number=out.number,
                facts=None,
                resources=out.resources,
            )
        case _:
            pass


def advance(driven: detector.Detector, until: float) -> None:
    """Handle all deadlines up to a time."""
    while (due := driven.next_deadline()) is not None and due <= until:
        answers = [answer for out in driven.tick(due) for answer in _answers(out)]
        fed(driven, answers, due)


def after(driven: detector.Detector, inputs: Iterable[signals.Input], now: float) -> None:
    """Give a detector inputs, and handle the deadlines of the following FOLLOWING_S seconds."""
    fed(driven, inputs, now)
    advance(driven, now + FOLLOWING_S)


def heard(driven: detector.Detector, nodes: int, seconds: int) -> None:
    """Let a heartbeat of each node arrive every second."""
    for now in range(1, seconds + 1):
        beats = [beat(f"n{number}", now) for number in range(nodes)]
        fed(driven, [signals.HeartbeatsArrived(heartbeats=beats)], float(now))
        advance(driven, float(now))


@case(30)
def heartbeats_of_all_nodes(n: int) -> Work:
    driven = health(n)
    return lambda: heard(driven, n, 3)


@case(25)
def all_nodes_fall_silent(n: int) -> Work:
    driven = health(n)
    heard(driven, n, 3)
    return lambda: advance(driven, 3.0 + FOLLOWING_S)


@case(20)
def all_nodes_fall_silent_one_by_one(n: int) -> Work:
    driven = health(n)
    heard(driven, n, 3)

    def work() -> None:
        for gone in range(n):
            now = 4 + gone * 60 / n
            beats = [beat(f"n{number}", 4 + gone) for number in range(gone, n, max(1, n // 50))]
            fed(driven, [signals.HeartbeatsArrived(heartbeats=beats)], now)
            advance(driven, now)

    return work


@case(50)
def connections_of_all_nodes_close(n: int) -> Work:
    driven = health(n)
    heard(driven, n, 3)
    closed = [
        signals.Disconnected(node=f"n{number}", plugin="p", server="s", client=1, reason="x")
        for number in range(n)
    ]
    return lambda: after(driven, closed, 3.5)


@case(50)
def plugin_names_that_one_node_invents(n: int) -> Work:
    driven = health(1)
    beats = [beat("n0", 1, f"p{number}") for number in range(n)]
    return lambda: after(driven, [signals.HeartbeatsArrived(heartbeats=beats)], 1.0)


@case(40)
def nodes_that_a_plugin_invents(n: int) -> Work:
    driven = health(1)
    beats = [beat(f"x{number}", 1) for number in range(n)]
    return lambda: after(driven, [signals.HeartbeatsArrived(heartbeats=beats)], 1.0)


def reported(devices: int, at: int, health: vocabulary.Health) -> signals.FromPlugin:
    listed = tuple(
        vocabulary.Device(id=f"d{number}", resource="a/b", health=health, reason="XID 79")
        for number in range(devices)
    )
    data = vocabulary.InventoryReported(node="n0", plugin="p", at=T0, devices=listed)
    return signals.FromPlugin(event=data, instance="i", sequence=at, position=at)


@case(60)
def devices_of_one_inventory(n: int) -> Work:
    driven = health(1)
    heard(driven, 1, 3)
    changes = [
        reported(n, 1, vocabulary.Health.HEALTHY),
        reported(n, 2, vocabulary.Health.UNHEALTHY),
    ]
    return lambda: after(driven, changes, 3.1)


@case(60)
def devices_that_fail_in_turn(n: int) -> Work:
    driven = health(1)
    heard(driven, 1, 3)
    fed(driven, [reported(n, 1, vocabulary.Health.HEALTHY)], 3.1)
    failed = [
        signals.FromPlugin(
            event=vocabulary.DeviceHealthChanged(
                node="n0",
                plugin="p",
                at=T0,
                resource="a/b",
                device_id=f"d{number}",
                health=vocabulary.Health.UNHEALTHY,
                reason="XID 79",
            ),
            instance="i",
            sequence=2 + number,
            position=2 + number,
        )
        for number in range(n)
    ]
    return lambda: after(driven, failed, 3.2)


def mount(number: int, *conditions: vocabulary.FuseCondition) -> vocabulary.FuseMount:
    return vocabulary.FuseMount(
        id=f"{number}-1", pod=f"a/p{number}", connection=number, conditions=conditions
    )


@case(40)
def mounts_of_one_inventory(n: int) -> Work:
    driven = health(1)
    heard(driven, 1, 3)
    listed = tuple(mount(number, vocabulary.FuseCondition.HUNG) for number in range(n))
    changes = [
        signals.FromPlugin(
            event=vocabulary.InventoryReported(
                node="n0", plugin="p", at=T0, devices=(), fuse_mounts=mounts
            ),
            instance="i",
            sequence=at,
            position=at,
        )
        for at, mounts in enumerate((listed, ()), start=1)
    ]
    return lambda: after(driven, changes, 3.1)


@case(40)
def mounts_that_hang_in_turn(n: int) -> Work:
    driven = health(1)
    heard(driven, 1, 3)
    hung = [
        signals.FromPlugin(
            event=vocabulary.FuseMountChanged(
                node="n0",
                plugin="p",
                at=T0,
                mount=mount(number),
                condition=vocabulary.FuseCondition.HUNG,
                holds=True,
            ),
            instance="i",
            sequence=1 + number,
            position=1 + number,
        )
        for number in range(n)
    ]
    return lambda: after(driven, hung, 3.2)


@case(40)
def states_that_are_restored(n: int) -> Work:
    driven = health(n)
    states = [
        signals.Restored(
            state=snapshot.Snapshot(
                node=f"n{number}", plugin="p", state=snapshot.State.HEALTHY, interval_s=1.0
            )
        )
        for number in range(n)
    ]
    return lambda: after(driven, states, 1.0)


# labeler


def nodes_of(names: Iterable[str], **settings: Any) -> fleet.Fleet:
    made = fleet.Fleet(labeler_config.Settings(**settings))
    made.replace([model.Node(name=name, capacity={"nvidia.com/gpu": 1}) for name in names])
    return made


def gpus(count: int) -> vocabulary.GpuNode:
    return vocabulary.GpuNode(
        gpus=tuple(
            vocabulary.Gpu(uuid=f"GPU-{number}", product="NVIDIA L4", memory_mib=23034)
            for number in range(count)
        )
    )


def inventory_of(
    node: str, plugin: str = "p", of: vocabulary.GpuNode | None = None
) -> codec.CloudEvent:
    data = vocabulary.InventoryReported(
        node=node, plugin=plugin, at=T0, devices=(), gpus=of or gpus(1)
    )
    return event(data)


@case(30)
def inventories_of_all_nodes(n: int) -> Work:
    names = [f"n{number}" for number in range(n)]
    nodes, events = nodes_of(names), [inventory_of(name) for name in names]

    def work() -> None:
        for reported in events:
            nodes.observe_inventory(reported)
            nodes.objection(), nodes.covering_scheme(), nodes.status(reported.node)
        nodes.view()
        projection.encode_inventory(*nodes.reported())

    return work


@case(30)
def inventories_under_names_that_one_node_invents(n: int) -> Work:
    nodes = nodes_of(["n0"])
    budget = inventory_budget.InventoryBudget(nodes)
    events = [inventory_of("n0", f"p{number}") for number in range(n)]

    def work() -> None:
        for reported in events:
            if budget.refusal(reported.data.subject, 0.0) is None:
                nodes.observe_inventory(reported)
            nodes.observe_inventory(reported)
            nodes.objection(), nodes.covering_scheme(), nodes.status("n0")
        nodes.view()
        nodes.reported()

    return work


@case(30)
def nodes_that_the_api_shows(n: int) -> Work:
    nodes = nodes_of([])
    shown = [model.Node(name=f"n{number}", version="1") for number in range(n)]

    def work() -> None:
        nodes.replace(shown)
        for node in shown:
            nodes.put(node)
            nodes.objection(), nodes.covering_scheme()
        nodes.take_unread()
        nodes.replace([])

    return work


@case(30)
def gpus_of_one_node(n: int) -> Work:
    profiles = [f"{number % 90}g.{number}gb" for number in range(n)]
    node = vocabulary.GpuNode(
        gpus=tuple(
            vocabulary.Gpu(
                uuid=f"GPU-{number}",
                product=f"NVIDIA L{number}",
                mig_enabled=True,
                mig=(vocabulary.MigDevice(uuid=f"MIG-{number}", profile=profile, gi=number, ci=0),),
            )
            for number, profile in enumerate(profiles)
        ),
        resources=tuple(
            vocabulary.GpuResource(name=f"a/{profile}", was="a/b", profile=profile)
            for profile in profiles
        ),
        mig_strategy="mixed",
    )
    nodes, reported = nodes_of(["n0"]), inventory_of("n0", of=node)
    return lambda: (nodes.observe_inventory(reported), feature_discovery.labels(node))


# notifier


def alert(number: int, state: AlertState, *, node: str, sequence: int) -> codec.CloudEvent:
    changed = vocabulary.AlertChanged(
        node=node,
        at=T0,
        plugin="p",
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.CRITICAL,
        state=state,
        fingerprint=f"{number:016}",
        summary="it is stuck",
        starts_at=T0,
        ends_at=T0 if state is AlertState.RESOLVED else None,
    )
    return event(changed, sequence)


def notified(alerts: Iterable[codec.CloudEvent]) -> None:
    """Let alerts arrive at once, and a receiver accept every notification."""
    timing = routes.Timing(group_wait_s=30, group_interval_s=300, repeat_interval_s=1500)
    root = routes.Route(key="{}", receivers=("r",), group_by=("node",), timing=timing)
    driven = grouping.Grouping(
        {"r": True}, root=root, muted_by=muting.Muting([], {}), at=T0, now=0.0
    )
    for received in alerts:
        driven.receive(received, 0.0)
    while (due := driven.next_deadline()) is not None and due <= 2_000:
        sent = collections.deque(driven.tick(due))
        while sent:
            sent.extend(driven.receive(grouping.Delivered(sent.popleft()), due))


def firing_then_resolved(n: int, node: Callable[[int], str]) -> list[codec.CloudEvent]:
    states = itertools.product((AlertState.FIRING, AlertState.RESOLVED), range(n))
    return [
        alert(number, state, node=node(number), sequence=sequence)
        for sequence, (state, number) in enumerate(states, start=1)
        if state is AlertState.FIRING or number % 2
    ]


@case(30)
def alerts_of_one_group(n: int) -> Work:
    alerts = firing_then_resolved(n, lambda _: "n0")
    return lambda: notified(alerts)


@case(20)
def alerts_of_a_group_each(n: int) -> Work:
    alerts = firing_then_resolved(n, lambda number: f"n{number}")
    return lambda: notified(alerts)


@case(40)
def one_alert_again_and_again(n: int) -> Work:
    alerts = [alert(1, AlertState.FIRING, node="n0", sequence=number) for number in range(n)]
    return lambda: notified(alerts)


# gate


@case(5)
def connections_of_as_many_nodes(n: int) -> Work:
    authorizer = callout.Authorizer(gate_config.Settings(), gate_requests.SIGNING)
    authorizer.ring = gate_requests.RING
    requests = [
        gate_requests.request(gate_requests.token(f"n{number}"), f"device-plugin n{number}")
        for number in range(n)
    ]
    at = gate_requests.NOW

    def work() -> None:
        for request in requests:
            assert isinstance(authorizer.decide(request, at=at, now=0.0), callout.Admitted)

    return work


# plugin


@case(40)
def devices_of_one_resource(n: int) -> Work:
    rule = resources.Resource(name="a/b", groups=(), env="", grace_s=60.0)
    units = tuple(
        advertised.Unit(id=f"d{number}", physical=f"d{number}", identity={0: f"d{number}"})
        for number in range(n)
    )
    whole = resource_plan.PlannedResource(name="a/b", rule=rule, units=units)
    rest = resource_plan.PlannedResource(name="a/b", rule=rule, units=units[::2])

    def work() -> None:
        devices = inventory.Inventory(node="n0", plugin="p")
        for now, offered in enumerate((whole, rest, whole, rest)):
            plan = resource_plan.Plan(resources=(offered,))
            devices.observe(plan, [rule], now=float(now), at=T0)
        devices.tick(now=1_000.0, at=T0)
        devices.units_to_check("a/b"), devices.devices("a/b"), devices.count("a/b")
        devices.snapshot(T0)

    return work


@pytest.mark.parametrize("name", CASES)
def test_no_work_grows_faster_than_n_log_n(name: str) -> None:
    size, prepare = CASES[name]
    assert excess(size, lambda n: calls(prepare(n))) < CALLS_SLACK
    assert excess(size, lambda n: min(seconds(prepare(n)) for _ in range(2))) < TIME_SLACK


def test_quadratic_work_is_noticed() -> None:
    def in_python(n: int) -> Work:
        return lambda: [abs(number) for _ in range(n) for number in range(n)]

    def in_c(n: int) -> Work:
        numbers = list(range(n))
        return lambda: [numbers.index(n - 1) for _ in range(n)]

    assert excess(20, lambda n: calls(in_python(n))) > CALLS_SLACK
    assert excess(200, lambda n: calls(in_c(n))) < CALLS_SLACK
    assert excess(200, lambda n: seconds(in_c(n))) > TIME_SLACK
