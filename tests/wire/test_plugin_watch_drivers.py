"""Drivers that register over the plugin registry, hardware, and CDI files."""

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster import vocabulary
from muster.pb import pluginregistration_pb2 as pr
from muster.pb import podresources_pb2 as podres
from muster_plugin.config import watch as config_watch
from muster_plugin.kubelet import podresources
from muster_plugin.watch import (
    expectation,
    hardware,
    node_files,
    node_model,
    observation,
    prober,
    processes,
    socket_files,
)
from tests.worlds import device_plugin

Finding = vocabulary.WatchedFinding
DRIVER = "gpu.nvidia.com"
PATH = "plugins_registry/gpu.nvidia.com-reg.sock"


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    for name in ("device-plugins", "plugins_registry", "plugins"):
        (path / name).mkdir()
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(path / "device-plugins" / "kubelet.sock"))
    yield path
    shutil.rmtree(path)


class Registry:
    """The model, with scans and probes of the registry at times that a test chooses."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._now = 0.0
        self._model = node_model.NodeModel(
            config_watch.Watch(enabled=True),
            memory=expectation.Memory(),
            timing=node_model.Timing(kubelet_settles_s=0.0),
            now=self._now,
        )
        self._results: list[observation.Observation] = []
        watch = processes.ProcessWatch(self._results.append)
        self._prober = prober.Prober(
            root,
            watch,
            on_result=self._results.append,
            on_problem=self._results.remove,  # type: ignore[arg-type]  # fails the test
            timeout_s=5.0,
        )

    async def watched(self, *, after_s: float = 0.0) -> list[tuple[str, str, Finding, str]]:
        """Observe everything, and again after `after_s`; return what is known then."""
        for wait_s in (0.0, 1.0, after_s, 5.0):
            self._now += wait_s
            scanned = socket_files.scan(self._root)
            actions = [*self._model.receive(scanned, self._now)]
            self._now += 0.2
            actions += self._model.tick(self._now)
            for action in actions:
                if isinstance(action, observation.Probe):
                    await self._prober.probe(action.file)
            await asyncio.sleep(0)
            while self._results:
                self._model.receive(self._results.pop(0), self._now)
            self._now += 0.2
            self._model.tick(self._now)
        return [(each.name, each.kind, each.finding, each.text) for each in self._model.watched]


def driver(root: Path, endpoint: str) -> device_plugin.DevicePlugin:
    served = device_plugin.DevicePlugin(root / PATH, DRIVER)
    served.info = pr.PluginInfo(
        type="DRAPlugin", name=DRIVER, endpoint=endpoint, supported_versions=["v1.DRAPlugin"]
    )
    return served


def test_a_driver_is_asked_what_it_is_and_its_endpoint_is_connected_to(root: Path) -> None:
    async def story() -> None:
        registry = Registry(root)
        endpoint = root / "plugins" / "dra.sock"
        async with driver(root, str(endpoint)) as served:
            async with device_plugin.DevicePlugin(endpoint, DRIVER) as own:
                assert await registry.watched() == [(DRIVER, "dra_driver", Finding.NONE, "")]
                assert (served.calls, own.calls) == (["info"], [])
            text = f"its endpoint {endpoint} does not exist"
            assert await registry.watched(after_s=60) == [
                (DRIVER, "dra_driver", Finding.SOCKET_REMOVED, text)
            ]
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(endpoint))
            text = f"connections to its endpoint {endpoint} are refused"
            assert await registry.watched(after_s=60) == [
                (DRIVER, "dra_driver", Finding.NOT_SERVED, text)
            ]
            (root / PATH).unlink()
            name = "gpu.nvidia.com-reg.sock"
            text = f"its socket {name} was removed, so the kubelet cannot connect to it again"
            assert await registry.watched() == [
                (DRIVER, "dra_driver", Finding.SOCKET_REMOVED, text)
            ]

    asyncio.run(story())


def test_without_the_directories_of_drivers_nothing_there_is_missing(root: Path) -> None:
    async def story() -> None:
        (root / "plugins").rmdir()
        endpoint = root / "plugins" / DRIVER / "dra.sock"
        async with driver(root, str(endpoint)):
            registry = Registry(root)
            for _ in range(2):
                assert await registry.watched(after_s=60) == [
                    (DRIVER, "dra_driver", Finding.NONE, "")
                ]

    asyncio.run(story())
    for folder in ("run", "static"):
        missing = {"run", "static"} - {folder}
        (root / folder).mkdir()
        folders = (root / folder, root / missing.pop())
        assert node_files.undescribed({"nvidia.com/gpu=0"}, folders) == ()
        (root / folder).rmdir()


def test_a_registration_of_no_known_kind_is_no_driver(root: Path) -> None:
    async def story() -> None:
        async with driver(root, "") as served:
            served.info = pr.PluginInfo(type="Else", name="x")
            assert await Registry(root).watched() == []

    asyncio.run(story())


def pci(root: Path, number: int, vendor: str, kind: str, driver: str) -> None:
    folder = root / "pci" / f"0000:0{number}:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")
    if driver:
        (folder / "driver").symlink_to(f"../../drivers/{driver}")


def test_only_accelerators_with_their_drivers_should_be_offered(root: Path) -> None:
    pci(root, 1, "0x10de", "0x030200", "nvidia")
    pci(root, 2, "0x10de", "0x030200", "nvidia")
    pci(root, 3, "0x10de", "0x030200", "vfio-pci")
    pci(root, 4, "0x1002", "0x030000", "amdgpu")
    pci(root, 5, "0x1da3", "0x120000", "")
    pci(root, 6, "0x15b3", "0x020000", "mlx5_core")
    pci(root, 7, "broken", "", "")
    assert hardware.offered_as(node_files.pci_devices(root / "pci")) == {
        "nvidia.com/gpu": "NVIDIA GPU: 2 on the PCI bus with the driver nvidia, "
        "but no plugin on the node has offered any"
    }
    assert node_files.pci_devices(root / "missing") == []


def test_a_cdi_device_needs_a_spec_in_a_visible_folder(root: Path) -> None:
    run, static = root / "run", root / "static"
    names = {"nvidia.com/gpu=0", "nvidia.com/gpu=1", "k8s.a.com/claim=u-2"}
    run.mkdir()
    assert node_files.undescribed(names, (run, static)) == ()
    static.mkdir()
    (static / "nvidia.yaml").write_text('kind: nvidia.com/gpu\ndevices:\n- name: "0"\n')
    (run / "claim.json").write_text('{"kind":"k8s.a.com/claim","devices":[{"name":"u-2"}]}')
    (run / "other.txt").write_text("nvidia.com/gpu 1")
    (run / "loop.json").symlink_to(run / "loop.json")
    os.mkfifo(run / "pipe.json")
    assert node_files.undescribed(names, (run, static)) == ("nvidia.com/gpu=1",)


def test_the_kubelet_says_what_drivers_gave_to_containers() -> None:
    device = podres.CDIDevice(name="k8s.a.com/claim=u-1")
    claimed = podres.ClaimResource(driver_name=DRIVER, cdi_devices=[device])
    dynamic = podres.DynamicResource(claim_name="c", claim_resources=[claimed])
    container = podres.ContainerResources(name="main", dynamic_resources=[dynamic])
    pod = podres.PodResources(name="p", namespace="d", containers=[container])
    pods = podres.ListPodResourcesResponse(pod_resources=[pod])
    assert podresources.listing(pods, None) == podresources.Listing(
        holders={},
        allocatable=None,
        cdi_devices={DRIVER: frozenset({"k8s.a.com/claim=u-1"})},
    )
