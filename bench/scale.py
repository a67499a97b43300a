"""Adapter for processes: measures commands and watches with many nodes on a real API server.

python -m bench.scale [--quick] [--json FILE]

In the cluster of KUBECONFIG, which `make cluster` starts, kwok simulates the kubelets of 2,000
nodes with 10,000 pods; all are deleted afterwards. Without KUBECONFIG, only the stand-in is
measured.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import orjson

from bench import labeler, programs, report
from muster.kubernetes import api as kubernetes_api
from muster.local import processes, stack
from muster_health.kubernetes import watches
from muster_health.model import config, signals
from scripts.cluster import layout, tools

_PODS_PER_NODE: Final = 5
_AT_ONCE: Final = 32
_RATE: Final = 200
_MARK: Final = "muster.dev/bench"
_SELECTED: Final = f"{_MARK}=scale"
_NODES: Final = "/api/v1/nodes"
_PODS: Final = "/api/v1/namespaces/default/pods"
_TIMEOUT_S: Final = 60.0
_READY_S: Final = 120.0
_CHANGES: Final = 10
_RESOURCE: Final = "nvidia.com/gpu"
_KWOK: Final = (
    f"--config={layout.TOOLS / 'kwok/stages.yaml'}",
    f"--manage-nodes-with-label-selector={_SELECTED}",
    "--node-lease-duration-seconds=40",
)


async def measure(options: report.Options) -> list[report.Row]:
    """Measure the stand-in, and the real cluster if there is one."""
    nodes = 200 if options.quick else 2_000
    directory = Path(tempfile.mkdtemp(prefix="mu-"))
    try:
        async with _stand_in(directory) as kubeconfig:
            rows = await _World("stand-in", kubeconfig, nodes).measured()
        real = os.environ.get("KUBECONFIG")
        if real:
            kwok = tools.built("kwok", print) / "kwok"
            command = (str(kwok), f"--kubeconfig={real}", *_KWOK)
            with (directory / "kwok.log").open("wb") as log:
                async with programs.running(command, errors=log.fileno()):
                    rows += await _World("cluster", real, nodes).measured()
        return rows
    finally:
        shutil.rmtree(directory)


class _World:
    """One API with many nodes."""

    def __init__(self, name: str, kubeconfig: str, nodes: int) -> None:
        self._name = name
        self._kubeconfig = kubeconfig
        self._nodes = nodes
        self._how = f"{nodes:,} nodes, {nodes * _PODS_PER_NODE:,} pods"

    async def measured(self) -> list[report.Row]:
        """Create the nodes, measure, and delete the nodes."""
        opened = await kubernetes_api.find(kubeconfig=self._kubeconfig, context=None)
        async with opened as self._api:
            try:
                filled_s = await _timed(self._fill())
                rows = [self._row("objects created", filled_s, "s", "by 32 writers")]
                rows += await self._command("check all", "check", "all", "--timeout", "60s")
                words = ("label-gpus", "--apply", "--yes", "--timeout", "60s")
                rows += await self._command("label-gpus", *words, "--rate", str(_RATE))
                return [*rows, *await self._watched()]
            finally:
                await self._empty()

    async def _fill(self) -> None:
        await self._at_once(self._nodes, self._create_node)
        await self._at_once(self._nodes * _PODS_PER_NODE, self._create_pod)
        if self._name == "stand-in":
            return
        end = asyncio.get_running_loop().time() + _READY_S
        while not await self._is_filled():
            assert asyncio.get_running_loop().time() < end, f"kwok: not ready within {_READY_S:g} s"
            await asyncio.sleep(0.5)

    async def _is_filled(self) -> bool:
        """Return whether the nodes are Ready and the pods are Running."""
        query = {"labelSelector": _SELECTED, "fieldSelector": "status.phase!=Running", "limit": "1"}
        if (await self._good("GET", _PODS, query=query))["items"]:
            return False
        nodes = await self._good("GET", _NODES, query={"labelSelector": _SELECTED})
        return all(_is_ready(node) for node in nodes["items"])

    async def _create_node(self, number: int) -> None:
        node = orjson.loads(labeler.node(number))
        node["metadata"]["labels"][_MARK] = "scale"
        node["spec"] = {"taints": [{"key": _MARK, "effect": "NoSchedule"}]}
        await self._good("POST", _NODES, node)

    async def _create_pod(self, number: int) -> None:
        pod = orjson.loads(labeler.pod(number % self._nodes))
        pod["metadata"] = {"name": f"bench-{number}", "labels": {_MARK: "scale"}}
        pod["spec"]["tolerations"] = [{"operator": "Exists"}]
        await self._good("POST", _PODS, pod)

    async def _command(self, name: str, *words: str) -> list[report.Row]:
        measured = await labeler.command(words, self._kubeconfig)
        how = f"muster {' '.join(words)}, exit code {measured.code}"
        return [
            self._row(name, measured.wall_s, "s", how),
            self._row(f"{name}, memory", measured.peak_mib, "MiB", how),
        ]

    async def _watched(self) -> list[report.Row]:
        """Measure health's watches in a separate process while nodes change."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.scale", "--watch", self._kubeconfig),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None, "the stream is a pipe"
        try:
            clock = asyncio.get_running_loop().time
            began = clock()
            async with asyncio.timeout(_READY_S):
                while int((await process.stdout.readline()).split()[0]) < self._nodes:
                    pass
                listed_s, mib = clock() - began, programs.resident_mib(process.pid)
                seen_s = [await _timed(self._change(n, process.stdout)) for n in range(_CHANGES)]
        finally:
            process.terminate()
            await process.wait()
        how = "health's watch of nodes"
        return [
            self._row("nodes known to health", listed_s, "s", f"{how}, from its process' start"),
            self._row("health's watches, memory", mib, "MiB", f"{how}, once all are known"),
            *report.spread(
                f"node changed to health, {self._name}",
                seen_s,
                "s",
                how=f"{self._how}; collected for 1 s",
            ),
        ]

    async def _change(self, number: int, lines: asyncio.StreamReader) -> None:
        """Change a node's allocatable, and wait until health's watches have received the change."""
        name = labeler.node_name(number)
        counts = {"status": {"allocatable": {_RESOURCE: "7"}}}
        await self._good("PATCH", f"{_NODES}/{name}/status", counts, kubernetes_api.MERGE)
        while (await lines.readline()).split()[1:] != [name.encode(), b"7"]:
            pass

    async def _empty(self) -> None:
        """Delete all created objects."""
        query = {"labelSelector": _SELECTED}
        for path in (_PODS, _NODES):
            while (await self._good("GET", path, query={**query, "limit": "1"}))["items"]:
                await self._api.request(
                    "DELETE", path, query=query, body={"gracePeriodSeconds": 0}, timeout_s=300
                )

    async def _good(
        self,
        verb: str,
        path: str,
        body: object = None,
        content: str = kubernetes_api.JSON,
        **more: Any,
    ) -> dict[str, Any]:
        answer = await self._api.request(
            verb, path, body=body, content=content, timeout_s=_TIMEOUT_S, **more
        )
        assert answer.is_ok, answer.problem
        decoded: dict[str, Any] = orjson.loads(answer.body)
        return decoded

    async def _at_once(self, count: int, work: Callable[[int], Awaitable[None]]) -> None:
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                await work(number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(_AT_ONCE):
                tasks.create_task(worker())

    def _row(self, name: str, value: float, unit: str, how: str) -> report.Row:
        return report.row(f"{name}, {self._name}", value, unit, how=f"{self._how}; {how}")


@contextlib.asynccontextmanager
async def _stand_in(directory: Path) -> AsyncIterator[str]:
    kubeconfig = str(directory / "kubeconfig")
    api = processes.Process(stack.kubernetes(kubeconfig), directory / "kubernetes.log")
    await api.start()
    try:
        yield kubeconfig
    finally:
        await api.end()


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node["status"].get("conditions", [])
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


async def _timed(work: Awaitable[None]) -> float:
    clock = asyncio.get_running_loop().time
    began = clock()
    await work
    return clock() - began


async def _watch(kubeconfig: str) -> None:
    """Print the number of expected nodes, and each changed node with its allocatable."""
    expected = 0

    async def put(event: watches.ClusterEvent) -> None:
        nonlocal expected
        if isinstance(event, signals.ExpectedNodes):
            expected = len(event.nodes)
            print(expected, flush=True)
        elif isinstance(event, signals.NodeOffers) and event.offers is not None:
            offer = event.offers.get(_RESOURCE)
            print(expected, event.node, offer.allocatable if offer else 0, flush=True)

    plugin = config.Plugin(plugin="bench", nodes={_MARK: "scale"})
    settings = config.Cluster(kubeconfig=kubeconfig, plugins=(plugin,))
    async with await kubernetes_api.find(kubeconfig=kubeconfig, context=None) as api:
        await watches.ClusterWatcher(api, settings, put).run()


def main() -> int:
    """Run the benchmark or, with `--watch`, the process whose watches it measures."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--watch", metavar="KUBECONFIG", help=argparse.SUPPRESS)
    chosen, _ = parser.parse_known_args()
    if chosen.watch:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_watch(chosen.watch))
        return 0
    return report.main("scale", measure, more=parser)


if __name__ == "__main__":
    sys.exit(main())
