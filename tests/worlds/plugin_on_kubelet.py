"""The plugin's node on the stand-in for a kubelet, in this process."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from muster import machine, vocabulary
from muster.local import kubelet as stand_in
from muster.service import runtime
from muster.vocabulary import Health
from muster.vocabulary import RegistrationReason as Reason
from muster_plugin import node as plugin_node
from muster_plugin.config import gpus, resources
from muster_plugin.config import settings as config_settings
from muster_plugin.gpu import evaluation, gpu_health, simulated
from muster_plugin.gpu import evaluation as gpu_source
from muster_plugin.kubelet import registration, resource_plugin

FUSE = "smarter-devices/fuse"
GPU = "nvidia.com/gpu"
QUICK = resource_plugin.Timing(
    timeouts=registration.Timeouts(stream_after_register_s=0.3, stream_after_close_s=0.1),
    probe_s=0.1,
)
CALM = resource_plugin.Timing(timeouts=QUICK.timeouts)
Event = TypeVar("Event", bound=vocabulary.Event)
HEALTH = gpus.Health(good=1, cooldown_s=0.0)
In = TypeVar("In")
Out = TypeVar("Out")


class PublishedEvents:
    """Every event that the plugin would publish, in order."""

    def __init__(self) -> None:
        self.events: list[vocabulary.Event] = []
        self._more = asyncio.Event()

    def __call__(self, event: vocabulary.Event) -> None:
        """Record an event."""
        self.events.append(event)
        self._more.set()

    async def registered(self, times: int, resource: str = FUSE) -> vocabulary.PluginRegistered:
        """Wait for the nth registration of a resource."""
        while True:
            events = [
                event
                for event in self.events
                if isinstance(event, vocabulary.PluginRegistered) and event.resource == resource
            ]
            if len(events) >= times:
                return events[times - 1]
            await self.more()

    async def of_kind(self, kind: type[Event], times: int) -> list[Event]:
        """Wait until there are `times` events of a kind; return all of them."""
        while True:
            events = [event for event in self.events if isinstance(event, kind)]
            if len(events) >= times:
                return events
            await self.more()

    async def until_health(self, health: Health) -> vocabulary.DeviceHealthChanged:
        """Wait until the newest change of health is this one."""
        while True:
            events = [e for e in self.events if isinstance(e, vocabulary.DeviceHealthChanged)]
            if events and events[-1].health is health:
                return events[-1]
            await self.more()

    async def more(self) -> None:
        """Wait for another event."""
        self._more.clear()
        await self._more.wait()

    def lost(self) -> list[tuple[Reason, str]]:
        """Return why which resources were deregistered."""
        return [
            (event.reason, event.resource)
            for event in self.events
            if isinstance(event, vocabulary.PluginDeregistered)
        ]


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Create the kubelet's directory; its path is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    try:
        (path / "device-plugins").mkdir()
        yield path
    finally:
        shutil.rmtree(path)


def fuse(root: Path, *paths: str, gpus: int = 0) -> config_settings.Settings:
    """Return settings that advertise links to /dev/null, a device node wherever tests run."""
    for path in paths or ("fuse",):
        (root / path).symlink_to("/dev/null")
    resource = resources.Resource(
        name=FUSE,
        groups=tuple(
            resources.Group(devices=(resources.Entry(path=str(root / path)),))
            for path in paths or ("fuse",)
        ),
    )
    simulated = (
        config_settings.SimulatedGpus(count=gpus, faults=str(root / "faults")) if gpus else None
    )
    return config_settings.Settings(
        kubelet=config_settings.Kubelet(directory=str(root)),
        resources=(resource,),
        simulated_gpus=simulated,
    )


def line() -> machine.MachineRunner[In, Out]:
    """Return a runner of a state machine with an inbox of its own."""
    inbox: asyncio.Queue[runtime.Delivery[In]] = asyncio.Queue()
    return machine.MachineRunner(
        send=lambda event: inbox.put_nowait(runtime.Delivery(event)),
        drive=lambda driven, act: runtime.drive(driven, inbox, act),
    )


@contextlib.asynccontextmanager
async def plugin(
    settings: config_settings.Settings,
    *,
    timing: resource_plugin.Timing = CALM,
    watches: bool = True,
) -> AsyncIterator[tuple[plugin_node.Node, PublishedEvents]]:
    """Run what the process runs, except the bus and the probes; yield the node and its events."""
    published = PublishedEvents()
    sockets = Path(settings.kubelet.directory) / config_settings.SOCKET_DIRECTORY
    evaluator: gpu_source.GpuEvaluator | None = None
    if settings.simulated_gpus:
        source = simulated.SimulatedSource(settings.simulated_gpus, "n1", poll_s=0.05)
        evaluator = gpu_source.GpuEvaluator(
            source, gpu_health.GpuHealth(evaluation.read_policy(HEALTH), HEALTH), line()
        )
    node = plugin_node.Node(settings, "n1", new_runner=line, gpus=evaluator, timing=timing)
    node.event_log.publish_to(published)
    working = [*node.tasks()]
    if not watches:
        working.pop(1).close()
    tasks = [asyncio.create_task(work) for work in working]
    try:
        yield node, published
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await node.close()
        assert [e for e in ended if not isinstance(e, asyncio.CancelledError)] == []
        assert not list(sockets.glob("muster-*"))


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Run a story for at most 100 s."""

    async def limited() -> None:
        async with asyncio.timeout(100):
            await story()

    asyncio.run(limited())


async def until_allocatable(kubelet: stand_in.Kubelet, count: int, resource: str = FUSE) -> None:
    """Wait until a resource has this many allocatable devices."""
    await kubelet.until(
        lambda state: resource in state.resources and state.resources[resource].allocatable == count
    )


def socket_of(node: plugin_node.Node, sockets: Path) -> Path:
    """Return the socket on which the node serves FUSE."""
    (name,) = sockets.glob(f"muster-{config_settings.slug(FUSE)}-*")
    assert FUSE in node.resource_plugins
    return name
