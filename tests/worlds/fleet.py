"""A fleet on this machine for the sixteen failure classes, and the faults it can have.

nats-server, health and every plugin are real. A plugin is a process, forked from one that has
already imported everything; it can sabotage itself (`tests/programs/sabotaged.py`). The kubelet of
each node and the Kubernetes API are the stand-ins. This module simulates the rest: the plugin's
DaemonSet and pods, whose status it writes as a kubelet would, from the process and its /readyz; and
a cable from a node to NATS, which can be cut so that no data passes and no connection is closed.
"""

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp
import orjson

from muster.local import kubelet, nats
from muster.vocabulary import Verdict
from tests.worlds import fleet_parts

PLUGIN: Final = "device-plugin"
RESOURCE: Final = "muster.example/thing"
DEVICES: Final = 2
_DEVICES_MAX: Final = 64
_NAMESPACE: Final = "kube-system"
_DAEMONSET: Final = "muster-plugin"
_NODES: Final = "/api/v1/nodes"
_PODS: Final = f"/api/v1/namespaces/{_NAMESPACE}/pods"
_LABELS: Final = {"app": "p", "controller-revision-hash": "r1", "pod-template-generation": "1"}


class Api:
    """A client of the Kubernetes API, as an administrator."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def do(self, method: str, path: str, body: object = None) -> dict[str, object]:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else orjson.dumps(body)
        async with self._http.request(
            method, path, data=data, headers={"Content-Type": kind}
        ) as answer:
            tree: dict[str, object] = orjson.loads(await answer.read())
            assert answer.status < 300, (method, path, tree)
            return tree


class Machine:
    """A kubelet with a directory, in a task of its own, that can be stopped and started again."""

    def __init__(
        self, directory: Path, node: str, *, api: str | None, pace: fleet_parts.Pace
    ) -> None:
        self.directory = directory
        self.kubelet: kubelet.Kubelet | None = None
        self._node, self._api, self._pace = node, api, pace
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.directory.mkdir(exist_ok=True)
        self._stop, begun = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._live(begun))
        await begun.wait()

    async def end(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task

    async def _live(self, begun: asyncio.Event) -> None:
        async with kubelet.Kubelet(
            directory=self.directory,
            node=self._node,
            api=self._api,
            status_period_s=self._pace.status_s,
            lease_period_s=self._pace.lease_s,
        ) as self.kubelet:
            begun.set()
            await self._stop.wait()
        self.kubelet = None


class Node:
    """One node of the fleet: kubelet, plugin, pod, and the cable."""

    def __init__(self, name: str, fleet: "Fleet") -> None:
        self.name = name
        self.fleet = fleet
        self.directory = fleet.directory / name
        self.machine = Machine(self.directory, name, api=fleet.api_url, pace=fleet.pace)
        self.cable = fleet_parts.Cable(fleet.server.port)
        self.has_cable = False
        self.plugin = self._plugin("plugin", self.directory)
        self.others: list[tuple[fleet_parts.Plugin, Machine]] = []
        self.is_kubelet_alive = True
        """Whether the node's kubelet is alive, so that the pod's status is written."""
        self.is_crash_looping = False
        """Whether the container, when it has ended, is in CrashLoopBackOff."""
        self._prober: asyncio.Task[None] | None = None
        self._throttling: asyncio.Task[None] | None = None
        self._written: object = None
        self._devices = 0

    @property
    def kubelet(self) -> kubelet.Kubelet:
        assert self.machine.kubelet is not None, f"{self.name} is down"
        return self.machine.kubelet

    def add_device(self) -> None:
        """Add a device to the node."""
        self._device(self._devices).symlink_to("/dev/null")
        self._devices += 1

    async def miscount(self, by: int) -> None:
        """Let the kubelet offer `by` devices too many, and write that to the API at once."""
        self.kubelet.miscount(RESOURCE, by)
        offered = {RESOURCE: str(self._devices + by)}
        status = {"status": {"allocatable": offered}}
        await self.fleet.api.do("PATCH", f"{_NODES}/{self.name}/status", status)

    def throttle(self, *, share: float) -> None:
        """Let the plugin run for only this share of the time, as with a cgroup's quota."""
        slow_s = self.fleet.pace.slow_s

        async def duty() -> None:
            while True:
                self.plugin.send(signal.SIGSTOP)
                await asyncio.sleep(slow_s * (1 - share))
                self.plugin.send(signal.SIGCONT)
                await asyncio.sleep(slow_s * share)

        self._throttling = asyncio.create_task(duty())

    async def unthrottle(self) -> None:
        """Let the plugin run all the time again."""
        if self._throttling is not None:
            self._throttling.cancel()
            await asyncio.gather(self._throttling, return_exceptions=True)
            self._throttling = None
            self.plugin.send(signal.SIGCONT)

    def own_socket(self) -> Path:
        (path,) = (self.directory / "device-plugins").glob("muster-*.sock")
        return path

    async def start(self, *, with_plugin: bool = True, has_cable: bool = False) -> None:
        """Start the node, and its plugin."""
        self.has_cable = has_cable
        if has_cable:
            await self.cable.open()
        await self.fleet.api.do("POST", _NODES, {"metadata": {"name": self.name}})
        await self.machine.start()
        while self._devices < DEVICES:
            self.add_device()
        if with_plugin:
            await self.start_plugin()
        self._prober = asyncio.create_task(self._keep_pod())

    async def start_plugin(self) -> None:
        """Start a new process of the plugin, in a pod of the same name."""
        self.is_crash_looping = False
        if self._prober is None or not await self._has_pod():
            await self._make_pod()
        self._configure(self.plugin, self.directory)
        await self.plugin.start()

    async def until_ready(self) -> None:
        """Wait until the API shows the pod as Ready: a busy machine may have missed some probes."""
        while self._written != (True, True, False):
            await asyncio.sleep(0.05)

    @property
    def holder(self) -> str:
        """Return the name of a pod that holds one of the node's devices, if it was created."""
        return f"default/train-{self.name}"

    async def make_holder(self) -> None:
        """Create a pod that gets a device."""
        namespace, _, name = self.holder.partition("/")
        pods = f"/api/v1/namespaces/{namespace}/pods"
        amount = {RESOURCE: "1"}
        resources = {"limits": amount, "requests": amount}
        container = {"name": "c", "image": "c", "resources": resources}
        spec = {"nodeName": self.name, "containers": [container]}
        pod = await self.fleet.api.do("POST", pods, {"metadata": {"name": name}, "spec": spec})
        while pod["status"] == {"phase": "Pending"}:
            await asyncio.sleep(0.1)
            pod = await self.fleet.api.do("GET", f"{pods}/{name}")
        status = pod["status"]
        assert isinstance(status, dict)
        assert status["phase"] == "Running", status

    async def start_other(self) -> None:
        """Start a second plugin of the same name, with a kubelet of its own."""
        directory = self.fleet.directory / f"{self.name}-2"
        machine = Machine(directory, self.name, api=None, pace=self.fleet.pace)
        await machine.start()
        other = self._plugin("other", directory)
        self.others.append((other, machine))
        self._configure(other, directory)
        await other.start()

    async def end_others(self, number: signal.Signals) -> None:
        while self.others:
            other, machine = self.others.pop()
            await other.end(number)
            await machine.end()

    async def patch(self, **spec: object) -> None:
        """Change the node's spec."""
        await self.fleet.api.do("PATCH", f"{_NODES}/{self.name}", {"spec": spec})

    async def close(self) -> None:
        await self.unthrottle()
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)
        await self.end_others(signal.SIGKILL)
        await self.plugin.end()
        await self.machine.end()
        if self.has_cable:
            await self.cable.close()

    def _device(self, number: int) -> Path:
        return self.directory / f"thing{number}"

    def _plugin(self, name: str, directory: Path) -> fleet_parts.Plugin:
        # alone in its directory: a plugin watches the directory of its configuration
        config = self.fleet.directory / "configurations" / directory.name / "plugin.json"
        log = self.fleet.directory / f"{directory.name}-{name}.log"
        return fleet_parts.Plugin(self.fleet.forker, config, log)

    def _configure(self, plugin: fleet_parts.Plugin, directory: Path) -> None:
        paths = [str(self._device(number)) for number in range(_DEVICES_MAX)]
        groups = [{"devices": [{"path": path}]} for path in paths]
        settings = {
            "node": self.name,
            "name": PLUGIN,
            "bus": {"url": self.cable.url if self.has_cable else self.fleet.server.url},
            "kubelet": {"directory": str(directory)},
            "heartbeat": {"interval_s": self.fleet.pace.beat_s},
            "resources": [{"name": RESOURCE, "groups": groups}],
        }
        plugin.config.parent.mkdir(parents=True, exist_ok=True)
        plugin.config.write_bytes(orjson.dumps(settings))

    # what a DaemonSet's controller and a kubelet would write

    @property
    def _pod(self) -> str:
        return f"{_PODS}/{_DAEMONSET}-{self.name}"

    async def _has_pod(self) -> bool:
        pods = await self.fleet.api.do("GET", _PODS)
        items = pods["items"]
        assert isinstance(items, list)
        return any(pod["metadata"]["name"] == f"{_DAEMONSET}-{self.name}" for pod in items)

    async def _make_pod(self) -> None:
        body = {
            "metadata": {"name": f"{_DAEMONSET}-{self.name}", "labels": _LABELS},
            "spec": {"nodeName": self.name, "containers": [{"name": "p", "image": "p"}]},
        }
        await self.fleet.api.do("POST", _PODS, body)

    async def _keep_pod(self) -> None:
        """Write the container's state and readiness to the API, as a kubelet does."""
        pace, failures = self.fleet.pace, 0
        clock = asyncio.get_running_loop().time
        while True:
            began, runs = clock(), self.plugin.is_running
            if self.is_kubelet_alive and self.plugin.http:
                ready = runs and await self.plugin.is_ready(pace.readiness_timeout_s)
                failures = 0 if ready else failures + 1
                known = not runs or ready or failures >= pace.readiness_failures
                if known and self.is_kubelet_alive:
                    await self._write_pod(runs=runs, ready=ready)
            period_s = pace.readiness_s if runs else 0.1
            while clock() < began + period_s and self.plugin.is_running is runs:
                # the end of a container is seen at once
                await asyncio.sleep(0.2)

    async def _write_pod(self, *, runs: bool, ready: bool) -> None:
        now = (runs, ready, self.is_crash_looping)
        if now == self._written:
            return
        state: dict[str, object] = {"running": {}}
        if not runs:
            # a container is restarted at once, but one that ends repeatedly has to wait
            state = {"terminated": {"exitCode": 137}}
        if not runs and self.is_crash_looping:
            state = {"waiting": {"reason": "CrashLoopBackOff"}}
        status = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"name": "p", "restartCount": 0, "ready": ready, "state": state}],
        }
        await self.fleet.api.do("PATCH", f"{self._pod}/status", {"status": status})
        self._written = now


class Fleet:
    """The whole fleet, as an async context manager; health is started explicitly."""

    def __init__(self, pace: fleet_parts.Pace) -> None:
        self.pace = pace
        self.directory = Path()
        self.nodes: dict[str, Node] = {}
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self.directory = Path(tempfile.mkdtemp(prefix="mu-"))
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            config = _nats(self.directory / "nats.conf", self.pace.ping_s)
            self.server = await stack.enter_async_context(
                nats.NatsServer(self.directory / "nats", config=config)
            )
            self.publications = await stack.enter_async_context(
                fleet_parts.following_by_node(self.server.url)
            )
            self.kubeconfig = self.directory / "kubeconfig"
            stand_in = fleet_parts.Service(
                "muster.local.kubernetes",
                ("--kubeconfig", str(self.kubeconfig)),
                self.directory / "kubernetes.log",
            )
            stack.push_async_callback(stand_in.end)
            await stand_in.start()
            self.api_url = stand_in.http
            http = await stack.enter_async_context(aiohttp.ClientSession(stand_in.http))
            self.api = Api(http)
            await self._make_daemonset()
            self.forker = fleet_parts.PluginForker(
                self.directory / "plugins.log", checks_s=self.pace.checks_s
            )
            await self.forker.start()
            stack.push_async_callback(self.forker.close)
            self.health = self.make_health("health")
            stack.push_async_callback(self._end)
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._open.__aexit__(kind, error, at)

    def make_health(self, name: str, **more: Mapping[str, object]) -> fleet_parts.Service:
        """Return a health service of this fleet, not yet started; `more` overrides its settings."""
        sections: dict[str, dict[str, object]] = {
            "bus": {"url": self.server.url},
            "cluster": {
                "kubeconfig": str(self.kubeconfig),
                "plugins": [{"plugin": PLUGIN, "namespace": _NAMESPACE, "daemonset": _DAEMONSET}],
            },
        }
        for overrides in (self.pace.health, more):
            for section, settings in overrides.items():
                sections[section] = {**sections.get(section, {}), **settings}
        file = self.directory / f"{name}.json"
        file.write_bytes(orjson.dumps(sections))
        return fleet_parts.Service(
            "muster_health", ("--config", str(file)), self.directory / f"{name}.log"
        )

    def node(self, name: str) -> Node:
        """Return a new node, not yet started."""
        self.nodes[name] = Node(name, self)
        return self.nodes[name]

    async def until_healthy(self, names: Sequence[str]) -> None:
        await self.publications.until(
            lambda: all(self.publications.verdict(name) is Verdict.HEALTHY for name in names)
        )

    async def _make_daemonset(self) -> None:
        spec = {
            "selector": {"matchLabels": {"app": "p"}},
            "template": {"metadata": {"labels": {"app": "p"}}, "spec": {}},
        }
        annotations = {"deprecated.daemonset.template.generation": "1"}
        body = {"metadata": {"name": _DAEMONSET, "annotations": annotations}, "spec": spec}
        await self.api.do("POST", f"/apis/apps/v1/namespaces/{_NAMESPACE}/daemonsets", body)

    async def _end(self) -> None:
        await self.health.end()
        await asyncio.gather(*(node.close() for node in self.nodes.values()))


@contextlib.asynccontextmanager
async def fleet(pace: fleet_parts.Pace = fleet_parts.FAST) -> AsyncIterator[Fleet]:
    """Run a fleet without nodes."""
    async with Fleet(pace) as made:
        yield made


def _nats(file: Path, ping_s: float) -> Path:
    """Write nats-server's configuration: ours, and how soon a silent client is disconnected."""
    file.write_text(f'{nats.CONFIG}ping_interval: "{ping_s * 1000:.0f}ms"\nping_max: 2\n')
    return file
