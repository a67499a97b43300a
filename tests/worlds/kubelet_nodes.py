"""Kubelets for the statements about them: the stand-in with its own API, or a real one."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

DOMAIN: Final = "statements.muster.example"
"""The domain of the statements' resources; they may also use domains below it."""
BOUND_S: Final = 30.0


@dataclasses.dataclass(frozen=True)
class Node:
    """A kubelet with an API that needs no credentials; `restart` is a command, or a URL to POST."""

    kind: str
    name: str
    directory: Path
    api: str
    restart: str
    version: tuple[int, int]

    @property
    def inside(self) -> str:
        """The directory as the kubelet itself names it."""
        return "/var/lib/kubelet" if self.kind == "real" else str(self.directory)


@contextlib.contextmanager
def started(kind: str) -> Iterator[Node]:
    """Yield a kubelet of this kind; a stand-in runs until the block ends."""
    if kind == "real":
        with _real() as node:
            yield node
        return
    _, _, version = kind.partition(" ")
    with _stand_in(version or "1.37") as node:
        yield node


@contextlib.contextmanager
def _stand_in(version: str) -> Iterator[Node]:
    root = Path(tempfile.mkdtemp(prefix="mu-"))
    try:
        with contextlib.ExitStack() as processes:
            api = processes.enter_context(_listening("muster.local.kubernetes"))
            arguments = ("--node", "node-a", "--dir", str(root), "--api", api, "--plugin-watcher")
            more = ("--status-period", "0.1", "--version", version)
            http = processes.enter_context(_listening("muster.local.kubelet", *arguments, *more))
            _wait_for(f"{api}/api/v1/nodes/node-a")
            yield Node("stand-in", "node-a", root, api, f"{http}/restart", _version(version))
    finally:
        shutil.rmtree(root)


def _wait_for(url: str) -> None:
    until = time.monotonic() + BOUND_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=BOUND_S):  # noqa: S310  # ours
                return
        except urllib.error.HTTPError as error:
            error.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


@contextlib.contextmanager
def _listening(module: str, *arguments: str) -> Iterator[str]:
    """Run one of our stand-ins; yield its URL."""
    with _running([sys.executable, "-m", module, *arguments], r'"http":\s*"([^"]+)"') as url:
        yield url


@contextlib.contextmanager
def _running(command: Sequence[str], pattern: str) -> Iterator[str]:
    """Run a command; yield the group of the first match of `pattern` in its output."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            match = None
            while match is None and (line := process.stdout.readline()):
                match = re.search(pattern, line)
            assert match is not None, f"{command[0]} ended"
            yield match[1]
        finally:
            process.terminate()
            process.communicate(timeout=30)


@contextlib.contextmanager
def _real() -> Iterator[Node]:
    missing = [
        name
        for name in ("KUBECONFIG", "MUSTER_KUBELET_DIR", "MUSTER_KUBELET_RESTART")
        if name not in os.environ
    ]
    if missing:
        pytest.skip(f"no real kubelet: set {' and '.join(missing)} (docs/real-kubelet.md)")
    with _running(["kubectl", "proxy", "--port=0"], r"serve on (\S+)") as address:
        with urllib.request.urlopen(f"http://{address}/api/v1/nodes", timeout=30) as answer:
            nodes = json.load(answer)["items"]
        wanted = os.environ.get("MUSTER_KUBELET_NODE", nodes[0]["metadata"]["name"])
        node = next(node for node in nodes if node["metadata"]["name"] == wanted)
        version = _version(node["status"]["nodeInfo"]["kubeletVersion"])
        restart = os.environ["MUSTER_KUBELET_RESTART"]
        directory = Path(os.environ["MUSTER_KUBELET_DIR"])
        real = Node("real", wanted, directory, f"http://{address}", restart, version)
        try:
            yield real
        finally:
            _forget(real)


def _forget(node: Node) -> None:
    """Remove our resources, and the devices of every pod, from a real kubelet and its node."""
    (node.directory / "device-plugins/kubelet_internal_checkpoint").unlink(missing_ok=True)
    subprocess.run(shlex.split(node.restart), check=True)
    url = f"{node.api}/api/v1/nodes/{node.name}"
    with urllib.request.urlopen(url, timeout=BOUND_S) as answer:  # noqa: S310  # ours
        capacity = json.load(answer)["status"]["capacity"]
    ours = dict.fromkeys(name for name in capacity if "muster.example/" in name)
    request = urllib.request.Request(  # noqa: S310  # ours
        f"{url}/status",
        json.dumps({"status": {"capacity": ours, "allocatable": ours}}).encode(),
        {"Content-Type": "application/merge-patch+json"},
        method="PATCH",
    )
    with urllib.request.urlopen(request, timeout=BOUND_S):  # noqa: S310  # ours
        pass


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = re.findall(r"\d+", text)
    return int(major), int(minor)


def text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
