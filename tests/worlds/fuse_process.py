"""The FUSE broker as a process, on a node of its own."""

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from tests.worlds import csi_kubelet, plugin_process


class Node:
    """A node: the kubelet's half of CSI, and the broker's directories and settings."""

    def __init__(self, root: Path, *, bus_url: str) -> None:
        self.kubelet = csi_kubelet.Kubelet(root / "k")
        self.state = root / "s"
        self.helper = root / "helper"
        self.helper.write_text("#!/bin/sh\n")
        self.settings = root / "fuse.yaml"
        self.write(bus={"url": bus_url})

    def write(self, **more: object) -> None:
        """Write the broker's settings; `more` overrides the defaults."""
        chosen = {
            "node": "n1.example",
            "state": str(self.state),
            "helper": str(self.helper),
            "kubelet": {"directory": str(self.kubelet.root)},
            "heartbeat": {"interval_s": 0.3},
            "limits": {"watch_s": 0.2},
        }
        self.settings.write_bytes(msgspec.yaml.encode(chosen | more))

    @contextlib.asynccontextmanager
    async def broker(self) -> AsyncIterator[plugin_process.Plugin]:
        """Run the broker; yield its process."""
        async with plugin_process.started(self.settings, program="muster_fuse") as process:
            yield process


@contextlib.contextmanager
def root() -> Iterator[Path]:
    """Yield a directory with a short path, because a socket's path has at most 107 bytes."""
    path = Path(f"/tmp/fuse-{os.getpid()}")
    path.mkdir(mode=0o755)
    try:
        yield path
    finally:
        subprocess.run(["/bin/rm", "-rf", "--one-file-system", str(path)], check=True)
