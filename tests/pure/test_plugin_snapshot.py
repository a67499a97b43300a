"""Thousands of devices: what is published about them, and the cost of that."""

import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from types import FrameType
from typing import Final

import msgspec
import pytest

from muster import codec, vocabulary
from muster.vocabulary import Device, Health
from muster_health.alerting import device_alerts as health_devices
from muster_plugin.config import resources
from muster_plugin.discovery import resource_plan
from muster_plugin.inventory import device_messages, inventory
from muster_plugin.model import advertised, gpu

AT: Final = datetime(2026, 11, 1, tzinfo=UTC)
GPU: Final = "nvidia.com/gpu"
FEW_UNHEALTHY = "only a few Unhealthy devices of each resource are listed"
UUIDS: Final = tuple(sorted(advertised.gpu_uuid("n1", index) for index in range(8)))
RULE: Final = resources.Resource(name=GPU, groups=(), env="")


def shared(replicas: int) -> inventory.Inventory:
    """Return an inventory of eight GPUs with a number of replicas each."""
    devices = inventory.Inventory(node="n1", plugin="p")
    parts = {uuid: gpu.Part(gpu=uuid) for uuid in UUIDS}
    of_gpus = tuple(
        advertised.Unit(
            id=f"{uuid}::{number}",
            physical=uuid,
            identity={0: uuid},
            gpu=gpu.Device(part=part, uuid=uuid, index="0"),
        )
        for uuid, part in parts.items()
        for number in range(replicas)
    )
    offer = resource_plan.PlannedResource(name=GPU, rule=RULE, units=of_gpus)
    events = devices.observe(resource_plan.Plan(resources=(offer,)), [RULE], now=0.0, at=AT)
    assert [e.device.count for e in events if isinstance(e, vocabulary.DeviceAdded)] == (
        [replicas] * len(UUIDS)
    )
    return devices


def fault(uuid: str, number: int) -> gpu.FaultBegan:
    return gpu.FaultBegan(
        part=gpu.Part(gpu=uuid),
        effect=gpu.Effect.UNHEALTHY,
        code=f"xid-{number}",
        reason=f"XID {number}",
        at=AT,
    )


def encoded(event: vocabulary.Event) -> bytes:
    return codec.encode(event, event_id="e", producer="p", instance="i", sequence=1, boot="b")


def calls(work: Callable[[], object]) -> int:
    """Return the number of calls of Python functions, which does not depend on other load."""
    count = 0

    def called(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_eight_gpus_in_a_thousand_replicas_each_fit_into_one_snapshot_that_health_accepts() -> None:
    many = shared(1000)
    many.apply_fault(fault(UUIDS[0], 79))
    event, problem = many.snapshot(AT)
    assert problem == ""
    read = codec.decode(event.subject, encoded(event)).data
    assert read == event
    register = health_devices.DeviceFaults(100)
    assert register.apply(read)
    assert register.totals == {GPU: 8000}
    assert [*register.by_group[vocabulary.AlertKind.DEVICE_UNHEALTHY, GPU]] == [UUIDS[0]]


def test_replicas_listed_one_by_one_by_an_earlier_version_count_as_before() -> None:
    register = health_devices.DeviceFaults(100)
    one_by_one = tuple(Device(id=f"{UUIDS[0]}::{n}", resource=GPU) for n in range(4))
    event = vocabulary.InventoryReported(node="n1", plugin="p", at=AT, devices=one_by_one)
    register.apply(msgspec.json.decode(msgspec.json.encode(event), type=type(event)))
    assert register.totals == {GPU: 4}


def test_replicas_of_a_gpu_that_are_removed_together_are_one_event() -> None:
    many = shared(1000)
    events = many.observe(resource_plan.Plan(), (), now=1.0, at=AT)
    assert [(e.physical, e.count) for e in events if isinstance(e, vocabulary.DeviceRemoved)] == [
        (uuid, 1000) for uuid in UUIDS
    ]


def nodes(count: int, bad: int, *, reason: str = "/dev/x is gone") -> list[Device]:
    return [
        Device(
            id=f"node-{number}",
            resource="a.com/x",
            health=Health.UNHEALTHY if number < bad else Health.HEALTHY,
            reason=reason if number < bad else "",
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("devices", "entries", "words"),
    [
        (nodes(100, 10), 100, ""),
        (nodes(10_000, 10), 11, "Healthy devices are only counted"),
        (nodes(10_000, 9_000), 22, FEW_UNHEALTHY),
        (nodes(10_000, 9_000, reason="\0" * 900), 22, FEW_UNHEALTHY),
    ],
)
def test_too_many_devices_are_summed_up_and_unhealthy_ones_are_listed_first(
    devices: list[Device], entries: int, words: str
) -> None:
    listed = device_messages.fit_list(
        devices, lambda some: len(msgspec.json.encode(some)) <= 300_000
    )
    assert len(listed.devices) == entries
    assert len(msgspec.json.encode(listed.devices)) <= 300_000
    assert listed.problem.endswith(words)
    assert sum(device.count for device in listed.devices) == len(devices)

    def healths(them: list[Device]) -> Counter[Health]:
        counted: Counter[Health] = Counter()
        for device in them:
            counted[device.health] += device.count
        return counted

    assert healths([*listed.devices]) == healths(devices)


def test_a_fault_costs_as_much_as_its_gpu_has_replicas_however_many_are_active() -> None:
    few, many = shared(50), shared(500)
    begins = [fault(uuid, number) for number in range(50) for uuid in UUIDS]

    def find(there: inventory.Inventory) -> int:
        there.devices(GPU)
        return calls(lambda: [there.apply_fault(finding) for finding in begins])

    costs = find(few), find(many)
    # the first cost is mainly one lookup for each GPU; there is no lookup for each device
    assert costs[1] < costs[0] * 10
    assert costs[0] < len(begins) * 250


def test_a_list_is_made_of_each_device_once_however_many_faults_are_active() -> None:
    many = shared(1000)
    for number in range(300):
        for uuid in UUIDS:
            many.apply_fault(fault(uuid, number))
    once = calls(lambda: many.devices(GPU))
    assert once < 8_000 * 12
    assert many.count(GPU) == {Health.UNHEALTHY: 8_000}
    # heartbeats and metrics read the list again, and nothing has changed
    assert calls(lambda: many.devices(GPU)) < 10
