"""Of two plugins on one node, one serves a resource; the other reports that, and takes over."""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.local import kubelet as stand_in
from muster_plugin.kubelet import plugin_sockets
from tests.worlds import plugin_process

ONE, TWO = "a.example/one", "a.example/two"


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    (path / "device-plugins").mkdir()
    yield path
    shutil.rmtree(path)


def test_a_resource_is_locked_once_until_it_is_released(root: Path) -> None:
    ours, theirs = plugin_sockets.ResourceLocks(root), plugin_sockets.ResourceLocks(root)
    assert (ours.acquire(ONE), ours.acquire(ONE), ours.acquire(TWO)) == ("", "", "")
    assert theirs.acquire(ONE).startswith(f"{socket.gethostname()}, process ")
    assert (ours.holds(ONE), theirs.holds(ONE)) == (True, False)
    ours.release(ONE)
    assert (theirs.acquire(ONE), theirs.holds(ONE)) == ("", True)
    ours.release_all()
    theirs.release_all()
    assert list((root / plugin_sockets.LOCK_DIRECTORY).iterdir()) == []


def test_a_lock_whose_file_is_gone_is_acquired_again(root: Path) -> None:
    ours, theirs = plugin_sockets.ResourceLocks(root), plugin_sockets.ResourceLocks(root)
    assert ours.acquire(ONE) == ""
    shutil.rmtree(root / plugin_sockets.LOCK_DIRECTORY)
    assert ours.acquire(ONE) == ""
    assert theirs.acquire(ONE) != ""
    shutil.rmtree(root / plugin_sockets.LOCK_DIRECTORY)
    assert theirs.acquire(ONE) == ""
    assert ours.acquire(ONE) != ""
    assert not ours.holds(ONE)
    theirs.release_all()


def test_lock_files_that_no_process_holds_are_removed_at_start(root: Path) -> None:
    ours = plugin_sockets.ResourceLocks(root)
    assert ours.acquire(ONE) == ""
    (root / plugin_sockets.LOCK_DIRECTORY / "a.example_old.lock").touch()
    plugin_sockets.ResourceLocks(root).remove_stale()
    assert [path.name for path in (root / plugin_sockets.LOCK_DIRECTORY).iterdir()] == [
        "a.example_one.lock"
    ]
    assert (ours.is_free("a.example_one"), ours.is_free("a.example_old")) == (False, True)
    ours.release_all()


def test_where_no_file_can_be_locked_every_resource_is_free(root: Path) -> None:
    nowhere = plugin_sockets.ResourceLocks(root / "none")
    assert (nowhere.acquire(ONE), nowhere.holds(ONE)) == ("", False)


def test_a_resource_whose_name_begins_like_anothers_is_another(root: Path) -> None:
    path = root / "muster-a.example_one-shared-0123cdef-1.sock"
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(path))
        served.listen()
        assert plugin_sockets.served_sockets([root], ["a.example_one"]) == []
        assert plugin_sockets.served_sockets([root], ["a.example_one-shared"]) == [str(path)]


def test_of_two_plugins_that_start_together_one_serves_and_one_refuses(root: Path) -> None:
    async def story() -> None:
        file = plugin_process.written(
            root / "c.json",
            plugin_process.resource(ONE, "/dev/null"),
            plugin_process.resource(TWO, "/dev/zero"),
        )
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(root, file) as first,
            plugin_process.plugin(root, file) as second,
        ):
            ends = {asyncio.create_task(p.process.wait()): p for p in (first, second)}
            done, left = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            refused, serves = ends[done.pop()], ends[left.pop()]
            code, text = await refused.ended()
            assert code == 2
            assert text.startswith(f"muster-plugin: another plugin on this node serves {ONE} (")
            for name in (ONE, TWO):
                await plugin_process.until_allocatable(kubelet, name, 1)
                assert kubelet.state().resources[name].registered == 1
            await serves.stop()

    plugin_process.run(story)


def test_a_change_to_a_resource_that_another_plugin_serves_waits_and_takes_over(root: Path) -> None:
    async def story() -> None:
        first_name, two = (
            plugin_process.resource(ONE, "/dev/null"),
            plugin_process.resource(TWO, "/dev/zero"),
        )
        async with (
            stand_in.Kubelet(directory=root, node="node-a") as kubelet,
            plugin_process.plugin(
                root, plugin_process.written(root / "a.json", first_name)
            ) as first,
            plugin_process.plugin(root, plugin_process.written(root / "b.json", two)) as second,
        ):
            await first.said("registered", resource=ONE)
            await second.said("listening")
            plugin_process.written(root / "b.json", first_name, two)
            entry = await second.said("served_elsewhere", resource=ONE)
            assert entry["owner"] == f"{socket.gethostname()}, process {first.process.pid}"
            code, body = await second.asked("/readyz")
            assert code == 503
            # the other resource may still wait for its first self-probe
            assert f"{ONE}: another plugin on this node serves it ({entry['owner']}), for " in body
            served = kubelet.state().resources[ONE]
            assert (served.registered, served.streams_open, served.allocatable) == (1, 1, 1)
            await first.stop()
            await second.said("registered", resource=ONE, reason="configuration_changed")
            await plugin_process.until_allocatable(kubelet, ONE, 1)
            assert kubelet.state().resources[ONE].streams_open == 1

    plugin_process.run(story)


def test_the_plugin_can_be_stopped_while_it_waits_for_another_to_end(root: Path) -> None:
    async def story() -> None:
        file = plugin_process.written(root / "c.json", plugin_process.resource(ONE, "/dev/null"))
        async with (
            stand_in.Kubelet(directory=root, node="node-a"),
            # a plugin of another name does not hand over
            plugin_process.plugin(root, file, MUSTER_PLUGIN__NAME="other") as first,
        ):
            await first.said("registered")
            async with plugin_process.plugin(root, file, MUSTER_PLUGIN__HANDOVER_S="600") as second:
                await second.said("waiting_for_other_plugin")
                # as process 1 of a container it would not receive a signal that it does not handle
                await second.stop()

    plugin_process.run(story)
