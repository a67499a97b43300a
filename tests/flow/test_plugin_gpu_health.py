"""Faults of GPUs: the device lists at the kubelet, and the events on the bus."""

import asyncio
import re
import signal
import urllib.request
from typing import Final

from muster import vocabulary
from tests.worlds.nvml import node, scenes
from tests.worlds.nvml.node import GPU, UUIDS

Changed = vocabulary.DeviceHealthChanged
Turned = vocabulary.DeviceConditionChanged
HEALTHY: Final = vocabulary.Health.HEALTHY
UNHEALTHY: Final = vocabulary.Health.UNHEALTHY
FOREVER: Final = {"cooldown_s": 3600}


def test_a_gpu_lost_at_the_start_costs_the_other_seven_nothing() -> None:
    async def story() -> None:
        async with (
            node.node(scenes.h100x8().also("lost 3")) as here,
            here.plugin(here.configure()) as plugin,
        ):
            devices = await here.offers(GPU, healthy=7)
            assert {*devices} == {*UUIDS} - {UUIDS[3]}
            reported = (await here.event(vocabulary.InventoryReported)).gpus
            assert reported is not None
            assert [device.uuid for device in reported.gpus] == [*devices]
            assert reported.problem == "GPU 3 cannot be read: GPU_IS_LOST"
            problem = await plugin.logged("device_problem_detected")
            assert problem["problem"] == reported.problem

    node.run(story)


def test_a_gpu_lost_while_running_leaves_alone_makes_nobody_spin_and_returns() -> None:
    async def story() -> None:
        async with node.node(scenes.h100x8()) as here, here.plugin(here.configure()):
            await here.offers(GPU, healthy=8)
            here.gpus.add("lost 5")
            await here.unhealthy(GPU, UUIDS[5])
            lost = await here.event(Changed, device_id=UUIDS[5])
            assert (lost.health, lost.code, lost.reason) == (
                UNHEALTHY,
                "gpu-lost",
                "NVML reports that the GPU is lost",
            )
            unwatched = await here.event(Turned, device_id=UUIDS[5], holds=True)
            assert (unwatched.condition, unwatched.reason) == (
                "unmonitored",
                "it is lost: GPU_IS_LOST",
            )
            waits, mark = here.gpus.counts()["nvmlEventSetWait_v2"], len(here.beats.items)
            await here.beat(lambda _: len(here.beats.items) >= mark + 5)
            # the listener waits between its calls; without pauses there would be thousands
            assert here.gpus.counts()["nvmlEventSetWait_v2"] - waits < 50
            assert here.bad(GPU) == {UUIDS[5]}
            here.gpus.drop("lost")
            await here.unhealthy(GPU)
            back = await here.event(Changed, device_id=UUIDS[5], health=HEALTHY)
            assert back.reason == (
                "gpu-lost is over: 2 good polls in a row, no fault for 0 s, "
                "the driver requests no action"
            )
            await here.event(Turned, device_id=UUIDS[5], holds=False)
            here.gpus.xid(5, 94)
            await here.event(Changed, device_id=UUIDS[5], code="xid-94")

    node.run(story)


def test_an_xid_takes_all_replicas_of_its_gpu_and_recovers_them_all() -> None:
    async def story() -> None:
        sharing = {"resources": [{"name": GPU, "replicas": 4}]}
        async with (
            node.node(scenes.h100x8()) as here,
            here.plugin(here.configure({"sharing": sharing})),
        ):
            await here.offers(GPU, healthy=32)
            (got,) = await here.kubelet.allocate(name="train", resources={GPU: 1})
            await here.event(vocabulary.AllocationObserved, pod="default/train")
            uuid = got.ids[0].partition("::")[0]
            number = UUIDS.index(uuid)
            well = here.gpus.scene
            here.gpus.write(well.but(number, recovery=1))
            await here.event(Changed, code="recovery-reset")
            here.gpus.xid(number, 48)
            await here.unhealthy(GPU, *(f"{uuid}::{replica}" for replica in range(4)))
            bad = await here.event(Changed, code="xid-48")
            assert node.timeless(bad) == Changed(
                node=node.NAME,
                plugin="device-plugin",
                at=node.EPOCH,
                resource=GPU,
                device_id=uuid,
                health=UNHEALTHY,
                reason="XID 48: Double Bit ECC Error",
                code="xid-48",
                policy=(
                    "nvidia-compatible/any-other v1: unhealthy "
                    "(NVIDIA/k8s-device-plugin 1b826ac: unhealthy)"
                ),
                evidence=bad.evidence,
                pods=("default/train",),
            )
            assert [device.source for device in bad.evidence] == ["nvml-events", "nvml-poll"]
            assert bad.evidence[0].observed == "XID 48"
            here.gpus.write(well)
            await here.unhealthy(GPU)
            await here.event(Changed, health=HEALTHY)
            # one event for each change of the GPU, not for each replica
            assert [(device.code, device.health, device.pods) for device in here.of(Changed)] == [
                ("recovery-reset", UNHEALTHY, ("default/train",)),
                ("xid-48", UNHEALTHY, ("default/train",)),
                ("recovery-reset", UNHEALTHY, ("default/train",)),
                ("xid-48", HEALTHY, ("default/train",)),
            ]
            assert here.of(Changed)[2].reason.endswith("; but XID 48: Double Bit ECC Error")

    node.run(story)


def test_thousands_of_replicas_are_reported_and_a_burst_of_xids_takes_each_gpu_once() -> None:
    async def story() -> None:
        sharing = {"resources": [{"name": GPU, "replicas": 400}]}
        async with (
            node.node(scenes.h100x8()) as here,
            here.plugin(here.configure({"sharing": sharing, "health": FOREVER})) as plugin,
        ):
            await here.offers(GPU, healthy=3200)
            reported = await here.event(vocabulary.InventoryReported)
            assert [(device.physical, device.count) for device in reported.devices] == [
                (uuid, 400) for uuid in UUIDS
            ]
            assert reported.gpus is not None
            codes = range(200, 220)
            for code in codes:
                for number in (0, 5):
                    here.gpus.xid(number, code)
            bad = {f"{UUIDS[gpu]}::{replica}" for gpu in (0, 5) for replica in range(400)}
            await here.unhealthy(GPU, *bad)
            for uuid in (UUIDS[0], UUIDS[5]):
                await here.event(Changed, device_id=uuid, code=f"xid-{codes[-1]}")
            assert len(here.of(Changed)) == 2 * len(codes)
            address = (await plugin.logged("listening"))["http"]
            metrics = await asyncio.to_thread(_get, f"{address}/metrics")
            assert {
                'muster_plugin_xids_total{xid="219"} 2.0',
                'muster_plugin_gpu_active_faults{code="xid-219",effect="unhealthy"} 2.0',
                f'muster_plugin_devices{{health="Unhealthy",resource="{GPU}"}} 800.0',
                f'muster_plugin_device_conditions{{condition="degraded",resource="{GPU}"}} 0.0',
            } <= {*metrics.splitlines()}

    node.run(story)


def test_how_gpus_are_evaluated_is_changed_without_a_restart() -> None:
    async def story() -> None:
        rare = {"poll_s": 1000, "cooldown_s": 3600}
        async with node.node(scenes.h100x8()) as here:
            config = here.configure({"health": rare})
            async with here.plugin(config) as plugin:
                await here.offers(GPU, healthy=8)
                await plugin.logged("bus_connected")
                here.configure({"health": {**rare, "enable": "43", "poll_s": 0.1}})
                applied = await here.event(vocabulary.ConfigurationApplied)
                assert applied.restart == ()
                here.gpus.xid(2, 43)
                await here.unhealthy(GPU, UUIDS[2])
                here.gpus.write(here.gpus.scene.but(4, recovery=1))
                await here.unhealthy(GPU, UUIDS[2], UUIDS[4])
                assert here.kubelet.state().resources[GPU].registered == 1
                bad = here.directory / "policy.yaml"
                bad.write_text("version: 1\nrules: [{xids: [0], action: ignore}]\n")
                here.configure({"health": {**rare, "policy": str(bad)}})
                (problem,) = (await here.event(vocabulary.ConfigurationRefused)).problems
                assert problem.startswith(f"{bad}: rules[0].xids[0]: ")

    node.run(story)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310  # our own process
        return str(answer.read(), "utf-8")


def test_an_xid_takes_the_mig_device_it_names_and_one_that_names_none_the_whole_gpu() -> None:
    async def story() -> None:
        scene = scenes.a100_mig()
        device, two = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb"
        async with (
            node.node(scene) as here,
            here.plugin(here.configure({"migStrategy": "mixed", "health": FOREVER})),
        ):
            await here.offers(device, healthy=8)
            await here.offers(two, healthy=1)
            await here.offers(GPU, healthy=1)
            here.gpus.xid(1, 94, gi=9, ci=0)
            second = scene.mig_uuid(1, 2)
            await here.unhealthy(device, second)
            bad = await here.event(Changed)
            assert (bad.resource, bad.device_id, bad.evidence[0].observed) == (
                device,
                second,
                "XID 94 on GPU instance 9, compute instance 0",
            )
            here.gpus.xid(0, 79)
            await here.unhealthy(device, second, scene.mig_uuid(0, 0))
            await here.unhealthy(two, scene.mig_uuid(0, 2))
            here.gpus.xid(2, 79)
            await here.unhealthy(GPU, scene.gpus[2].uuid)
            await here.event(Changed, resource=GPU)
            assert {(e.resource, e.device_id, e.code) for e in here.of(Changed)} == {
                (device, second, "xid-94"),
                (device, scene.mig_uuid(0, 0), "xid-79"),
                (two, scene.mig_uuid(0, 2), "xid-79"),
                (GPU, scene.gpus[2].uuid, "xid-79"),
            }

    node.run(story)


def test_without_a_driver_there_are_no_gpus_and_with_one_there_are_without_a_restart() -> None:
    async def story() -> None:
        async with node.node() as here, here.plugin(here.configure()) as plugin:
            await here.offers(GPU)
            await here.beat(lambda beat: beat.resources[0].probe_ok)
            reported = (await here.event(vocabulary.InventoryReported)).gpus
            assert reported is not None
            assert reported.problem.startswith(
                "no GPU can be used (not_loaded): nvmlInit failed with DRIVER_NOT_LOADED: the"
            )
            here.gpus.write(scenes.h100x8())
            await here.offers(GPU, healthy=8)
            assert here.kubelet.state().resources[GPU].registered == 1
            await plugin.log.first(lambda line: line.get("device") == UUIDS[7])
            added = [line["device"] for line in plugin.log.items if "device" in line]
            assert added == [*UUIDS]

    node.run(story)


def test_a_gpu_that_is_taken_out_leaves_and_one_that_is_put_in_comes_without_a_restart() -> None:
    async def story() -> None:
        scene = scenes.h100x8().also("hotplug 1")
        async with node.node(scene) as here, here.plugin(here.configure({"grace_s": 0.3})):
            await here.offers(GPU, healthy=8)
            here.gpus.write(scene.without(6))
            await here.unhealthy(GPU, UUIDS[6])
            assert {*await here.offers(GPU, healthy=7)} == {*UUIDS} - {UUIDS[6]}
            here.gpus.write(scene)
            await here.offers(GPU, healthy=8)
            assert here.kubelet.state().resources[GPU].registered == 1
            await here.event(vocabulary.DeviceRemoved, device_id=UUIDS[6])
            assert {event.device_id for event in here.of(Changed)} == {UUIDS[6]}

    node.run(story)


def test_gpus_that_are_repartitioned_take_their_old_devices_away_and_bring_new_ones() -> None:
    async def story() -> None:
        scene = scenes.a100_mig()
        device, two, three = scenes.A100_40GB[:3]
        small, middle, large = (f"nvidia.com/mig-{p.name}" for p in (device, two, three))
        async with (
            node.node(scene) as here,
            here.plugin(here.configure({"migStrategy": "mixed", "grace_s": 0.5})) as plugin,
        ):
            await here.offers(small, healthy=8)
            await here.offers(middle, healthy=1)
            divided = scene.carved(0, scenes.Mig(profile=device, slot=0, gi=9)).carved(
                1,
                scenes.Mig(profile=three, slot=0, gi=1),
                scenes.Mig(profile=three, slot=1, gi=2),
            )
            here.gpus.write(divided)
            here.gpus.event(1, 0x100)
            gone = {scene.mig_uuid(1, slot) for slot in range(7)}
            await here.unhealthy(small, *gone)
            new = await here.offers(large, healthy=2)
            assert {*new} == {divided.mig_uuid(1, 0), divided.mig_uuid(1, 1)}
            assert {*await here.offers(small, healthy=1)} == {scene.mig_uuid(0, 0)}
            await here.event(vocabulary.DeviceRemoved, resource=middle)
            # a resource that exists only because of its devices ends with the last one
            await here.kubelet.until(lambda state: state.resources[middle].is_stopped)
            removed = {e.device_id for e in here.of(vocabulary.DeviceRemoved)}
            assert removed == {*gone, scene.mig_uuid(0, 2)}
            assert here.kubelet.state().resources[small].registered == 1
            # devices that were not repartitioned never changed their health
            left_alone = {scene.mig_uuid(0, 0), scene.gpus[2].uuid}
            assert {e.device_id for e in here.of(Changed)}.isdisjoint(left_alone)
            assert plugin.process.returncode is None

    node.run(story)


def test_while_nvml_hangs_the_node_goes_on_and_says_that_nothing_monitors_its_gpus() -> None:
    async def story() -> None:
        async with node.node(scenes.h100x8()) as here, here.plugin(here.configure()):
            await here.offers(GPU, healthy=8)
            await here.beat(lambda beat: beat.resources[0].unmonitored == 0)
            here.gpus.add("hang call=*")
            mark = len(here.beats.items)
            (got,) = await here.kubelet.allocate(name="train", resources={GPU: 8})
            assert len(got.ids) == 8
            blind = await here.beat(lambda beat: beat.resources[0].unmonitored == 8)
            # heartbeats continued until the hang was noticed; unmonitored GPUs stay Healthy
            assert len(here.beats.items) - mark >= 5
            assert blind.resources[0].healthy == 8
            assert min(blind.checkers["gpu_poll"], blind.checkers["gpu_events"]) > 4
            reported = await here.event(Turned, holds=True)
            assert (reported.condition, reported.code, reported.pods) == (
                vocabulary.Condition.UNMONITORED,
                "unwatched",
                ("default/train",),
            )
            assert reported.reason.startswith("NVML has not answered for 5 s")
            here.gpus.drop("hang")
            await here.beat(lambda beat: beat.resources[0].unmonitored == 0)
            await here.event(Turned, holds=False)
            assert here.of(Changed) == []
            here.gpus.xid(0, 79)
            await here.event(Changed, code="xid-79")

    node.run(story)


def test_it_ends_in_order_and_in_time_while_nvml_hangs() -> None:
    async def story() -> None:
        async with node.node(scenes.h100x8()) as here, here.plugin(here.configure()) as plugin:
            await here.offers(GPU, healthy=8)
            await plugin.logged("bus_connected")
            requested = here.gpus.counts()["nvmlDeviceGetFieldValues"]
            here.gpus.add("hang call=nvmlDeviceGetFieldValues")
            while here.gpus.counts()["nvmlDeviceGetFieldValues"] < requested + 8:
                await asyncio.sleep(0.01)
            async with asyncio.timeout(30):
                assert await plugin.end() == 0
            assert (await here.event(vocabulary.PluginStopping)).reason == "signal"

    node.run(story)


def test_a_gpu_is_well_again_after_quiet_and_needs_twice_as_much_the_next_time() -> None:
    async def story() -> None:
        quiet_s, late_s = 0.8, 0.1
        health = {"good": 3, "cooldown_s": quiet_s}
        async with (
            node.node(scenes.h100x8()) as here,
            here.plugin(here.configure({"health": health})),
        ):
            await here.offers(GPU, healthy=8)
            here.gpus.xid(4, 94)
            first = await here.event(Changed, health=UNHEALTHY)
            well = await here.event(Changed, health=HEALTHY)
            assert (well.at - first.at).total_seconds() > quiet_s - late_s
            here.gpus.xid(4, 94)
            after = here.events.items.index(well) + 1
            worse = await here.event(Changed, after=after, health=UNHEALTHY)
            better = await here.event(Changed, after=after, health=HEALTHY)
            observed = worse.evidence[-1].observed
            assert re.fullmatch(r"unhealthy again \d+ s after it recovered", observed)
            assert (better.at - worse.at).total_seconds() > 2 * quiet_s - late_s

    node.run(story)


def test_a_gpu_that_is_bad_at_the_start_is_bad_after_every_start_until_it_is_well() -> None:
    async def story() -> None:
        async with node.node(scenes.h100x8().but(2, recovery=1)) as here:
            config = here.configure()
            for number in (signal.SIGTERM, signal.SIGKILL):
                async with here.plugin(config) as plugin:
                    added = await plugin.log.first(lambda line: line.get("device") == UUIDS[2])
                    # the GPU was never reported as Healthy
                    assert (added["event"], added["reason"]) == (
                        "device_added",
                        "the driver requests a reset of the GPU",
                    )
                    await here.offers(GPU, healthy=7, unhealthy=1)
                    assert here.bad(GPU) == {UUIDS[2]}
                    await plugin.end(number)
            async with here.plugin(config):
                await here.offers(GPU, healthy=7, unhealthy=1)
                here.gpus.write(scenes.h100x8())
                await here.unhealthy(GPU)

    node.run(story)


def test_a_driver_that_was_replaced_ends_the_process_in_order_and_says_why() -> None:
    async def story() -> None:
        async with node.node(scenes.h100x8()) as here:
            config = here.configure()
            async with here.plugin(config) as plugin:
                await here.offers(GPU, healthy=8)
                await plugin.logged("bus_connected")
                here.gpus.add("epoch 1 18", "init 18")
                assert await plugin.process.wait() == 0
                assert (await here.event(vocabulary.PluginStopping)).reason == "upgrade"
                problem = (await plugin.logged("driver_replaced"))["problem"]
                assert problem.startswith(
                    "nvmlInit failed with LIB_RM_VERSION_MISMATCH: the loaded"
                )
            here.gpus.drop("init")
            async with here.plugin(config):
                await here.offers(GPU, healthy=8)

    node.run(story)


def test_a_gpu_that_answers_nonsense_costs_no_other() -> None:
    async def story() -> None:
        async with node.node(scenes.h100x8()) as here:
            here.gpus.add("error call=nvmlDeviceGetName gpu=3 code=28")
            here.gpus.add("error call=nvmlDeviceGetUUID gpu=4 code=1")
            async with here.plugin(here.configure()):
                offered = {*await here.offers(GPU, healthy=6)}
                assert offered == {*UUIDS} - {UUIDS[3], UUIDS[4]}
                here.gpus.add("error call=nvmlDeviceGetTemperature gpu=0 code=28")
                here.gpus.xid(5, 79)
                await here.unhealthy(GPU, UUIDS[5])

    node.run(story)
