"""Adapter for processes: runs the watched node of `bench.watch`: six plugins and an agent."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import muster
import muster_health
import muster_plugin
from bench import programs
from muster import vocabulary
from muster.local import processes, stack
from muster.vocabulary import Verdict, WatchedFinding

PLUGINS: Final = 6
NEVER_S: Final = 60.0
"""The longest wait, which is also the value of a missing reaction."""
_NODE: Final = "node-a"
_DEVICES: Final = 4
_CALM: Final = {
    "patience_s": 0,
    "flap_falls": 100,
    "hold_s": 0.1,
    "hold_max_s": 0.1,
    "recover_s": 1,
}


class Plugin:
    """One watched plugin: a process with a socket in the kubelet's directory."""

    def __init__(self, kubelet: Path, resource: str, notes: Path) -> None:
        self.resource = resource
        self.notes = notes
        self._kubelet = kubelet
        self._process: asyncio.subprocess.Process | None = None
        # as generic-device-plugin names its sockets
        encoded = base64.urlsafe_b64encode(resource.encode()).decode().rstrip("=")
        self.socket = kubelet / "device-plugins" / f"gdp-{encoded}-{time.time_ns() // 10**9}.sock"

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None, "started"
        return self._process.pid

    async def start(self) -> None:
        """Start the plugin, which registers with the kubelet."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.foreign_plugin", str(self._kubelet), self.resource),
            *(self.socket.name, str(_DEVICES), str(self.notes)),
            stdout=asyncio.subprocess.DEVNULL,
        )

    async def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the plugin, and wait until it has ended."""
        if self._process is not None:
            processes.send(self._process, number)
            await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the plugin."""
        assert self._process is not None, "started"
        processes.send(self._process, number)

    def noted(self, what: str, began: float, ended: float) -> int:
        """Return how many lines of a kind the plugin logged between two monotonic times."""
        lines = (line.split() for line in self.notes.read_text().splitlines())
        return sum(each == what and began <= float(at) < ended for at, each in lines)


class Observer:
    """Collects publications about watched plugins: all changes, and the plugins' names."""

    def __init__(self, url: str) -> None:
        self.changes: list[tuple[float, str, WatchedFinding | Verdict]] = []
        """Time, plugin (in a verdict, by its name on the bus), and finding or verdict."""
        self.listed: set[str] = set()
        """The plugins that the agent watches."""
        self._url = url
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        """Collect all publications from now on."""
        async for event in muster.events("*", url=self._url):
            now = time.monotonic()
            match event.data:
                case vocabulary.PluginObserved(watched=watched):
                    self.changes.append((now, watched.name, watched.finding))
                    self.listed.add(watched.name)
                case vocabulary.InventoryReported(watched=several):
                    self.listed |= {watched.name for watched in several}
                case vocabulary.VerdictChanged(plugin=plugin, verdict=verdict):
                    self.changes.append((now, plugin, verdict))
                case _:
                    continue
            async with self._changed:
                self._changed.notify_all()

    async def until(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Wait until `holds` returns true; return False on timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(holds)
                return True
        return False

    async def delay_s(self, name: str, what: WatchedFinding | Verdict, began: float) -> float:
        """Return the time from `began` to this publication; at most `NEVER_S`."""

        def seen() -> float | None:
            return next(
                (at - began for at, *of in self.changes if at >= began and of == [name, what]), None
            )

        left_s = began + NEVER_S - time.monotonic()
        await self.until(lambda: seen() is not None, max(0.0, left_s))
        delay = seen()
        return NEVER_S if delay is None else min(delay, NEVER_S)

    def others(self, name: str, expected: Sequence[WatchedFinding]) -> Counter[WatchedFinding]:
        """Count the findings about a plugin that no injected fault caused."""
        return Counter(
            what
            for _, of, what in self.changes
            if of == name and isinstance(what, WatchedFinding) and what not in expected
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The running plugins, the agent's process id, and the observer."""

    plugins: Sequence[Plugin]
    agent: int
    observer: Observer
    kind: str
    """The kind of kubelet, and the agent's view of processes."""


@contextlib.asynccontextmanager
async def world(*, sees_processes: bool) -> AsyncIterator[World]:
    """Run all processes; yield when the agent has started.

    Only root can hide the node's processes from the agent, as a pod's PID namespace does.
    """
    is_apart = not sees_processes and os.geteuid() == 0
    named = os.environ.get("MUSTER_KUBELET_DIR")
    async with (
        programs.arena("bench/watch", muster, muster_plugin, muster_health) as (root, url),
        contextlib.AsyncExitStack() as exits,
    ):
        node = os.environ.get("MUSTER_KUBELET_NODE", _NODE) if named else _NODE
        kubeconfig = os.environ["KUBECONFIG"] if named else f"{root}/kubeconfig"
        directory = Path(named) if named else _folder(root / "kubelet")
        if not named:
            await _stand_ins(root, directory, kubeconfig, exits)
        cluster = {"kubeconfig": kubeconfig, "plugins": []}
        health = {"bus": {"url": url}, "detection": _CALM, "cluster": cluster}
        await _run(exits, root, stack.service("health", _file(root / "health.json", health)))
        observer = Observer(url)
        following = asyncio.create_task(observer.follow())
        exits.callback(following.cancel)
        plugins = [
            Plugin(directory, f"bench.example/device-{n}", root / f"notes-{n}")
            for n in range(PLUGINS)
        ]
        for plugin in plugins:
            exits.push_async_callback(_gone, plugin)
            await plugin.start()
        agent = {
            "node": node,
            "bus": {"url": url},
            "kubelet": {"directory": str(directory)},
            "watch": {"enabled": True},
        }
        command = (sys.executable, "-m", "muster_plugin", "--config")
        file = _file(root / "agent.json", agent)
        pid = await exits.enter_async_context(_running([*command, file], is_apart=is_apart))
        kubelet = "a real kubelet" if named else "the stand-in for the kubelet"
        kind = f"{kubelet}, {'without' if is_apart else 'with'} hostPID"
        yield World(plugins=plugins, agent=pid, observer=observer, kind=kind)


@contextlib.asynccontextmanager
async def _running(command: Sequence[str], *, is_apart: bool) -> AsyncIterator[int]:
    """Run the agent, in its own PID namespace if `is_apart`; yield its process id."""
    apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc") if is_apart else ()
    async with programs.running([*apart, *command]) as process:
        pid = await _child(process.pid) if is_apart else process.pid
        try:
            yield pid
        finally:
            # unshare does not forward signals
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


async def _child(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    for _ in range(500):
        if text := children.read_text():  # noqa: ASYNC240  # the kernel answers at once
            return int(text)
        await asyncio.sleep(0.01)
    raise SystemExit("bench.watch: unshare starts nothing")


async def _stand_ins(
    root: Path, directory: Path, kubeconfig: str, exits: contextlib.AsyncExitStack
) -> None:
    api = await _run(exits, root, stack.kubernetes(kubeconfig))
    options = ("--node", _NODE, "--dir", str(directory), "--api", api.addresses["http"])
    await _run(exits, root, processes.Program("kubelet", "muster.local.kubelet", options))


async def _run(
    exits: contextlib.AsyncExitStack, root: Path, program: processes.Program
) -> processes.Process:
    process = processes.Process(program, root / f"{program.name}.log")
    exits.push_async_callback(process.end)
    await process.start()
    return process


async def _gone(plugin: Plugin) -> None:
    await plugin.end()
    plugin.socket.unlink(missing_ok=True)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _file(path: Path, settings: object) -> str:
    path.write_text(json.dumps(settings))
    return str(path)
