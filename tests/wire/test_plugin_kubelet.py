import asyncio
import contextlib
import random
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
import msgspec
import pytest

from muster import machine, vocabulary
from muster.local import kubelet as stand_in
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc
from muster.service import runtime
from muster.vocabulary import Health
from muster.vocabulary import RegistrationReason as Reason
from muster_plugin import node as node_door
from muster_plugin.config import gpus, resources
from muster_plugin.config import settings as config_settings
from muster_plugin.gpu import evaluation, gpu_health, simulated
from muster_plugin.gpu import evaluation as gpu_source
from muster_plugin.kubelet import kubelet_socket, plugin_sockets, registration, resource_plugin
from muster_plugin.model import advertised

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
        self._more.clear()
        await self._more.wait()

    def lost(self) -> list[tuple[Reason, str]]:
        return [
            (event.reason, event.resource)
            for event in self.events
            if isinstance(event, vocabulary.PluginDeregistered)
        ]


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    (path / "device-plugins").mkdir()
    yield path
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
) -> AsyncIterator[tuple[node_door.Node, PublishedEvents]]:
    """Run what the process runs, except the bus and the probes; yield the node and its events."""
    published = PublishedEvents()
    sockets = Path(settings.kubelet.directory) / config_settings.SOCKET_DIRECTORY
    evaluator: gpu_source.GpuEvaluator | None = None
    if settings.simulated_gpus:
        source = simulated.SimulatedSource(settings.simulated_gpus, "n1", poll_s=0.05)
        evaluator = gpu_source.GpuEvaluator(
            source, gpu_health.GpuHealth(evaluation.read_policy(HEALTH), HEALTH), line()
        )
    node = node_door.Node(settings, "n1", new_runner=line, gpus=evaluator, timing=timing)
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
    async def limited() -> None:
        async with asyncio.timeout(100):
            await story()

    asyncio.run(limited())


async def until_allocatable(kubelet: stand_in.Kubelet, count: int, resource: str = FUSE) -> None:
    await kubelet.until(
        lambda state: resource in state.resources and state.resources[resource].allocatable == count
    )


def socket_of(node: node_door.Node, sockets: Path) -> Path:
    (name,) = sockets.glob(f"muster-{config_settings.slug(FUSE)}-*")
    assert FUSE in node.resource_plugins
    return name


def test_a_resource_is_listed_with_its_first_message(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            event = await published.registered(1)
            await until_allocatable(kubelet, 1)
            events = kubelet.state().resources[FUSE]
            assert (event.reason, event.registrations) == (Reason.START, 1)
            assert event.endpoint == events.endpoint
            assert (events.registered, events.streams_open) == (1, 1)
            device_id = advertised.device_id(str(root / "fuse"), 0)
            assert events.devices == {device_id: "Healthy"}
            (state,) = node.statuses()
            while not state.probe_ok:
                await asyncio.sleep(0.01)
                (state,) = node.statuses()
            assert (state.problem, state.streams, state.registrations) == ("", 1, 1)
            assert (state.devices, state.healthy, state.allocated) == (1, 1, 0)
            assert min(state.registered_age_s, state.last_send_age_s, state.probe_age_s) >= 0
            assert state.probe_ms > 0
            assert node.resource_plugins.kubelet_socket == kubelet_socket.identity(kubelet.socket)

    run(story)


async def restart(kubelet: stand_in.Kubelet, _: node_door.Node) -> None:
    await kubelet.restart()


async def drop_stream(kubelet: stand_in.Kubelet, _: node_door.Node) -> None:
    assert await kubelet.drop_stream(FUSE)


async def remove_socket(kubelet: stand_in.Kubelet, node: node_door.Node) -> None:
    socket_of(node, kubelet.plugins_directory).unlink()


async def steal_socket(kubelet: stand_in.Kubelet, node: node_door.Node) -> None:
    path = socket_of(node, kubelet.plugins_directory)
    thief = socket.socket(socket.AF_UNIX)
    thief.bind(str(path.with_name("thief.sock")))
    path.with_name("thief.sock").rename(path)
    thief.close()


async def end_server(_: stand_in.Kubelet, node: node_door.Node) -> None:
    endpoint = node.resource_plugins[FUSE]._endpoint
    assert endpoint is not None
    await endpoint._server.stop(None)


@pytest.mark.parametrize(
    ("loss", "reasons"),
    [
        (restart, {Reason.KUBELET_SOCKET_REPLACED}),
        (drop_stream, {Reason.STREAM_CLOSED}),
        (remove_socket, {Reason.OWN_SOCKET_LOST}),
        (steal_socket, {Reason.OWN_SOCKET_LOST}),
        # gRPC unlinks the socket of a server that ends: either may be seen first
        (end_server, {Reason.SERVER_ENDED, Reason.OWN_SOCKET_LOST}),
    ],
)
def test_every_loss_is_repaired_and_has_its_reason(
    root: Path,
    loss: Callable[[stand_in.Kubelet, node_door.Node], Awaitable[None]],
    reasons: set[Reason],
) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            first = await published.registered(1)
            await until_allocatable(kubelet, 1)
            await loss(kubelet, node)
            again = await published.registered(2)
            await until_allocatable(kubelet, 1)
            assert again.reason in reasons
            assert again.endpoint != first.endpoint
            assert len(published.lost()) == 1
            events = kubelet.state().resources[FUSE]
            assert (events.streams_open, events.endpoint) == (1, again.endpoint)

    run(story)


def test_a_refused_registration_is_reported_and_retried_until_it_is_accepted(root: Path) -> None:
    async def story() -> None:
        async with stand_in.Kubelet(directory=root, node="n1") as kubelet:
            kubelet.accept_registrations(accepts=False)
            async with plugin(fuse(root)) as (node, published):
                refused = "kubelet refuses registration (UNAVAILABLE: registrations are switched"
                while not (node.statuses() and node.statuses()[0].problem.startswith(refused)):
                    await asyncio.sleep(0)
                kubelet.accept_registrations(accepts=True)
                event = await published.registered(1)
                assert published.lost() == []
                assert (event.reason, event.registrations) == (Reason.REGISTER_FAILED, 1)

    run(story)


def test_a_kubelet_that_starts_later_is_registered_with(root: Path) -> None:
    async def story() -> None:
        async with plugin(fuse(root)) as (node, published):
            missing = "kubelet refuses registration (UNAVAILABLE: kubelet.sock is missing)"
            while not (node.statuses() and node.statuses()[0].problem.startswith(missing)):
                await asyncio.sleep(0)
            async with stand_in.Kubelet(directory=root, node="n1") as kubelet:
                await published.registered(1)
                await until_allocatable(kubelet, 1)
                assert published.lost() == []

    run(story)


class Forgetful:
    """A stand-in for a kubelet that opens no stream after the first registration."""

    def __init__(self, sockets: Path) -> None:
        self._sockets = sockets
        self._channels: list[grpc.aio.Channel] = []
        self.endpoints: list[str] = []

    async def register(
        self, request: dp.RegisterRequest, context: rpc.Context[dp.RegisterRequest, dp.Empty]
    ) -> dp.Empty:
        del context
        self.endpoints.append(request.endpoint)
        if len(self.endpoints) > 1:
            channel = grpc.aio.insecure_channel(f"unix:{self._sockets / request.endpoint}")
            self._channels.append(channel)
            stream = rpc.DevicePluginClient(channel).list_and_watch(dp.Empty())
            assert await stream.read()
        return dp.Empty()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def test_a_registration_that_brings_no_stream_is_repeated(root: Path) -> None:
    async def story() -> None:
        sockets = root / "device-plugins"
        forgetful = Forgetful(sockets)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((rpc.registration_handler(forgetful),))
        server.add_insecure_port(f"unix:{sockets / 'kubelet.sock'}")
        await server.start()
        async with plugin(fuse(root)) as (_, published):
            event = await published.registered(1)
            assert (event.reason, event.registrations) == (Reason.NO_STREAM, 2)
            assert published.lost() == [(Reason.NO_STREAM, FUSE)]
            assert len(set(forgetful.endpoints)) == 2
        await forgetful.close()
        await server.stop(None)

    run(story)


def test_the_self_probe_detects_a_loss_without_any_event(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root), timing=QUICK, watches=False) as (node, published),
        ):
            await published.registered(1)
            socket_of(node, kubelet.plugins_directory).unlink()
            event = await published.registered(2)
            assert (event.reason, published.lost()) == (
                Reason.PROBE_FAILED,
                [(Reason.PROBE_FAILED, FUSE)],
            )

    run(story)


def test_a_resource_that_cannot_register_delays_no_other(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root, gpus=2)) as (_, published),
        ):
            await published.registered(1, GPU)
            await published.registered(1, FUSE)
            await kubelet.drop_stream(FUSE)
            await published.registered(2, FUSE)
            assert published.lost() == [(Reason.STREAM_CLOSED, FUSE)]
            assert kubelet.state().resources[GPU].registered == 1

    run(story)


def test_a_device_that_goes_becomes_unhealthy_and_returns_under_the_same_id(root: Path) -> None:
    async def story() -> None:
        settings = fuse(root, "one", "two")
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(settings) as (_, published),
        ):
            await until_allocatable(kubelet, 2)
            (root / "two").unlink()
            gone = await published.until_health(Health.UNHEALTHY)
            await until_allocatable(kubelet, 1)
            assert kubelet.state().resources[FUSE].capacity == 2
            assert (gone.code, gone.reason) == ("device-missing", f"{root / 'two'} is gone")
            (root / "two").symlink_to("/dev/null")
            back = await published.until_health(Health.HEALTHY)
            await until_allocatable(kubelet, 2)
            assert (back.device_id, back.code) == (gone.device_id, "device-healthy")

    run(story)


def test_a_resource_without_devices_is_listed_empty_until_one_comes(root: Path) -> None:
    async def story() -> None:
        settings = fuse(root, "late")
        (root / "late").unlink()
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(settings) as (node, published),
        ):
            await published.registered(1)
            await kubelet.until(lambda state: state.resources[FUSE].streams_open == 1)
            (state,) = node.statuses()
            assert (state.devices, state.healthy, state.problem) == (0, 0, "")
            (root / "late").symlink_to("/dev/null")
            await until_allocatable(kubelet, 1)
            added = await published.of_kind(vocabulary.DeviceAdded, 1)
            assert [event.device for event in added] == [
                vocabulary.Device(id=advertised.device_id(str(root / "late"), 0), resource=FUSE)
            ]

    run(story)


def test_each_match_is_a_resource_that_comes_and_goes_with_it(root: Path) -> None:
    async def story() -> None:
        rule = resources.Resource(
            name="smarter-devices/*",
            per_match=True,
            groups=(
                resources.Group(devices=(resources.Entry(path=str(root / "video?")),), count=2),
            ),
            grace_s=0.05,
        )
        settings = config_settings.Settings(
            kubelet=config_settings.Kubelet(directory=str(root)), resources=(rule,)
        )
        (root / "video0").symlink_to("/dev/null")
        names = [
            f"smarter-devices/{str(root / video).strip('/').replace('/', '_')}"
            for video in ("video0", "video1")
        ]
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(settings) as (node, published),
        ):
            await until_allocatable(kubelet, 2, names[0])
            (root / "video1").symlink_to("/dev/null")
            await until_allocatable(kubelet, 2, names[1])
            reasons = [(await published.registered(1, name)).reason for name in names]
            assert reasons == [Reason.START, Reason.DEVICE_APPEARED]
            (root / "video0").unlink()
            await kubelet.until(lambda state: state.resources[names[0]].streams_open == 0)
            removed = await published.of_kind(vocabulary.DeviceRemoved, 2)
            assert [event.resource for event in removed] == [names[0]] * 2
            assert [state.name for state in node.statuses()] == [names[1]]
            assert kubelet.state().resources[names[1]].registered == 1

    run(story)


def test_fewer_devices_than_expected_are_reported_and_so_is_their_return(root: Path) -> None:
    async def story() -> None:
        (root / "one").symlink_to("/dev/null")
        rule = resources.Resource(
            name=FUSE,
            groups=(resources.Group(devices=(resources.Entry(path=str(root / "[a-z]*[oe]")),)),),
            expect=resources.Expect(min=2),
        )
        settings = config_settings.Settings(
            kubelet=config_settings.Kubelet(directory=str(root)), resources=(rule,)
        )
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(settings) as (node, published),
        ):
            await published.registered(1)
            short = "expected at least 2 devices, found 1"
            assert [state.short for state in node.statuses()] == [short]
            (root / "two").symlink_to("/dev/zero")
            await until_allocatable(kubelet, 2)
            changed = await published.of_kind(vocabulary.ExpectationChanged, 2)
            assert [event.short for event in changed] == [short, ""]

    run(story)


def examined(root: Path, **checks: object) -> config_settings.Settings:
    """Return settings that check a link to /dev/null often."""
    (root / "one").symlink_to("/dev/null")
    rule = resources.Resource(
        name=FUSE,
        groups=(resources.Group(devices=(resources.Entry(path=str(root / "one")),)),),
        checks=msgspec.convert({"period_s": 0.1, "good": 2, **checks}, resources.Checks),
    )
    return config_settings.Settings(
        kubelet=config_settings.Kubelet(directory=str(root)), resources=(rule,)
    )


def test_a_failed_check_command_makes_a_device_unhealthy_until_checks_pass(root: Path) -> None:
    async def story() -> None:
        told_by = 'test -e "${MUSTER_DEVICES%one}/well" || { echo worn out >&2; exit 3; }'
        (root / "well").touch()
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(examined(root, command=["/bin/sh", "-c", told_by])) as (_, published),
        ):
            await until_allocatable(kubelet, 1)
            (root / "well").unlink()
            bad = await published.until_health(Health.UNHEALTHY)
            assert (bad.code, bad.reason) == (
                "check-failed",
                f"{root / 'one'}: /bin/sh ended with 3: worn out",
            )
            await until_allocatable(kubelet, 0)
            (root / "well").touch()
            assert (await published.until_health(Health.HEALTHY)).code == "device-healthy"
            await until_allocatable(kubelet, 1)

    run(story)


def pipes() -> int:
    """Count the pipes that this process has open."""
    events = 0
    for link in [*Path("/proc/self/fd").iterdir()]:
        # gRPC's threads close pipes meanwhile, and the descriptor of the listing is closed
        with contextlib.suppress(FileNotFoundError):
            events += str(link.readlink()).startswith("pipe:")
    return events


def test_a_check_command_that_leaves_a_daemon_behind_has_ended_and_leaks_no_descriptor(
    root: Path,
) -> None:
    async def story() -> None:
        daemon = "setsid sleep 8 & "
        told_by = f'{daemon} test -e "${{MUSTER_DEVICES%one}}/well" || {{ echo worn >&2; exit 3; }}'
        (root / "well").touch()
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(examined(root, command=["/bin/sh", "-c", told_by])) as (_, published),
        ):
            await until_allocatable(kubelet, 1)
            before = pipes()
            (root / "well").unlink()
            bad = await published.until_health(Health.UNHEALTHY)
            assert bad.reason == f"{root / 'one'}: /bin/sh ended with 3: worn"
            (root / "well").touch()
            await published.until_health(Health.HEALTHY)
            # a check that runs at this moment has its own pipes
            assert pipes() <= before + 2

    run(story)


def test_a_check_command_that_does_not_end_is_a_failed_check(root: Path) -> None:
    async def story() -> None:
        settings = examined(root, command=["/bin/sh", "-c", "sleep 30"], timeout_s=0.05)
        async with (
            stand_in.Kubelet(directory=root, node="n1"),
            plugin(settings) as (_, published),
        ):
            bad = await published.until_health(Health.UNHEALTHY)
            assert bad.reason == f"{root / 'one'}: /bin/sh has not ended within 0.05 s"

    run(story)


def test_a_device_with_an_open_check_is_not_healthy_before_it_was_opened(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(examined(root, open=True)) as (_, published),
        ):
            assert (await published.until_health(Health.HEALTHY)).code == "device-healthy"
            await until_allocatable(kubelet, 1)

    run(story)


def test_a_scripted_xid_makes_one_gpu_unhealthy_until_it_is_cleared(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root, gpus=4)) as (_, published),
        ):
            await until_allocatable(kubelet, 4, GPU)
            script = root / "faults"
            script.write_text('{"device": 2, "xid": 79}\n{"device": 0, "xid": 13}\n')
            event = await published.until_health(Health.UNHEALTHY)
            await until_allocatable(kubelet, 3, GPU)
            assert (event.resource, event.device_id) == (GPU, advertised.gpu_uuid("n1", 2))
            assert (event.code, event.reason) == ("xid-79", "XID 79: GPU has fallen off the bus")
            assert event.policy.startswith("nvidia-compatible/")
            assert [evaluator.source for evaluator in event.evidence] == [
                "nvml-events",
                "nvml-poll",
            ]
            with script.open("a") as appended:
                appended.write('{"device": 2, "clear": 79}\n')
            await until_allocatable(kubelet, 4, GPU)

    run(story)


def test_a_container_gets_what_it_requested_and_the_allocation_is_published(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root, gpus=2)) as (_, published),
        ):
            await until_allocatable(kubelet, 1)
            await until_allocatable(kubelet, 2, GPU)
            device, gpu = await kubelet.allocate(name="pod", resources={FUSE: 1, GPU: 1})
            path = str(root / "fuse")
            spec = dp.DeviceSpec(container_path=path, host_path=path, permissions="rw")
            assert list(device.answer.devices) == [spec]
            assert dict(device.answer.envs) == {advertised.environment_variable(FUSE): path}
            assert dict(gpu.answer.envs) == {"NVIDIA_VISIBLE_DEVICES": gpu.ids[0]}
            observed = [e for e in published.events if isinstance(e, vocabulary.AllocationObserved)]
            assert [(e.resource, e.device_ids) for e in observed] == [
                (FUSE, device.ids),
                (GPU, gpu.ids),
            ]

    run(story)


def test_podresources_show_which_pod_holds_a_device(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            await until_allocatable(kubelet, 1)
            (device,) = await kubelet.allocate(name="pod", resources={FUSE: 1})
            events = await published.of_kind(vocabulary.AllocationObserved, 2)
            assert [(event.pod, event.device_ids) for event in events] == [
                ("", device.ids),
                ("default/pod", device.ids),
            ]
            (state,) = node.statuses()
            assert (state.allocated, state.mismatch) == (1, "")

    run(story)


def test_a_heartbeat_is_sent_at_once_when_a_new_kubelet_refuses_the_registration(
    root: Path,
) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            await published.registered(1)
            kubelet.accept_registrations(accepts=False)
            await kubelet.restart()
            (state,) = node.statuses()
            while not state.problem or state.kubelet_away:
                await node.heartbeat_due.wait()
                node.heartbeat_due.clear()
                (state,) = node.statuses()
            assert "kubelet refuses registration" in state.problem

    run(story)


def test_a_device_that_is_gone_is_advertised_so_before_its_allocation_fails(root: Path) -> None:
    async def story() -> None:
        settings = fuse(root, "one")
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(settings, watches=False) as (node, published),
        ):
            await published.registered(1)
            await until_allocatable(kubelet, 1)
            path = socket_of(node, kubelet.plugins_directory)
            (root / "one").unlink()
            device_id = advertised.device_id(str(root / "one"), 0)
            request = dp.AllocateRequest(
                container_requests=[dp.ContainerAllocateRequest(devices_ids=[device_id])]
            )
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await rpc.DevicePluginClient(channel).allocate(request)
            gone = f"{root / 'one'}: no such file or directory"
            assert (caught.value.code(), caught.value.details()) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{FUSE}: {gone}",
            )
            await until_allocatable(kubelet, 0)

    run(story)


def explained(root: Path) -> config_settings.Settings:
    """Return settings that advertise a resource with a CDI spec."""
    resource = msgspec.structs.replace(fuse(root).resources[0], cdi=True)
    return config_settings.Settings(
        kubelet=config_settings.Kubelet(directory=str(root)),
        cdi=config_settings.Cdi(directory=str(root / "cdi")),
        resources=(resource,),
    )


def test_a_cdi_spec_has_what_a_container_gets_and_stays_for_its_next_start(
    root: Path,
) -> None:
    async def story() -> None:
        (root / "cdi").mkdir()
        for name in ("muster-a.example_old.json", "vendor.json"):
            (root / "cdi" / name).touch()
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(explained(root)),
        ):
            await until_allocatable(kubelet, 1)
            (allocated,) = await kubelet.allocate(name="pod", resources={FUSE: 1})
            names = [device.name for device in allocated.answer.cdi_devices]
            file, others = sorted((root / "cdi").iterdir())
            assert (file.name, others.name) == ("muster-smarter-devices_fuse.json", "vendor.json")
            spec = msgspec.json.decode(file.read_bytes())
            assert names == [f"{spec['kind']}={spec['devices'][0]['name']}"]
            assert not allocated.answer.devices
        assert file.exists()

    run(story)


def test_a_cdi_spec_that_is_removed_is_written_again(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(explained(root)) as (node, _),
        ):
            await until_allocatable(kubelet, 1)
            (file,) = (root / "cdi").iterdir()
            content = file.read_bytes()
            file.unlink()
            while not file.exists():
                await asyncio.sleep(0)
            assert (file.read_bytes(), node.statuses()[0].problem) == (content, "")

    run(story)


def test_a_cdi_spec_is_written_only_for_resources_that_no_other_plugin_serves(root: Path) -> None:
    async def story() -> None:
        other = plugin_sockets.ResourceLocks(root / config_settings.SOCKET_DIRECTORY)
        assert other.acquire(FUSE) == ""
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(explained(root)) as (node, _),
        ):
            while not (node.statuses() and "serves it" in node.statuses()[0].problem):
                await asyncio.sleep(0)
            assert not (root / "cdi").exists()
            other.release_all()
            await until_allocatable(kubelet, 1)
            assert len([*(root / "cdi").iterdir()]) == 1

    run(story)


def test_a_cdi_spec_that_cannot_be_written_is_a_problem_of_its_resource(root: Path) -> None:
    async def story() -> None:
        (root / "cdi").write_text("no directory")
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(explained(root)) as (node, published),
        ):
            await until_allocatable(kubelet, 1)
            await published.registered(1)
            (state,) = node.statuses()
            path = root / "cdi/muster-smarter-devices_fuse.json"
            assert state.problem == f"its CDI spec {path} cannot be written: Not a directory"
            node.heartbeat_due.clear()
            (root / "cdi").unlink()
            await node.scan_devices()
            assert (node.statuses()[0].problem, node.heartbeat_due.is_set()) == ("", True)

    run(story)


def test_an_unknown_id_fails_with_a_helpful_text(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            await published.registered(1)
            path = socket_of(node, kubelet.plugins_directory)
            request = dp.AllocateRequest(
                container_requests=[dp.ContainerAllocateRequest(devices_ids=["nope"])]
            )
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await rpc.DevicePluginClient(channel).allocate(request)
            device_id = advertised.device_id(str(root / "fuse"), 0)
            assert (caught.value.code(), caught.value.details()) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{FUSE} has no device 'nope'; it has {device_id}",
            )

    run(story)


def arbitrary_ids(chance: random.Random, device_id: str) -> list[str]:
    kinds = (device_id, "", "x" * 5000, "nope", "\u2028\u0000", device_id + "0")
    return [chance.choice(kinds) for _ in range(chance.randrange(6))]


def says(answer: object) -> int | str:
    """Return the number of containers in an answer, or the status code of an error."""
    if isinstance(answer, grpc.aio.AioRpcError):
        return answer.code().name
    assert isinstance(answer, dp.AllocateResponse)
    return len(answer.container_responses)


def test_no_request_breaks_the_plugin_or_stops_its_stream(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            await published.registered(1)
            device_id = advertised.device_id(str(root / "fuse"), 0)
            path, chance = socket_of(node, kubelet.plugins_directory), random.Random(1)  # noqa: S311  # the same requests every time
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                client = rpc.DevicePluginClient(channel)
                for _ in range(200):
                    wanted = [arbitrary_ids(chance, device_id) for _ in range(chance.randrange(4))]
                    container = [dp.ContainerAllocateRequest(devices_ids=names) for names in wanted]
                    is_known = all(name == device_id for names in wanted for name in names)
                    request = dp.AllocateRequest(container_requests=container)
                    answer = await asyncio.gather(client.allocate(request), return_exceptions=True)
                    assert says(answer[0]) == (len(wanted) if is_known else "INVALID_ARGUMENT")
                    preferred = dp.ContainerPreferredAllocationRequest(
                        available_deviceIDs=arbitrary_ids(chance, device_id),
                        must_include_deviceIDs=arbitrary_ids(chance, device_id),
                        allocation_size=chance.choice([-(2**31), -1, 0, 1, 5, 2**31 - 1]),
                    )
                    await client.get_preferred_allocation(
                        dp.PreferredAllocationRequest(container_requests=[preferred])
                    )
            assert kubelet.state().resources[FUSE].streams_open == 1
            assert published.lost() == []

    run(story)


def healths(message: object) -> list[str]:
    assert isinstance(message, dp.ListAndWatchResponse)
    return [device.health for device in message.devices]


def test_two_streams_each_get_the_whole_list_and_every_change(root: Path) -> None:
    async def story() -> None:
        async with (
            stand_in.Kubelet(directory=root, node="n1") as kubelet,
            plugin(fuse(root)) as (node, published),
        ):
            await published.registered(1)
            path = socket_of(node, kubelet.plugins_directory)
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                client = rpc.DevicePluginClient(channel)
                streams = [client.list_and_watch(dp.Empty()) for _ in range(2)]
                first = [healths(await stream.read()) for stream in streams]
                (root / "fuse").unlink()
                second = [healths(await stream.read()) for stream in streams]
            assert (first, second) == ([["Healthy"]] * 2, [["Unhealthy"]] * 2)

    run(story)


def test_only_dead_sockets_of_muster_plugins_are_removed_at_start(root: Path) -> None:
    sockets = root / "device-plugins"
    bound = {}
    for name in ("muster-a_b-1-1.sock", "muster-a_b-2-1.sock", "other.sock"):
        bound[name] = socket.socket(socket.AF_UNIX)
        bound[name].bind(str(sockets / name))
    bound["muster-a_b-2-1.sock"].listen()
    bound["muster-a_b-1-1.sock"].close()
    assert plugin_sockets.remove_stale([sockets]) == ["muster-a_b-1-1.sock"]
    assert sorted(path.name for path in sockets.iterdir()) == ["muster-a_b-2-1.sock", "other.sock"]
    for made in bound.values():
        made.close()
