"""An agent that only watches works with the mounts of the overlay `watch`, which are read-only."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.local import kubelet as stand_in
from tests.worlds import foreign_plugin, manifests, mount_namespace, plugin_process

pytestmark = mount_namespace.needs_root

GPU, SOCKET = "nvidia.com/gpu", "nvidia-gpu.sock"
MOUNT = shutil.which("mount") or "mount"
KUBELET = Path("/var/lib/kubelet")


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    yield path
    shutil.rmtree(path)


def mounted(node: Path, inside: Path) -> None:
    """Mount the kubelet's directories of a node as the overlay does, in the order of a runtime."""
    (container,) = manifests.pods("watch")["muster-plugin"]["containers"]
    for mount in sorted(container["volumeMounts"], key=lambda each: str(each["mountPath"])):
        path = Path(mount["mountPath"])
        if path.is_relative_to(KUBELET):
            at = inside / path.relative_to(KUBELET)
            source = node / path.relative_to(KUBELET)
            for each in (source, at):
                each.mkdir(parents=True, exist_ok=True)
            subprocess.run([MOUNT, "--bind", str(source), str(at)], check=True)
            if mount.get("readOnly"):
                subprocess.run([MOUNT, "-o", "remount,bind,ro", str(at)], check=True)


def test_an_agent_that_only_watches_makes_nothing_in_the_kubelets_directories(root: Path) -> None:
    node, inside = root / "node", root / "agent"

    async def story() -> None:
        node.mkdir()
        async with (
            stand_in.Kubelet(directory=node, node="node-a") as kubelet,
            foreign_plugin.running(node, SOCKET, GPU, 2),
        ):
            mounted(node, inside)
            before = sorted((node / "device-plugins").iterdir())
            file = root / "plugin.json"
            file.write_text('{"node": "node-a", "watch": {"enabled": true}}')
            async with plugin_process.plugin(inside, file) as agent:
                await agent.said("plugin_watch_started", watched=GPU, kind="device_plugin")
                assert sorted((node / "device-plugins").iterdir()) == before
                assert kubelet.state().resources[GPU].allocatable == 2
                await agent.stop()
                assert agent.process.returncode == 0

    mount_namespace.inside(lambda: plugin_process.run(story))
