from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import codec, vocabulary
from muster.nats import heartbeat_sender
from muster.pb import deviceplugin_pb2 as dp
from muster.vocabulary import Health
from muster_plugin.config import gpus, resources
from muster_plugin.discovery import resource_plan, scan_result
from muster_plugin.gpu import container_spec, simulated
from muster_plugin.inventory import device_messages, inventory
from muster_plugin.kubelet import allocation, cdi, protobuf, registration_signals
from muster_plugin.model import advertised, gpu

AT = datetime(2026, 11, 1, tzinfo=UTC)
FUSE, KVM, TUN = (
    scan_result.Node(path=f"/dev/{name}", kind=scan_result.Kind.CHAR, major=10, minor=minor)
    for minor, name in enumerate(("fuse", "kvm", "net/tun"))
)
RULE = resources.Resource(
    name="a.com/fuse",
    groups=(resources.Group(devices=(resources.Entry(path="/dev/[fk]*"),), count=2),),
    expect=resources.Expect(min=4),
    grace_s=60.0,
)
EACH = resources.Resource(
    name="b.com/*",
    groups=(resources.Group(devices=(resources.Entry(regex="^net/.*$"),)),),
    per_match=True,
    env="",
    grace_s=60.0,
)
GPU_0, GPU_1 = (advertised.gpu_uuid("n1", index) for index in range(2))
GPU_RULE = resources.Resource(name="nvidia.com/gpu", groups=(), env="")
Events = list[vocabulary.PluginEvent]


def replica(uuid: str, number: int, *, gi: int | None = None) -> advertised.Unit:
    """Return one replica of a GPU, or of a MIG device of the first GPU."""
    part = gpu.Part(gpu=GPU_0 if gi is not None else uuid, gi=gi, ci=0 if gi is not None else None)
    return advertised.Unit(
        id=f"{uuid}::{number}",
        physical=uuid,
        identity={0: uuid},
        gpu=gpu.Device(part=part, uuid=uuid, index="0"),
    )


SHARED = resource_plan.PlannedResource(
    name="nvidia.com/gpu",
    rule=GPU_RULE,
    units=tuple(replica(uuid, number) for uuid in (GPU_0, GPU_1) for number in range(2)),
)


def look(
    devices: inventory.Inventory,
    *nodes: scan_result.Node,
    now: float = 0.0,
    configured: tuple[resources.Resource, ...] = (RULE,),
    offers: tuple[resource_plan.PlannedResource, ...] = (),
) -> Events:
    plan = resource_plan.plan(configured, scan_result.ScanResult(nodes=nodes))
    both = resource_plan.merged(plan, resource_plan.Plan(resources=offers))
    return devices.observe(both, [*configured, *(o.rule for o in offers)], now=now, at=AT)


def made() -> inventory.Inventory:
    devices = inventory.Inventory(node="n1", plugin="p")
    look(devices, FUSE, KVM, offers=(SHARED,))
    return devices


def fault(
    uuid: str,
    code: str = "c",
    reason: str = "broken",
    *,
    effect: gpu.Effect = gpu.Effect.UNHEALTHY,
    gi: int | None = None,
) -> gpu.FaultBegan:
    part = gpu.Part(gpu=uuid, gi=gi, ci=None if gi is None else 0)
    return gpu.FaultBegan(part=part, effect=effect, code=code, reason=reason, at=AT)


def fault_ended(uuid: str, code: str = "c") -> gpu.FaultEnded:
    return gpu.FaultEnded(
        part=gpu.Part(gpu=uuid),
        effect=gpu.Effect.UNHEALTHY,
        code=code,
        reason="it answers again",
        at=AT,
    )


def turned(
    device_id: str, health: Health, reason: str, code: str, *, pods: tuple[str, ...] = ()
) -> vocabulary.PluginEvent:
    return vocabulary.DeviceHealthChanged(
        node="n1",
        at=AT,
        plugin="p",
        resource="nvidia.com/gpu" if device_id.startswith("GPU") else "a.com/fuse",
        device_id=device_id,
        health=health,
        reason=reason,
        code=code,
        pods=pods,
    )


def removed(resource: str, device_id: str, reason: str) -> vocabulary.PluginEvent:
    return vocabulary.DeviceRemoved(
        node="n1", at=AT, plugin="p", resource=resource, device_id=device_id, reason=reason
    )


def test_every_match_has_as_many_ids_as_its_count() -> None:
    names = [device.id for device in made().devices("a.com/fuse")]
    assert names == ["fuse-0", "fuse-1", "kvm-0", "kvm-1"]


def test_a_device_that_appears_is_added_to_its_resource() -> None:
    devices = inventory.Inventory(node="n1", plugin="p")
    assert look(devices, configured=(EACH,)) == []
    device = vocabulary.Device(id=advertised.device_id("/dev/net/tun", 0), resource="b.com/net_tun")
    assert look(devices, TUN, configured=(EACH,)) == [
        vocabulary.DeviceAdded(node="n1", at=AT, plugin="p", device=device)
    ]


def test_a_device_that_goes_is_unhealthy_and_removed_after_the_grace_period() -> None:
    devices = made()
    gone = "/dev/kvm is gone"
    assert look(devices, FUSE, now=10.0, offers=(SHARED,)) == [
        turned("kvm-0", Health.UNHEALTHY, gone, "device-missing"),
        turned("kvm-1", Health.UNHEALTHY, gone, "device-missing"),
    ]
    assert devices.count("a.com/fuse") == {Health.HEALTHY: 2, Health.UNHEALTHY: 2}
    assert devices.shortage("a.com/fuse") == "expected at least 4 devices, found 2"
    assert devices.next_deadline() == 70.0
    assert devices.tick(now=70.0, at=AT) == [
        removed("a.com/fuse", "kvm-0", gone),
        removed("a.com/fuse", "kvm-1", gone),
    ]
    assert devices.unit("a.com/fuse", "kvm-0") is None


def test_a_device_that_a_pod_holds_stays_in_the_list() -> None:
    devices = made()
    devices.record_pods({"a.com/fuse": {"kvm-1": "team/train"}}, now=0.0, at=AT)
    assert look(devices, FUSE, now=10.0, offers=(SHARED,)) == [
        turned("kvm-0", Health.UNHEALTHY, "/dev/kvm is gone", "device-missing"),
        turned(
            "kvm-1",
            Health.UNHEALTHY,
            "/dev/kvm is gone",
            "device-missing",
            pods=("team/train",),
        ),
    ]
    assert devices.tick(now=70.0, at=AT) == [removed("a.com/fuse", "kvm-0", "/dev/kvm is gone")]
    assert devices.record_pods({}, now=80.0, at=AT) == [
        removed("a.com/fuse", "kvm-1", "/dev/kvm is gone")
    ]


def test_a_resource_stays_while_it_is_configured_and_one_named_by_a_match_goes_with_it() -> None:
    devices = inventory.Inventory(node="n1", plugin="p")
    both = (RULE, EACH)
    look(devices, FUSE, TUN, configured=both)
    look(devices, configured=both)
    assert [*devices.resources] == ["a.com/fuse", "b.com/net_tun"]
    devices.tick(now=60.0, at=AT)
    assert [*devices.resources] == ["a.com/fuse"]


def test_what_is_no_longer_configured_is_removed_at_once() -> None:
    devices = made()
    gone = look(devices, FUSE, KVM, TUN, configured=(EACH,), offers=(SHARED,))
    left = "no longer configured"
    assert gone[:4] == [
        removed("a.com/fuse", name, left) for name in ("fuse-0", "fuse-1", "kvm-0", "kvm-1")
    ]
    assert devices.resources == ("nvidia.com/gpu", "b.com/net_tun")


def test_devices_beyond_a_lowered_count_are_not_configured_and_not_missing() -> None:
    devices = made()
    fewer = msgspec.structs.replace(
        RULE, groups=tuple(msgspec.structs.replace(group, count=1) for group in RULE.groups)
    )
    left = "no longer configured"
    events = look(devices, FUSE, KVM, configured=(fewer,), offers=(SHARED,))
    assert events == [removed("a.com/fuse", name, left) for name in ("fuse-1", "kvm-1")]


def test_a_unit_that_new_rules_group_differently_is_another_unit() -> None:
    def paired(path: str) -> resources.Resource:
        entries = (resources.Entry(path="/dev/fuse"), resources.Entry(path=path))
        return resources.Resource(name="a.com/pair", groups=(resources.Group(devices=entries),))

    devices = inventory.Inventory(node="n1", plugin="p")
    look(devices, FUSE, KVM, TUN, configured=(paired("/dev/kvm"),))
    events = look(devices, FUSE, KVM, TUN, configured=(paired("/dev/net/tun"),))
    device = vocabulary.Device(id="fuse-0", resource="a.com/pair", health=Health.HEALTHY)
    assert events == [
        removed("a.com/pair", "fuse-0", "no longer configured"),
        vocabulary.DeviceAdded(node="n1", at=AT, plugin="p", device=device),
    ]
    assert look(devices, FUSE, configured=(paired("/dev/net/tun"),)) == [
        vocabulary.DeviceHealthChanged(
            node="n1",
            at=AT,
            plugin="p",
            resource="a.com/pair",
            device_id="fuse-0",
            health=Health.UNHEALTHY,
            reason="/dev/fuse is gone",
            code="device-missing",
        )
    ]


def test_two_entries_that_change_places_are_the_same_devices() -> None:
    def paired(*paths: str) -> resources.Resource:
        entries = tuple(resources.Entry(path=path, limit=2) for path in paths)
        first = resources.Entry(path="/dev/net/tun")
        return resources.Resource(
            name="a.com/pair", groups=(resources.Group(devices=(first, *entries)),)
        )

    devices = inventory.Inventory(node="n1", plugin="p")
    look(devices, FUSE, KVM, TUN, configured=(paired("/dev/kvm", "/dev/fuse"),))
    assert look(devices, FUSE, KVM, TUN, configured=(paired("/dev/fuse", "/dev/kvm"),)) == []


def test_of_two_matches_under_one_name_the_one_that_was_there_first_keeps_it() -> None:
    devices = inventory.Inventory(node="n1", plugin="p")
    rule = resources.Resource(
        name="b.com/*",
        per_match=True,
        groups=(resources.Group(devices=(resources.Entry(path="/dev/**"),)),),
    )
    beside = msgspec.structs.replace(TUN, path="/dev/net_tun")
    for first, second in ((TUN, beside), (beside, TUN)):
        devices = inventory.Inventory(node="n1", plugin="p")
        look(devices, first, configured=(rule,))
        assert devices.matched_devices == {"b.com/net_tun": first.path}
        plan = resource_plan.plan(
            [rule],
            scan_result.ScanResult(nodes=(first, second)),
            current_names=devices.matched_devices,
        )
        assert plan.problems == (
            f"b.com/net_tun: {first.path} and {second.path} would both have this name",
        )
        assert devices.observe(plan, [rule], now=1.0, at=AT) == []


def test_a_fault_makes_every_replica_of_its_gpu_unhealthy_and_is_published_once() -> None:
    devices = made()
    assert devices.apply_fault(fault(GPU_1)) == [turned(GPU_1, Health.UNHEALTHY, "broken", "c")]
    assert {device.id: device.reason for device in devices.devices("nvidia.com/gpu")} == {
        f"{GPU_0}::0": "",
        f"{GPU_0}::1": "",
        f"{GPU_1}::0": "broken",
        f"{GPU_1}::1": "broken",
    }
    assert devices.apply_fault(fault(GPU_1)) == []


def test_a_fault_of_a_gpu_reaches_all_its_mig_devices_and_one_of_an_instance_that_one() -> None:
    devices = inventory.Inventory(node="n1", plugin="p")
    parts = (("MIG-a", 1), ("MIG-b", 2))
    offers = tuple(
        resource_plan.PlannedResource(
            name=f"nvidia.com/{uuid.lower()}",
            rule=msgspec.structs.replace(GPU_RULE, name=f"nvidia.com/{uuid.lower()}"),
            units=(replica(uuid, 0, gi=gi),),
        )
        for uuid, gi in parts
    )
    look(devices, configured=(), offers=offers)

    def unhealthy() -> list[str]:
        return [
            d.physical for d in devices.snapshot(AT).event.devices if d.health is Health.UNHEALTHY
        ]

    devices.apply_fault(fault(GPU_0, gi=2))
    assert unhealthy() == ["MIG-b"]
    assert len(devices.apply_fault(fault(GPU_0, "whole"))) == 2
    assert unhealthy() == ["MIG-a", "MIG-b"]
    events = devices.apply_fault(fault_ended(GPU_0, "whole"))
    assert [e for e in events if e.health is Health.HEALTHY] == [  # type: ignore[attr-defined]
        vocabulary.DeviceHealthChanged(
            node="n1",
            at=AT,
            plugin="p",
            resource="nvidia.com/mig-a",
            device_id="MIG-a",
            health=Health.HEALTHY,
            reason="it answers again",
            code="whole",
        )
    ]
    assert unhealthy() == ["MIG-b"]


def test_a_gpu_is_healthy_again_when_its_last_fault_has_ended() -> None:
    devices = made()
    devices.apply_fault(fault(GPU_1, "other", "worn"))
    assert devices.apply_fault(fault(GPU_1)) == [turned(GPU_1, Health.UNHEALTHY, "broken", "c")]
    assert devices.apply_fault(fault_ended(GPU_1, "other")) == [
        turned(GPU_1, Health.UNHEALTHY, "it answers again; but broken", "other")
    ]
    assert devices.apply_fault(fault_ended(GPU_1)) == [
        turned(GPU_1, Health.HEALTHY, "it answers again", "c")
    ]
    assert devices.apply_fault(fault_ended(GPU_1)) == []


def test_a_condition_leaves_a_gpu_healthy() -> None:
    devices = made()
    devices.record_pods({"nvidia.com/gpu": {f"{GPU_1}::1": "team/train"}}, now=0.0, at=AT)
    warm = fault(GPU_1, "thermal", "it is hot", effect=gpu.Effect.DEGRADED)
    assert devices.apply_fault(warm) == [
        vocabulary.DeviceConditionChanged(
            node="n1",
            at=AT,
            plugin="p",
            resource="nvidia.com/gpu",
            device_id=GPU_1,
            condition=vocabulary.Condition.DEGRADED,
            holds=True,
            reason="it is hot",
            code="thermal",
            pods=("team/train",),
        )
    ]
    assert devices.count("nvidia.com/gpu") == {Health.HEALTHY: 4}
    assert devices.conditions("nvidia.com/gpu") == {vocabulary.Condition.DEGRADED: 2}


def test_a_gpu_that_is_faulty_at_the_first_scan_is_never_called_healthy() -> None:
    devices = inventory.Inventory(node="n1", plugin="p")
    assert devices.apply_fault(fault(GPU_0)) == []
    events = look(devices, configured=(), offers=(SHARED,))
    assert [
        event.device.health for event in events if isinstance(event, vocabulary.DeviceAdded)
    ] == [Health.HEALTHY if uuid == GPU_1 else Health.UNHEALTHY for uuid in sorted([GPU_0, GPU_1])]


def test_a_gpu_that_returns_with_a_fault_is_not_called_healthy() -> None:
    devices = made()
    gone = msgspec.structs.replace(SHARED, units=SHARED.units[2:])
    assert look(devices, FUSE, KVM, offers=(gone,)) == [
        turned(GPU_0, Health.UNHEALTHY, f"{GPU_0} is gone", "device-missing")
    ]
    devices.apply_fault(fault(GPU_0))
    assert look(devices, FUSE, KVM, offers=(SHARED,)) == []
    assert devices.count("nvidia.com/gpu") == {Health.HEALTHY: 2, Health.UNHEALTHY: 2}


def test_gpus_without_a_driver_are_a_shortage_and_a_node_without_gpus_has_none() -> None:
    devices = inventory.Inventory(node="n1", plugin="p")
    none = msgspec.structs.replace(SHARED, units=())
    look(devices, FUSE, KVM, offers=(none,))
    away = gpu.Scan(driver=gpu.Driver.NO_LIBRARY, problem="it is nowhere")
    devices.gpu_context = container_spec.AllocationContext(scan=away)
    assert devices.shortage("nvidia.com/gpu") == ""
    devices.gpu_context = container_spec.AllocationContext(
        scan=msgspec.structs.replace(away, on_bus=8)
    )
    text = "8 NVIDIA GPUs on the PCI bus cannot be used (no_library): it is nowhere"
    assert devices.shortage("nvidia.com/gpu") == text
    assert devices.shortage("a.com/fuse") == ""


def test_a_fault_of_an_unknown_gpu_changes_nothing() -> None:
    assert made().apply_fault(fault("GPU-unknown")) == []


def test_a_snapshot_has_every_device_with_its_reason_and_equal_replicas_once() -> None:
    devices = made()
    devices.apply_fault(fault(GPU_1))
    look(devices, FUSE, offers=(SHARED,))
    snapshot = devices.snapshot(AT).event
    listed = {d.id: (d.count, d.health, d.reason) for d in snapshot.devices}
    assert listed == {
        "fuse-0": (2, Health.HEALTHY, ""),
        "kvm-0": (1, Health.UNHEALTHY, "/dev/kvm is gone"),
        "kvm-1": (1, Health.UNHEALTHY, "/dev/kvm is gone"),
        f"{GPU_0}::0": (2, Health.HEALTHY, ""),
        f"{GPU_1}::0": (2, Health.UNHEALTHY, "broken"),
    }
    assert snapshot.resources == ("a.com/fuse", "nvidia.com/gpu")
    assert devices.snapshot(AT) == (snapshot, "")


def test_simulated_gpus_of_two_nodes_have_different_uuids() -> None:
    assert advertised.gpu_uuid("n2", 0) != GPU_0


@given(st.text(st.characters(min_codepoint=33, max_codepoint=0x2FFF), min_size=1, max_size=300))
def test_an_id_is_stable_short_and_plain(name: str) -> None:
    device_id = advertised.device_id(f"/dev/{name}", 999)
    assert device_id == advertised.device_id(f"/dev/{name}", 999)
    assert 0 < len(device_id) <= 63
    assert device_id.isascii()
    assert device_id.isprintable()


def test_ids_of_paths_that_only_look_alike_differ() -> None:
    paths = ["/dev/a/b", "/dev/a-b", "/dev/a b", "/x/a-b", "/dev/" + "x" * 80, "/dev/" + "x" * 81]
    assert len({advertised.device_id(path, 0) for path in paths}) == len(paths)


# Fault scripts


def test_a_fault_script_comes_to_what_holds_at_its_end() -> None:
    text = b"""
    {"device": 0, "xid": 79}
    {"device": 1, "xid": 48}
    nonsense
    {"device": 0, "clear": 79}
    {"device": 0, "xid": 1, "clear": 1}
    {"device": "GPU-2", "xid": 63}
    {"device": "GPU-9", "xid": 63}
    """
    assert simulated.parse_script(text, {"GPU-2": 2}) == simulated.Script(
        active=frozenset({(1, 48), (2, 63)}),
        bad_lines=(
            "line 4: JSON is malformed: invalid character (byte 8)",
            "line 6: set either xid or clear",
            "line 8: no GPU GPU-9",
        ),
    )


@given(st.binary(max_size=200))
def test_no_bytes_break_a_fault_script(text: bytes) -> None:
    simulated.parse_script(text, {})


# Allocation


def spec(path: str) -> advertised.DeviceSpec:
    return advertised.DeviceSpec(host_path=path, container_path=path, permissions="rw")


def test_allocate_answers_each_container_in_order_and_names_its_devices() -> None:
    fuse = allocation.Allocator(made(), "a.com/fuse")
    answers = fuse.allocate([["fuse-0", "fuse-1", "kvm-0", "fuse-0"], ["kvm-1"], []])
    assert answers == (
        advertised.ContainerResponse(
            devices=(spec("/dev/fuse"), spec("/dev/kvm")),
            environment={"MUSTER_DEVICES_A_COM_FUSE": "/dev/fuse,/dev/kvm"},
        ),
        advertised.ContainerResponse(
            devices=(spec("/dev/kvm"),), environment={"MUSTER_DEVICES_A_COM_FUSE": "/dev/kvm"}
        ),
        advertised.ContainerResponse(),
    )
    assert fuse.allocated == 4
    assert fuse.host_paths([["fuse-0", "kvm-0"], ["fuse-1"]]) == ("/dev/fuse", "/dev/kvm")


def test_a_unit_has_its_nodes_and_mounts_and_no_variable_where_none_is_configured() -> None:
    pair = resources.Group(
        devices=(
            resources.Entry(path="/dev/kvm", mount_path="/dev/virt/"),
            resources.Entry(path="/opt/lib", type=resources.NodeType.MOUNT, read_only=True),
        )
    )
    rule = resources.Resource(name="a.com/virt", groups=(pair,), env="")
    library = scan_result.Node(path="/opt/lib", kind=scan_result.Kind.DIRECTORY)
    devices = inventory.Inventory(node="n1", plugin="p")
    look(devices, KVM, library, configured=(rule,))
    assert allocation.Allocator(devices, "a.com/virt").allocate([["kvm-0"]]) == (
        advertised.ContainerResponse(
            devices=(
                advertised.DeviceSpec(
                    host_path="/dev/kvm", container_path="/dev/virt/kvm", permissions="rw"
                ),
            ),
            mounts=(
                advertised.Mount(host_path="/opt/lib", container_path="/opt/lib", read_only=True),
            ),
        ),
    )


def test_with_cdi_a_container_gets_names_that_the_spec_explains() -> None:
    rule = msgspec.structs.replace(RULE, cdi=True)
    devices = inventory.Inventory(node="n1", plugin="p")
    look(devices, KVM, configured=(rule,))
    assert allocation.Allocator(devices, "a.com/fuse").allocate([["kvm-1"]]) == (
        advertised.ContainerResponse(
            environment={"MUSTER_DEVICES_A_COM_FUSE": "/dev/kvm"}, cdi_devices=("a.com/fuse=kvm-1",)
        ),
    )
    edits = {
        "deviceNodes": [{"path": "/dev/kvm", "hostPath": "/dev/kvm", "permissions": "rw"}],
        "mounts": [],
    }
    assert msgspec.json.decode(cdi.spec("a.com/fuse", devices.offered("a.com/fuse"))) == {
        "cdiVersion": "0.6.0",
        "kind": "a.com/fuse",
        "devices": [
            {"name": "kvm-0", "containerEdits": edits},
            {"name": "kvm-1", "containerEdits": edits},
        ],
    }


def test_a_container_gets_the_uuids_of_its_gpus() -> None:
    gpus = allocation.Allocator(made(), "nvidia.com/gpu")
    assert gpus.allocate([[f"{GPU_1}::0", f"{GPU_0}::1", f"{GPU_1}::1"]]) == (
        advertised.ContainerResponse(environment={"NVIDIA_VISIBLE_DEVICES": f"{GPU_1},{GPU_0}"}),
    )


def test_an_unknown_id_is_refused_in_words_and_allocates_nothing() -> None:
    fuse = allocation.Allocator(made(), "a.com/fuse")
    with pytest.raises(advertised.AllocationError) as caught:
        fuse.allocate([["fuse-0"], ["nope"]])
    text = "a.com/fuse has no device 'nope'; it has fuse-0, fuse-1, kvm-0, kvm-1"
    assert (str(caught.value), fuse.allocated) == (text, 0)


def test_the_least_busy_physical_device_is_preferred_then_the_first_id() -> None:
    fuse = allocation.Allocator(made(), "a.com/fuse")
    everything = ["kvm-1", "fuse-1", "kvm-0", "fuse-0"]
    assert fuse.prefer(everything, [], 2) == ["fuse-0", "kvm-0"]
    fuse.allocate([["fuse-0"]])
    assert fuse.prefer(["kvm-1", "fuse-1", "kvm-0"], [], 1) == ["kvm-0"]
    assert fuse.prefer(["kvm-1", "fuse-1", "kvm-0"], ["fuse-1"], 2) == ["fuse-1", "kvm-0"]


def test_what_the_kubelet_offers_again_is_no_longer_counted_as_allocated() -> None:
    fuse = allocation.Allocator(made(), "a.com/fuse")
    fuse.allocate([["fuse-0", "kvm-0"]])
    fuse.prefer(["fuse-0", "fuse-1"], [], 1)
    assert fuse.allocated == 1


IDS = st.lists(st.sampled_from(["fuse-0", "fuse-1", "kvm-0", "kvm-1", "unknown", ""]), max_size=8)


@given(IDS, IDS, st.integers(-1, 9))
def test_a_preference_never_fails_and_never_names_what_was_not_offered(
    available: list[str], must_include: list[str], size: int
) -> None:
    fuse = allocation.Allocator(made(), "a.com/fuse")
    chosen = fuse.prefer(available, must_include, size)
    assert chosen == fuse.prefer(available, must_include, size)
    assert len(chosen) == len(set(chosen))
    assert len(chosen) == min(max(size, 0), len({*available, *must_include}))
    assert set(chosen) <= {*available, *must_include}
    assert set(chosen[: len(set(must_include))]) <= set(must_include)


# The kubelet's messages


def test_the_list_has_health_in_the_kubelets_words() -> None:
    devices = made()
    look(devices, FUSE)
    message = protobuf.device_list(devices.devices("a.com/fuse"))
    assert [(device.ID, device.health) for device in message.devices] == [
        ("fuse-0", "Healthy"),
        ("fuse-1", "Healthy"),
        ("kvm-0", "Unhealthy"),
        ("kvm-1", "Unhealthy"),
    ]


def test_the_numa_node_is_advertised_where_it_is_known() -> None:
    devices = [
        vocabulary.Device(id="a", resource="r", numa_node=1),
        vocabulary.Device(id="b", resource="r"),
    ]
    message = protobuf.device_list(devices)
    assert [[node.ID for node in device.topology.nodes] for device in message.devices] == [[1], []]
    assert not message.devices[1].HasField("topology")


def test_an_allocation_keeps_its_containers_separate_on_the_wire() -> None:
    fuse = allocation.Allocator(made(), "a.com/fuse")
    request = dp.AllocateRequest(
        container_requests=[
            dp.ContainerAllocateRequest(devices_ids=["fuse-0"]),
            dp.ContainerAllocateRequest(),
        ]
    )
    device = dp.DeviceSpec(container_path="/dev/fuse", host_path="/dev/fuse", permissions="rw")
    assert protobuf.allocated(fuse.allocate(protobuf.requested(request))) == dp.AllocateResponse(
        container_responses=[
            dp.ContainerAllocateResponse(
                devices=[device], envs={"MUSTER_DEVICES_A_COM_FUSE": "/dev/fuse"}
            ),
            dp.ContainerAllocateResponse(),
        ]
    )


def test_options_are_the_same_in_both_places_the_kubelet_looks() -> None:
    request = protobuf.register_request("a.com/fuse", "muster-x.sock", pre_start=True)
    assert request == dp.RegisterRequest(
        version="v1beta1",
        endpoint="muster-x.sock",
        resource_name="a.com/fuse",
        options=protobuf.options(pre_start=True),
    )


@pytest.mark.parametrize(
    ("code", "text", "permanent"),
    [
        ("UNKNOWN", 'requested API version "v1" is not supported by kubelet. Supported ...', True),
        ("UNKNOWN", 'the ResourceName "noslash" is invalid', True),
        ("UNKNOWN", "failed to dial device plugin: context deadline exceeded", False),
        ("UNAVAILABLE", "connection refused", False),
        ("UNIMPLEMENTED", "unknown service", True),
    ],
)
def test_only_a_refusal_that_a_retry_cannot_change_is_permanent(
    code: str, text: str, *, permanent: bool
) -> None:
    assert protobuf.is_permanent(code, text) is permanent


# The heartbeat

STATE = vocabulary.ResourceBeat(
    name="a.com/fuse",
    registered_age_s=10.0,
    streams=1,
    last_send_age_s=2.5,
    registrations=2,
    probe_ok=True,
    probe_ms=2.1,
    probe_age_s=1.0,
    devices=4,
    healthy=3,
    allocated=1,
)
NEVER = vocabulary.ResourceBeat(
    name="a.com/kvm", devices=1, problem="not registered yet, registering"
)
HEARTBEAT = vocabulary.Heartbeat(
    node="n1", plugin="p", instance="i", seq=7, interval_s=5.0, resources=(STATE, NEVER)
)


def test_a_heartbeat_that_is_too_large_is_cut_and_still_has_the_problems() -> None:
    wrong = msgspec.structs.replace(NEVER, problem="\0" * 2000, short="x" * 900, mismatch="y" * 900)
    resources = [msgspec.structs.replace(wrong, name=f"{n}.com/{'z' * 240}") for n in range(64)]
    large = msgspec.structs.replace(
        HEARTBEAT, resources=tuple(resources), problems=("p" * 2000,) * 21
    )
    heartbeat = heartbeat_sender.fit_heartbeat(large, codec.HEARTBEAT_BYTES_MAX)
    assert codec.decode_heartbeat(codec.encode_heartbeat(heartbeat)) == heartbeat
    assert [entry.name for entry in heartbeat.resources] == [entry.name for entry in resources]
    assert all(r.problem and r.short and r.mismatch for r in heartbeat.resources)


def test_a_heartbeat_that_fits_is_sent_as_it_is() -> None:
    assert heartbeat_sender.fit_heartbeat(HEARTBEAT, codec.HEARTBEAT_BYTES_MAX) == HEARTBEAT


def test_an_age_is_rounded_and_has_a_number_for_never() -> None:
    assert registration_signals.age_s(107.504, 110.0) == 2.5
    assert registration_signals.age_s(110.1, 110.0) == 0.0
    assert registration_signals.age_s(None, 110.0) == NEVER.registered_age_s


def test_readiness_names_what_is_missing_for_each_resource() -> None:
    assert registration_signals.readiness([STATE], probe_s=10.0) is None
    late = msgspec.structs.replace(STATE, probe_age_s=30.5)
    unprobed = msgspec.structs.replace(STATE, probe_ok=False, probe_age_s=-1.0)
    failed = msgspec.structs.replace(STATE, probe_ok=False)
    assert registration_signals.readiness([late, NEVER, unprobed, failed], probe_s=10.0) == (
        "a.com/fuse: the last self-probe was 30.5 s ago; a.com/kvm: not registered yet, "
        "registering; a.com/fuse: the self-probe has not run yet; a.com/fuse: the self-probe failed"
    )


@given(st.text(min_size=1), st.floats(0.1, 60))
def test_the_first_heartbeat_of_a_node_is_sent_within_the_interval(
    node: str, interval_s: float
) -> None:
    assert 0 <= heartbeat_sender.first_heartbeat_s(node, interval_s) <= interval_s
    assert heartbeat_sender.first_heartbeat_s(
        node, interval_s
    ) == heartbeat_sender.first_heartbeat_s(node, interval_s)


def test_a_change_of_sharing_reports_no_healthy_gpu_as_gone() -> None:
    devices = made()
    fewer = msgspec.structs.replace(SHARED, units=SHARED.units[::2])
    shared = gpus.Sharing(resources=(gpus.Shared(name="nvidia.com/gpu", replicas=2),))
    devices.gpu_context = container_spec.AllocationContext(rules=gpus.Gpus(sharing=shared))
    left = "no longer configured"
    assert look(devices, FUSE, KVM, offers=(fewer,)) == [
        removed("nvidia.com/gpu", f"{name}::1", left) for name in sorted([GPU_0, GPU_1])
    ]


def test_a_fault_is_published_once_more_when_the_pod_that_holds_the_device_is_known() -> None:
    devices, without_pods = made(), device_messages.FaultsWithoutPods()

    def named(holder: dict[str, str]) -> list[vocabulary.PluginEvent]:
        devices.record_pods({"nvidia.com/gpu": holder}, now=0.0, at=AT)
        return [*without_pods.named(devices.pods_holding, AT)]

    warm = fault(GPU_1, "thermal", "it is hot", effect=gpu.Effect.DEGRADED)
    events = [*devices.apply_fault(fault(GPU_1)), *devices.apply_fault(warm)]
    for event in events:
        without_pods.record(event)
    assert named({}) == []
    holder = {f"{GPU_1}::1": "team/train"}
    again = [msgspec.structs.replace(event, pods=("team/train",)) for event in events]
    assert named(holder) == again
    for event in again:
        without_pods.record(event)
    assert named(holder) == []


def test_a_fault_that_is_over_or_whose_device_is_gone_is_not_published_again() -> None:
    devices = made()
    holder = {"nvidia.com/gpu": {f"{GPU_1}::1": "team/train"}}
    broken = devices.apply_fault(fault(GPU_1))
    removed = vocabulary.DeviceRemoved(
        node="n1", plugin="p", at=AT, resource="nvidia.com/gpu", device_id=f"{GPU_1}::1"
    )
    over: list[list[vocabulary.PluginEvent]] = [
        devices.apply_fault(fault_ended(GPU_1)),
        [msgspec.structs.replace(removed, physical=GPU_1)],
    ]
    devices.record_pods(holder, now=0.0, at=AT)
    for ends in over:
        without_pods = device_messages.FaultsWithoutPods()
        for event in (*broken, *ends):
            without_pods.record(event)
        assert without_pods.named(devices.pods_holding, AT) == []
