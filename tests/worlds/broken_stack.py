"""A running `muster up`, for tests of `muster break`."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from muster.cli import faults
from muster.local import running
from tests.worlds.muster_command import muster

_LIMIT_S: Final = 90.0
NODES: Final = ("node-a", "node-b", "node-c")


class Stack:
    """A `muster up` of three nodes with two GPUs each, and commands that act on it."""

    def __init__(self, temporary: Path) -> None:
        self.environment: Mapping[str, str] = {
            **{key: value for key, value in os.environ.items() if key != "NATS_URL"},
            "TMPDIR": str(temporary),
        }
        size = ("--gpus", "2", "--plain")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "muster.cli", "up", *size],
            env=self.environment,
            stdout=subprocess.DEVNULL,
        )
        self._temporary = temporary
        self.until(lambda: self.verdicts() == dict.fromkeys(NODES, "HEALTHY"))

    def record(self) -> dict[str, Any]:
        """Return the record of the stack; without programs if there is none yet."""
        for record in self._temporary.glob(f"muster-*/{running.RECORD}"):
            return dict(json.loads(record.read_bytes()))
        return {"programs": []}

    def program(self, name: str) -> dict[str, Any]:
        """Return the record of a program; empty if there is none yet."""
        named = (each for each in self.record()["programs"] if each["name"] == name)
        return dict(next(named, {}))

    def state(self, name: str, path: str) -> Any:
        """Return what a program answers at an HTTP path, or None without a valid answer."""
        http = self.program(name).get("http")
        try:
            with urllib.request.urlopen(f"{http}{path}", timeout=5) as answer:  # noqa: S310  # ours
                return json.load(answer)
        except (OSError, ValueError):
            return None

    def verdicts(self) -> dict[str, str]:
        """Return the verdict on each node's plugin."""
        plugins = (self.state("health", "/state") or {}).get("plugins", [])
        return {plugin["node"]: plugin["verdict"] for plugin in plugins}

    def resource(self, node: str) -> Mapping[str, Any]:
        """Return a node's GPUs as its kubelet sees them."""
        kubelet = self.state(f"kubelet-{node}", "/state") or {"resources": {}}
        gpus: Mapping[str, Any] = kubelet["resources"].get(faults.GPU, {})
        return gpus

    def until(self, holds: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + _LIMIT_S
        while not holds():
            assert self.process.poll() is None, "muster up has ended"
            assert time.monotonic() < end, "it has not come to be"
            time.sleep(0.05)

    def do(self, *words: str) -> str:
        """Run a command, which must succeed; return its output."""
        code, printed, errors = muster(*words, environment=self.environment)
        assert (code, errors) == (0, "")
        return printed

    def end(self) -> None:
        """End `muster up`."""
        self.process.terminate()
        self.process.wait(_LIMIT_S)
