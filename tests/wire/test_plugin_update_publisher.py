"""Changes are published to the kubelet first, and to the log and the bus afterwards."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from muster import vocabulary
from muster_plugin import device_updates
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import resource_manager, resource_plugin

AT = datetime(2026, 11, 1, tzinfo=UTC)


class Slow(resource_manager.ResourcePlugins):
    """Resource plugins that wait for `may` each time they advertise lists to the kubelet."""

    def __init__(self, root: Path, devices: inventory.Inventory) -> None:
        # without devices, neither the runner nor the observer is used
        super().__init__(
            root,
            devices,
            new_runner=cast("Any", None),
            observer=cast("resource_plugin.Observer", None),
        )
        self.may = asyncio.Semaphore(0)
        self.lists: list[set[str]] = []

    async def advertise(self, resources: Iterable[str]) -> None:
        self.lists.append({*resources})
        await self.may.acquire()


def removed(letter: str) -> vocabulary.PluginEvent:
    return vocabulary.DeviceRemoved(
        node="n1", plugin="p", at=AT, resource=f"a.com/{letter}", device_id=letter
    )


def played(
    root: Path,
    story: Callable[
        [device_updates.UpdatePublisher, Slow, list[vocabulary.Event]], Awaitable[None]
    ],
) -> None:
    async def run() -> None:
        devices = inventory.Inventory(node="n1", plugin="p")
        slow, events = Slow(root, devices), device_updates.EventLog("n1", "p")
        published: list[vocabulary.Event] = []
        events.publish_to(published.append)
        updates = device_updates.UpdatePublisher(
            devices,
            slow,
            events,
            reason=lambda: vocabulary.RegistrationReason.START,
            on_published=lambda: None,
        )
        following = asyncio.create_task(updates.run())
        async with asyncio.timeout(30):
            await story(updates, slow, published)
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following

    asyncio.run(run())


async def until(is_it: Callable[[], bool]) -> None:
    while not is_it():
        await asyncio.sleep(0)


def test_changes_that_arrive_during_a_publication_are_published_together_and_in_order(
    tmp_path: Path,
) -> None:
    async def story(
        updates: device_updates.UpdatePublisher, slow: Slow, published: list[vocabulary.Event]
    ) -> None:
        first = asyncio.create_task(updates.publish([removed("a")]))
        await until(lambda: len(slow.lists) == 1)
        updates.publish_soon([removed("b")])
        updates.publish_soon([removed("c")])
        assert published == []
        slow.may.release()
        await first
        assert published == [removed("a")]
        await until(lambda: len(slow.lists) == 2)
        slow.may.release()
        await until(lambda: len(published) == 3)
        assert slow.lists == [{"a.com/a"}, {"a.com/b", "a.com/c"}]
        assert published == [removed(letter) for letter in "abc"]

    played(tmp_path, story)


def test_a_change_is_published_even_if_its_caller_is_cancelled(tmp_path: Path) -> None:
    async def story(
        updates: device_updates.UpdatePublisher, slow: Slow, published: list[vocabulary.Event]
    ) -> None:
        bringing = asyncio.create_task(updates.publish([removed("a")]))
        await until(lambda: len(slow.lists) == 1)
        waiting = asyncio.create_task(updates.publish([removed("b")]))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        bringing.cancel()
        await asyncio.wait([bringing])
        assert published == [removed("a")]
        await until(lambda: len(slow.lists) == 2)
        slow.may.release()
        await until(lambda: len(published) == 2)
        assert published == [removed("a"), removed("b")]

    played(tmp_path, story)


def test_of_hundreds_of_problems_the_first_are_published_and_how_many_more() -> None:
    events = device_updates.EventLog("n1", "p")
    published: list[vocabulary.Event] = []
    events.publish_to(published.append)
    events.configuration_rejected(
        tuple(f"problem {number}" for number in range(150)), active_hash="0"
    )
    (refused,) = published
    assert isinstance(refused, vocabulary.ConfigurationRefused)
    assert refused.problems == (
        *(f"problem {number}" for number in range(100)),
        "50 more problems",
    )
