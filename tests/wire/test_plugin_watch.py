"""The watch of plugins that muster does not run, with a kubelet and every kind of failure."""

import asyncio
import collections
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from muster import vocabulary
from muster.local import kubelet as stand_in
from muster.local import nats
from muster.nats import bus, consumers, streams
from muster_plugin import __main__ as plugin_main
from muster_plugin.config import settings
from muster_plugin.kubelet import podresources
from muster_plugin.watch import finding, node_model, observation, watcher
from tests.programs import foreign_plugin as program_of_plugin
from tests.worlds import foreign_plugin, kubelets, plugin_process

Finding = vocabulary.WatchedFinding
GPU, SOCKET = "nvidia.com/gpu", "nvidia-gpu.sock"
PATH = f"device-plugins/{SOCKET}"
HOLDS = finding.Holds(
    removed_s=0.1, ended_s=0.1, halted_s=0.1, wrong_s=0.1, unregistered_s=0.1, other_s=0.1
)
TIMING = node_model.Timing(kubelet_settles_s=0.0, report_s=0.0, holds=HOLDS)


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    yield path
    shutil.rmtree(path)


class Watch:
    """A watcher with short intervals, and the events that it publishes."""

    def __init__(self, root: Path, **section: object) -> None:
        chosen = msgspec.convert(
            {
                "kubelet": {"directory": str(root)},
                "watch": {"enabled": True, **section},
            },
            settings.Settings,
        )
        self.events: asyncio.Queue[vocabulary.PluginObserved] = asyncio.Queue()
        self.watcher = watcher.Watcher(
            chosen,
            "node-a",
            new_runner=plugin_main._new_runner,
            ours=tuple,
            on_change=self.events.put_nowait,
            timing=TIMING,
        )

    async def becomes(self, expected: vocabulary.Watched) -> None:
        """Wait until this observation is published; keep all that were published in `seen`."""
        self.seen: list[vocabulary.Watched] = []
        try:
            async with asyncio.timeout(20):
                while not self.seen or self.seen[-1] != expected:
                    self.seen.append((await self.events.get()).watched)
        except TimeoutError:
            assert self.seen == [expected]


@contextlib.asynccontextmanager
async def watching(root: Path, **section: object) -> AsyncIterator[Watch]:
    watch = Watch(root, **section)

    async def listed(listing: podresources.Listing | None) -> None:
        watch.watcher.on_listing(listing)

    poller = podresources.PodResourcesPoller(root / podresources.SOCKET, listed)
    tasks = [
        asyncio.create_task(watch.watcher.run()),
        asyncio.create_task(poller.run(period_s=0.1)),
    ]
    try:
        yield watch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def play(root: Path, story: Callable[[stand_in.Kubelet], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with stand_in.Kubelet(directory=root, node="node-a") as kubelet:
            await story(kubelet)

    plugin_process.run(whole, limit_s=60)


@contextlib.asynccontextmanager
async def gpus(kubelet: stand_in.Kubelet) -> AsyncIterator[kubelets.Program]:
    """Run a plugin with 8 GPUs; yield it once they are allocatable."""
    root = kubelet.plugins_directory.parent
    async with foreign_plugin.running(root, SOCKET, GPU, 8) as program:
        await plugin_process.until_allocatable(kubelet, GPU, 8)
        yield program


@contextlib.asynccontextmanager
async def watched_gpus(
    kubelet: stand_in.Kubelet,
) -> AsyncIterator[tuple[kubelets.Program, Watch]]:
    """Run and watch a plugin with 8 GPUs; yield both once it is observed without a problem."""
    async with gpus(kubelet) as program, watching(kubelet.plugins_directory.parent) as watch:
        await watch.becomes(of(program))
        yield program, watch


def of(
    program: kubelets.Program,
    finding: Finding = Finding.NONE,
    text: str = "",
    *,
    listed: int = 8,
) -> vocabulary.Watched:
    name = Path(f"/proc/{program.process.pid}/comm").read_text().strip()
    return vocabulary.Watched(
        name=GPU,
        finding=finding,
        text=text,
        socket=PATH,
        listed=listed,
        expected=8,
        allocated=0,
        process=f"{program.process.pid} ({name})",
    )


def test_what_is_wrong_with_a_plugin_is_published_and_so_is_its_recovery(root: Path) -> None:
    async def story(kubelet: stand_in.Kubelet) -> None:
        async with watched_gpus(kubelet) as (program, watch):
            await kubelet.drop_stream(GPU)
            text = "the kubelet lists 0 of 8 devices"
            await watch.becomes(of(program, Finding.NOT_REGISTERED, text, listed=0))
            await program_of_plugin.register(root, SOCKET, GPU)
            await watch.becomes(of(program))
            program.process.send_signal(signal.SIGSTOP)
            text = "its process is stopped; the kubelet lists 8 of 8 devices"
            await watch.becomes(of(program, Finding.NO_ANSWER, text))
            program.process.send_signal(signal.SIGCONT)
            await watch.becomes(of(program))
            (root / PATH).unlink()
            text = (
                f"its socket {SOCKET} was removed, so the kubelet cannot connect to it again; "
                "the kubelet lists 8 of 8 devices"
            )
            await watch.becomes(of(program, Finding.SOCKET_REMOVED, text))

    play(root, story)


def test_a_killed_plugin_is_published_and_its_return_too(root: Path) -> None:
    async def story(kubelet: stand_in.Kubelet) -> None:
        async with watched_gpus(kubelet) as (program, watch):
            text = f"connections to {SOCKET} are refused; the kubelet lists 0 of 8 devices"
            dead = of(program, Finding.NOT_SERVED, text, listed=0)
            program.process.kill()
            await watch.becomes(dead)
            async with gpus(kubelet) as successor:
                await watch.becomes(of(successor))
            assert watch.watcher.restarts == 1

    play(root, story)


def test_a_watched_plugin_sees_few_connections_and_only_the_kubelets_first_question(
    root: Path,
) -> None:
    async def story(kubelet: stand_in.Kubelet) -> None:
        async with gpus(kubelet) as program:
            async with watching(root) as watch:
                await watch.becomes(of(program))
                # a socket that was made again is probed again
                (root / PATH).rename(root / "device-plugins" / "moved")
                (root / "device-plugins" / "moved").rename(root / PATH)
                while watch.watcher.probes[observation.Answer.ANSWERED] < 2:
                    await asyncio.sleep(0.01)
            probes = sum(watch.watcher.probes.values())
            log = await foreign_plugin.log(program)
        seen = collections.Counter(said.get("method", said["event"]) for said in log)
        # the kubelet asks for the list once, which may be logged only now
        del seen[program_of_plugin.LIST]
        # the process was killed, perhaps before it logged the end of the last connection
        assert seen.pop("disconnected") in {probes - 1, probes}
        assert seen == {"connected": probes, program_of_plugin.OPTIONS: probes}
        assert probes <= 4

    play(root, story)


def test_a_plugin_that_exits_at_every_probe_is_probed_twice_and_then_left_alone(
    root: Path,
) -> None:
    probes = 0

    async def story(kubelet: stand_in.Kubelet) -> None:
        nonlocal probes
        directory = kubelet.plugins_directory.parent
        async with watching(directory, expect={GPU: 8}) as watch:
            for _ in range(2):
                assert await foreign_plugin.until_exit(directory, SOCKET, GPU, 8) == 1
            async with gpus(kubelet) as third:
                await kubelet.drop_stream(GPU)
                await watch.becomes(
                    vocabulary.Watched(
                        name=GPU,
                        finding=Finding.NOT_REGISTERED,
                        text="the kubelet lists 0 of 8 devices",
                        socket=PATH,
                        listed=0,
                        expected=8,
                        allocated=0,
                    )
                )
                assert third.process.returncode is None
            reached = {*observation.Answer} - {observation.Answer.REFUSED}
            probes = sum(watch.watcher.probes[answer] for answer in reached)

    # on a busy machine an end may be noticed too late to be suspected, and a third probe follows
    for attempt in range(3):
        (directory := root / str(attempt)).mkdir()
        play(directory, story)
        if probes == 2:
            break
    assert probes == 2


def test_what_was_left_in_the_directory_is_no_plugin(root: Path) -> None:
    async def story(kubelet: stand_in.Kubelet) -> None:
        folder = kubelet.plugins_directory
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(folder / "dead.sock"))
        for at in range(1000):
            os.link(folder / "dead.sock", folder / f"dead{at}.sock")
        os.mkfifo(folder / "pipe.sock")
        (folder / "loop.sock").symlink_to(folder / "loop.sock")
        async with watched_gpus(kubelet) as (program, watch):
            assert watch.watcher.watched == (of(program),)
            assert {each.name for each in watch.seen} == {GPU}
            assert {each.finding for each in watch.seen} == {Finding.NONE}

    play(root, story)


def test_without_podresources_a_plugin_is_watched_by_its_socket(root: Path) -> None:
    async def story(kubelet: stand_in.Kubelet) -> None:
        kubelet.podresources_socket.unlink()
        async with gpus(kubelet) as program, watching(root) as watch:
            known = msgspec.structs.replace(of(program), listed=None, allocated=None)
            await watch.becomes(known)
            program.process.kill()
            text = f"connections to {SOCKET} are refused"
            await watch.becomes(
                msgspec.structs.replace(known, finding=Finding.NOT_SERVED, text=text)
            )

    play(root, story)


def test_a_plugin_without_resources_of_its_own_watches_others(root: Path) -> None:
    async def story() -> None:
        file = root / "plugin.json"
        configuration = {
            "node": "node-a",
            "kubelet": {"directory": str(root)},
            "watch": {"enabled": True, "expect": {GPU: 8}},
            "snapshot_period_s": 1,
        }
        async with (
            nats.NatsServer(root / "nats") as server,
            bus.Bus(server.url, producer="tests/x", name="x", owner=True) as listener,
            stand_in.Kubelet(directory=root, node="node-a"),
            foreign_plugin.running(root, SOCKET, GPU, 8),
        ):
            await listener.link.client()
            configuration["bus"] = {"url": server.url}
            file.write_bytes(msgspec.json.encode(configuration))
            async with plugin_process.started(file) as process:
                await process.said("plugin_watch_started", watched=GPU)
                await process.said("listening")
                assert await process.asked("/readyz") == (200, "ok\n")
                watched: tuple[vocabulary.Watched, ...] = ()
                while not watched:
                    for event in await consumers.newest(
                        listener.link, streams.INVENTORY, "muster.inventory.node-a.>"
                    ):
                        assert isinstance(event.data, vocabulary.InventoryReported)
                        watched = event.data.watched
                assert [(each.name, each.finding) for each in watched] == [(GPU, Finding.NONE)]
                _, metrics = await process.asked("/metrics")
                assert (
                    f'muster_plugin_watched{{finding="none",kind="device_plugin",plugin="{GPU}"}}'
                    in metrics
                )
                await process.stop()
            events = await consumers.newest(listener.link, streams.EVENTS, "muster.event.node-a.>")
            assert "plugin.observed" in {event.type for event in events}

    plugin_process.run(story)
