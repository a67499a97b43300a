"""The plugin's answers to Allocate on a node with GPUs, by its settings."""

import re
from pathlib import Path
from typing import Any, Final

import msgspec

from muster import vocabulary
from muster.pb import deviceplugin_pb2 as dp
from tests.worlds.nvml import fake, node, scenes
from tests.worlds.nvml.node import GPU, UUIDS

FUSE: Final = "smarter-devices/fuse"
BELOW: Final = "/var/run/nvidia-container-devices"
VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"
CDI: Final = "k8s.device-plugin.nvidia.com"
Answer = dp.ContainerAllocateResponse


def mounts(*names: str) -> list[dp.Mount]:
    return [dp.Mount(host_path="/dev/null", container_path=f"{BELOW}/{name}") for name in names]


def nodes(root: str, *names: str) -> list[dp.DeviceSpec]:
    return [
        dp.DeviceSpec(host_path=f"{root}/dev/{n}", container_path=f"/dev/{n}", permissions="rw")
        for n in names
    ]


def annotated(*devices: str) -> dict[str, str]:
    return {"cdi.k8s.io/nvidia-device-plugin_ANY": ",".join(devices)}


def fuse_device(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Create a device node in a directory; return it, and the rule that advertises it."""
    fuse = directory / "fuse"
    fuse.symlink_to("/dev/null")
    return fuse, {"name": FUSE, "groups": [{"devices": [{"path": str(fuse)}]}]}


def given(root: str, *gpus: int) -> list[tuple[dict[str, Any], Answer]]:
    """Return settings, each with the answer of NVIDIA's plugin (internal/plugin/server.go)."""
    uuids = [UUIDS[n] for n in gpus]
    qualified = [f"{CDI}/gpu={uuid}" for uuid in uuids]
    by_uuid, by_index = {VISIBLE: ",".join(uuids)}, {VISIBLE: ",".join(map(str, gpus))}
    switched = {"NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled"}
    # the number of a device node is not the index, as on real machines
    there = nodes(root, "nvidiactl", "nvidia-uvm", *(f"nvidia{n + 3}" for n in gpus))
    cri = Answer(cdi_devices=[dp.CDIDevice(name=name) for name in qualified])
    return [
        ({}, Answer(envs=by_uuid)),
        ({"deviceIds": "index"}, Answer(envs=by_index)),
        ({"deviceList": ["volume-mounts"]}, Answer(envs={VISIBLE: BELOW}, mounts=mounts(*uuids))),
        ({"deviceList": ["cdi-annotations"]}, Answer(annotations=annotated(*qualified))),
        ({"deviceList": ["cdi-cri"]}, cri),
        (
            {"deviceList": ["envvar", "cdi-annotations"], "gds": True, "mofed": True},
            Answer(
                envs=by_uuid | switched,
                annotations=annotated(*qualified, f"{CDI}/gds=all", f"{CDI}/mofed=all"),
            ),
        ),
        ({"deviceSpecs": True, "devRoot": root}, Answer(envs=by_uuid, devices=there)),
        ({"deviceSpecs": True, "devRoot": root, "deviceList": ["cdi-cri"]}, cri),
    ]


def unnumbered(answer: Answer) -> bytes:
    """Return an answer's bytes, without the random part of an annotation's name."""
    plain = Answer()
    plain.CopyFrom(answer)
    for key, value in answer.annotations.items():
        del plain.annotations[key]
        plain.annotations[re.sub(r"_[0-9a-f]{32}$", "_ANY", key)] = value
    return plain.SerializeToString(deterministic=True)


def test_every_strategy_gives_byte_for_byte_what_nvidias_plugin_gives_without_a_restart() -> None:
    async def story() -> None:
        async with node.node(scenes.h100x8()) as here, here.plugin(here.configure()) as plugin:
            (here.directory / "dev").mkdir()
            for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(8))):
                (here.directory / "dev" / name).touch()
            await here.offers(GPU, healthy=8)
            root = str(here.directory)
            for (response, device), (_, other) in zip(
                given(root, 0, 1), given(root, 1, 0), strict=True
            ):
                if response:
                    after = len(plugin.log.items)
                    here.configure({"given": response})
                    await plugin.logged("configuration_applied", after=after)
                (got,) = await here.kubelet.allocate(name="train", resources={GPU: 2})
                assert got.ids == UUIDS[:2]
                # the kubelet may name the devices in any order
                assert unnumbered(got.answer) in {unnumbered(device), unnumbered(other)}, response
                here.kubelet.release(name="train")
            assert here.kubelet.state().resources[GPU].registered == 1

    node.run(story)


def test_a_mig_device_gets_by_its_uuid_or_by_both_indices() -> None:
    async def story() -> None:
        scene = scenes.a100_mig()
        small = "nvidia.com/mig-2g.10gb"
        async with (
            node.node(scene) as here,
            here.plugin(here.configure({"migStrategy": "mixed"})) as plugin,
        ):
            for ids, name in (("uuid", scene.mig_uuid(0, 2)), ("index", "0:2")):
                after = len(plugin.log.items)
                if ids != "uuid":
                    here.configure({"migStrategy": "mixed", "given": {"deviceIds": ids}})
                    await plugin.logged("configuration_applied", after=after)
                await here.offers(small, healthy=1)
                (got,) = await here.kubelet.allocate(name="train", resources={small: 1})
                assert got.answer == Answer(envs={VISIBLE: name})
                here.kubelet.release(name="train")

    node.run(story)


def test_device_nodes_and_gpus_are_one_process() -> None:
    async def story() -> None:
        async with node.node(scenes.h100x8()) as here:
            fuse, rule = fuse_device(here.directory)
            async with here.plugin(here.configure(resources=[rule])):
                await here.offers(FUSE, healthy=1)
                await here.offers(GPU, healthy=8)
                got = await here.kubelet.allocate(name="train", resources={FUSE: 1, GPU: 1})
                answers = {device.resource: device.answer for device in got}
                assert [spec.host_path for spec in answers[FUSE].devices] == [str(fuse)]
                assert answers[GPU] == Answer(envs={VISIBLE: UUIDS[0]})
                fuse.unlink()
                await here.offers(FUSE, unhealthy=1)
                here.gpus.xid(7, 79)
                await here.unhealthy(GPU, UUIDS[7])
                beat = await here.beat(lambda beat: len(beat.resources) == 2)
                assert {device.name for device in beat.resources} == {FUSE, GPU}

    node.run(story)


MANIFEST: Final = """
apiVersion: v1
kind: ConfigMap
metadata: {name: sharing}
data:
  config.yaml: |
    version: v1
    sharing:
      timeSlicing:
        resources: [{name: nvidia.com/gpu, replicas: 2}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: nvidia-device-plugin-daemonset}
spec:
  template:
    spec:
      containers:
        - name: plugin
          args: [--device-id-strategy=index]
          env:
            - {name: DEVICE_LIST_STRATEGY, value: volume-mounts}
            - {name: DP_DISABLE_HEALTHCHECKS, value: "94"}
            - {name: DP_ENABLE_HEALTHCHECKS, value: "31"}
"""


def test_a_removed_section_takes_the_gpus_from_the_kubelet_and_from_snapshots() -> None:
    async def story() -> None:
        async with node.node(scenes.h100x8()) as here:
            _, rule = fuse_device(here.directory)
            config = here.configure(resources=[rule], snapshot_period_s=1)
            async with here.plugin(config) as plugin:
                await here.offers(GPU, healthy=8)
                reported = await here.event(vocabulary.InventoryReported)
                assert reported.gpus is not None
                assert len(reported.gpus.gpus) == 8
                settings = msgspec.json.decode(config.read_bytes())
                del settings["gpus"]
                fresh = config.with_suffix(".new")
                fresh.write_bytes(msgspec.json.encode(settings))
                fresh.replace(config)
                applied = await plugin.logged("configuration_applied")
                assert applied["removed"] == [GPU]
                seen = len(here.events.items)
                reported = await here.event(vocabulary.InventoryReported, after=seen)
                assert reported.resources == (FUSE,)
                assert reported.gpus is None
                assert {device.resource for device in reported.devices} == {FUSE}

    node.run(story)


def test_the_manifests_of_nvidias_plugin_run_ours_as_they_are() -> None:
    async def story() -> None:
        async with node.node(scenes.h100x8()) as here:
            manifest = here.directory / "nvidia.yaml"
            manifest.write_text(MANIFEST)
            response = msgspec.json.decode(here.configure().read_bytes())
            environment = {
                "MUSTER_PLUGIN__NODE": node.NAME,
                "MUSTER_PLUGIN__BUS__URL": response["bus"]["url"],
                "MUSTER_PLUGIN__KUBELET__DIRECTORY": str(here.directory),
                "MUSTER_PLUGIN__GPUS__LIBRARY": str(fake.built()),
            }
            async with here.plugin(manifest, "--config-format", "nvidia", **environment):
                await here.offers(GPU, healthy=16)
                (got,) = await here.kubelet.allocate(name="train", resources={GPU: 1})
                assert got.answer == Answer(envs={VISIBLE: BELOW}, mounts=mounts("0"))
                here.gpus.xid(0, 94)
                here.gpus.xid(6, 31)
                await here.unhealthy(GPU, f"{UUIDS[6]}::0", f"{UUIDS[6]}::1")

    node.run(story)
