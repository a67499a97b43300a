"""Statements about a kubelet, each checked with the stand-in and with a real one.

A statement is an async function that gets a `Kubelet`: its directory, and the API of its cluster.
`@statement` turns it into a test. Each statement has a resource name of its own, so that they can
share one kubelet.
"""

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import shlex
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest

from muster.local.kubelet import node_status
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import podresources_pb2 as podres
from muster.pb import rpc
from tests.worlds import device_plugin, kubelet_nodes

_NO_CONTAINERS: Final = "it starts no containers"
STAND_IN_CANNOT: Final = {
    "test_a_container_gets_environment_devices_and_mounts_of_the_answer": _NO_CONTAINERS,
    "test_a_container_restarts_from_the_cache_while_its_plugin_is_away": _NO_CONTAINERS,
    "test_a_container_restarts_with_its_devices_without_another_allocate": _NO_CONTAINERS,
    "test_a_container_that_is_announced_does_not_restart_while_its_plugin_is_away": _NO_CONTAINERS,
    "test_an_error_before_the_start_holds_the_container": _NO_CONTAINERS,
    "test_before_each_start_a_container_is_announced_if_the_plugin_wants_that": _NO_CONTAINERS,
    "test_the_health_of_a_device_is_in_the_status_of_its_pod": "muster does not read it there",
}
"""Statements that do not hold for the stand-in, and why; if one does hold, its test fails."""

BOUND_S: Final = 30.0
_EXPECTED_FAILURE_S: Final = 2.0
_LIMIT_S: Final = 150.0
IMAGE: Final = "localhost/busybox:1"
PODS: Final = "/api/v1/namespaces/default/pods"
_PER_SOCKET: Final = (1, 37)
"""Since this version a kubelet identifies a registration by its socket as well (k/k#135437)."""
_serials = itertools.count(1)


class Kubelet:
    """The kubelet of one statement."""

    def __init__(self, node: kubelet_nodes.Node, api: node_status.Api) -> None:
        self.node = node
        self.api = api
        self.resource = f"{kubelet_nodes.DOMAIN}/{secrets.token_hex(4)}"
        self.sockets = node.directory / "device-plugins"
        self.registry = node.directory / "plugins_registry"
        self._cleanup = contextlib.AsyncExitStack()

    async def plugin(
        self, *ids: str, register: bool = True, resource: str = "", folder: Path | None = None
    ) -> device_plugin.DevicePlugin:
        """Serve a plugin; register it if `register`."""
        plugin = self.unserved(*ids, resource=resource, folder=folder)
        await self._cleanup.enter_async_context(plugin)
        if register:
            assert await self.register(plugin, resource=resource) == OK
            await until_true("a stream", lambda: plugin.streams)
        return plugin

    def unserved(
        self, *ids: str, resource: str = "", folder: Path | None = None
    ) -> device_plugin.DevicePlugin:
        """Return a plugin that is not yet served, for `serve`."""
        path = (folder or self.sockets) / f"toy-{os.getpid()}-{next(_serials)}.sock"
        return device_plugin.DevicePlugin(path, resource or self.resource, *ids)

    async def serve(self, plugin: device_plugin.DevicePlugin) -> None:
        """Serve a plugin until the statement ends."""
        await self._cleanup.enter_async_context(plugin)

    async def register(
        self,
        plugin: device_plugin.DevicePlugin | str,
        *,
        resource: str = "",
        version: str = "v1beta1",
        timeout_s: float | None = None,
        **options: bool,
    ) -> tuple[str, str]:
        """Register a plugin, or just an endpoint; return the code and the error."""
        endpoint = plugin if isinstance(plugin, str) else plugin.path.name
        request = dp.RegisterRequest(
            version=version,
            endpoint=endpoint,
            resource_name=resource or self.resource,
            options=dp.DevicePluginOptions(**options),
        )
        async with self._channel(self.sockets / "kubelet.sock") as channel:
            try:
                await rpc.RegistrationClient(channel).register(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                return error.code().name, error.details() or ""
        return OK

    async def shows(self, capacity: str | None, allocatable: str | None) -> None:
        """Wait until the node shows these quantities of the resource; None means no entry."""
        wanted = (capacity, allocatable)
        await until(f"{self.resource} {wanted}", self._shown(), lambda shown: shown == wanted)

    async def shown(self) -> tuple[str | None, str | None]:
        """Return what the node shows of the resource now."""
        return await self._shown()()

    def _shown(self) -> Callable[[], Awaitable[tuple[str | None, str | None]]]:
        async def read() -> tuple[str | None, str | None]:
            status = (await self.get(f"/api/v1/nodes/{self.node.name}"))["status"]
            return status["capacity"].get(self.resource), status["allocatable"].get(self.resource)

        return read

    async def get(self, path: str) -> dict[str, Any]:
        """Read an object of the API."""
        code, body = await self.api.send("GET", path)
        assert code < 400, f"{path}: {code} {body}"
        assert isinstance(body, dict)
        return body

    # podresources

    async def lists(self, *ids: str) -> None:
        """Wait until the kubelet lists these ids as allocatable."""
        await until(f"{self.resource} {ids}", self.listed, lambda listed: listed == sorted(ids))

    async def listed(self) -> list[str]:
        """Return the allocatable ids of the resource."""
        answer = await self.ask_podresources(
            lambda client: client.get_allocatable_resources(podres.AllocatableResourcesRequest())
        )
        return sorted(self._ids(answer.devices))

    async def holdings(self) -> dict[str, dict[str, list[str]]]:
        """Return the ids that containers hold, by pod and container."""
        answer = await self.ask_podresources(
            lambda client: client.list(podres.ListPodResourcesRequest())
        )
        return {
            pod.name: {each.name: sorted(self._ids(each.devices)) for each in pod.containers}
            for pod in answer.pod_resources
            if any(self._ids(each.devices) for each in pod.containers)
        }

    async def holds(self, pod: str, **ids: list[str]) -> None:
        """Wait until the kubelet lists these ids for these containers of a pod."""

        async def read() -> object:
            return (await self.holdings()).get(pod)

        await until(pod, read, lambda held: held == ids)

    async def ask_podresources(
        self, ask: Callable[[rpc.PodResourcesClient], Awaitable[Any]]
    ) -> Any:
        """Ask the kubelet; repeat that while it refuses because of too many calls from anyone."""
        while True:
            async with self._channel(self.node.directory / "pod-resources/kubelet.sock") as channel:
                try:
                    return await ask(rpc.PodResourcesClient(channel))
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
            await asyncio.sleep(0.1)

    async def burst(self, calls: int) -> Counter[tuple[str, str]]:
        """Send `calls` calls at once; count the answers by code and text."""
        async with self._channel(self.node.directory / "pod-resources/kubelet.sock") as channel:
            await channel.channel_ready()
            client = rpc.PodResourcesClient(channel)
            request = podres.AllocatableResourcesRequest()
            answers = await asyncio.gather(
                *(client.get_allocatable_resources(request) for _ in range(calls)),
                return_exceptions=True,
            )
        return Counter(
            (answer.code().name, answer.details() or "")
            if isinstance(answer, grpc.aio.AioRpcError)
            else OK
            for answer in answers
        )

    def _ids(self, entries: Sequence[podres.ContainerDevices]) -> list[str]:
        mine = [entry for entry in entries if entry.resource_name == self.resource]
        return [id_ for entry in mine for id_ in entry.device_ids]

    # The checkpoint

    def checkpoint(self) -> dict[str, Any]:
        """Return the data of the device manager's checkpoint file."""
        data: dict[str, Any] = json.loads(
            (self.sockets / "kubelet_internal_checkpoint").read_text()
        )
        return data

    # Pods

    async def pod(self, *counts: int, init: Sequence[dict[str, Any]] = (), **more: Any) -> str:
        """Bind a pod to the node; each count is a container. Return its name."""
        name = f"statement-{secrets.token_hex(4)}"
        spec = {
            "nodeName": self.node.name,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "initContainers": [*init],
            "containers": [
                self.container(f"c{number}", count) for number, count in enumerate(counts)
            ],
        }
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        for container in spec["containers"]:  # type: ignore[attr-defined]
            container.update(more)
        code, answer = await self.api.send("POST", PODS, manifest)
        assert code == 201, answer
        self._cleanup.push_async_callback(self.delete, name)
        return name

    def container(self, name: str, count: int, *command: str, **more: Any) -> dict[str, Any]:
        """Return a container with `count` devices; without a command it sleeps."""
        limits = {"limits": {self.resource: str(count)}} if count else {}
        run = [*(command or ("sleep", "3600"))]
        return {"name": name, "image": IMAGE, "command": run, "resources": limits, **more}

    async def admits(self, count: int) -> str:
        """Bind pods until one runs; return its name.

        The first may be bound in the milliseconds of a change, and then fail.
        """
        while True:
            name = await self.pod(count)
            status = await until(
                name,
                lambda name=name: self.pod_status(name),  # type: ignore[misc]
                lambda status: status.get("phase") in {"Running", "Failed"},
            )
            if status["phase"] == "Running":
                return name

    async def delete(self, name: str) -> None:
        """Remove a pod at once."""
        await self.api.send("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    async def pod_status(self, name: str) -> dict[str, Any]:
        """Return the status of a pod now."""
        status: dict[str, Any] = (await self.get(f"{PODS}/{name}"))["status"]
        return status

    async def runs(self, name: str) -> dict[str, Any]:
        """Wait until a pod runs."""
        return await self.phase(name, "Running")

    async def phase(self, name: str, wanted: str) -> dict[str, Any]:
        """Wait until a pod is in this phase; return its status."""
        status: dict[str, Any] = await until(
            f"{name} {wanted}",
            lambda: self.pod_status(name),
            lambda status: status.get("phase") == wanted,
        )
        return status

    async def refused(self, name: str) -> tuple[str, str]:
        """Wait until a pod has failed; return reason and message."""
        status = await self.phase(name, "Failed")
        return status["reason"], status["message"]

    async def events(self, name: str) -> set[tuple[str, str]]:
        """Return reason and message of the events about a pod."""
        items = (await self.get("/api/v1/namespaces/default/events"))["items"]
        mine = [item for item in items if item["involvedObject"].get("name") == name]
        return {(item["reason"], item["message"]) for item in mine}

    # What happens to kubelets

    async def restart(self) -> None:
        """Restart the kubelet, and wait until it accepts registrations."""
        if self.node.restart.startswith("http"):
            request = urllib.request.Request(self.node.restart, method="POST")  # noqa: S310  # ours
            with await asyncio.to_thread(urllib.request.urlopen, request, timeout=30):
                return
        await asyncio.to_thread(subprocess.run, shlex.split(self.node.restart), check=True)
        await until("kubelet.sock", self._accepts, lambda accepts: accepts)

    async def _accepts(self) -> bool:
        # the kubelet checks the version before it connects to the endpoint
        code, _ = await self.register("no", version="v0", timeout_s=5)
        return code == "UNKNOWN"

    @contextlib.asynccontextmanager
    async def _channel(self, path: Path) -> AsyncIterator[grpc.aio.Channel]:
        async with grpc.aio.insecure_channel(
            f"unix:{path}", options=device_plugin.OWN_POOL
        ) as channel:
            yield channel

    async def close(self) -> None:
        """End the statement's plugins and pods."""
        await self._cleanup.aclose()


OK: Final = ("OK", "")


async def until(
    what: str, read: Callable[[], Awaitable[Any]], holds: Callable[[Any], object]
) -> Any:
    """Call `read` until `holds` accepts its result; return the result."""
    value: Any = None
    try:
        async with asyncio.timeout(BOUND_S):
            while not holds(value := await read()):
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{what}: still {value} after {BOUND_S:g} s") from None
    return value


async def until_true(what: str, holds: Callable[[], object]) -> None:
    """Call `holds` until its result is true."""

    async def read() -> object:
        return holds()

    await until(what, read, bool)


Version = tuple[int, int]
Statement = Callable[[Kubelet], Awaitable[None]]
Test = Callable[[kubelet_nodes.Node, pytest.FixtureRequest], None]


def statement(story: Statement, *, since: Version = (0, 0), before: Version = (99, 0)) -> Test:
    """Return a test of a statement, which may be limited to some versions of the kubelet."""

    def test(node: kubelet_nodes.Node, request: pytest.FixtureRequest) -> None:
        if not since <= node.version < before:
            pytest.skip(f"not a statement about {kubelet_nodes.text(node.version)}")
        limit_s = _LIMIT_S
        if node.kind != "real" and story.__name__ in STAND_IN_CANNOT:
            reason = STAND_IN_CANNOT[story.__name__]
            fails = AssertionError, TimeoutError
            request.applymarker(pytest.mark.xfail(strict=True, raises=fails, reason=reason))
            limit_s = _EXPECTED_FAILURE_S
        asyncio.run(_play(node, story, limit_s))

    test.__name__ = story.__name__
    test.__doc__ = story.__doc__
    kinds = [OLD if before <= _PER_SOCKET else STAND_IN, REAL]
    with_kinds: Callable[[Test], Test] = pytest.mark.parametrize(
        "node", kinds, indirect=True, scope="session"
    )
    return with_kinds(test)


def before_1_37(story: Statement) -> Test:
    """Return a test for kubelets that identify a plugin only by its resource's name."""
    return statement(story, before=_PER_SOCKET)


def since_1_37(story: Statement) -> Test:
    """Return a test for kubelets that identify a plugin by its socket as well."""
    return statement(story, since=_PER_SOCKET)


def since_1_36(story: Statement) -> Test:
    """Return a test for kubelets with the features that became a default in 1.36."""
    return statement(story, since=(1, 36))


STAND_IN: Final = pytest.param("stand-in", id="stand-in")
OLD: Final = pytest.param("stand-in 1.34", id="stand-in-1.34")
REAL: Final = pytest.param("real", id="real", marks=[pytest.mark.kubelet, pytest.mark.timeout(400)])


async def _play(node: kubelet_nodes.Node, story: Statement, limit_s: float) -> None:
    api = node_status.Api(node.api)
    kubelet = Kubelet(node, api)
    try:
        async with asyncio.timeout(limit_s):
            await story(kubelet)
    finally:
        await kubelet.close()
        await api.close()
