"""Adapter for the event loop: publishes the events of honest plugins until they are acknowledged.

Each plugin reports its inventory once. Then some of them publish events many times a second. An
event without an acknowledgement is published again after 2 s with the same id, as a plugin does.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol

from muster import codec, vocabulary
from muster.nats.auth import permissions

_PLUGIN: Final = "device-plugin"
_GPU: Final = "nvidia.com/gpu"
_GPUS: Final = 8
_ACK_S: Final = 2.0
"""The delay before an event is published again, as in `muster.nats.jetstream`."""
_TURN_S: Final = 0.1
_SETTLE_S: Final = 20.0


class Node(Protocol):
    """A plugin that can send."""

    name: str
    token: str
    instance: str
    is_killed: bool

    def send(self, words: bytes) -> bool:
        """Send a message if the plugin is connected; return whether it is."""
        ...


@dataclass(slots=True, eq=False)
class _Event:
    """An event that is not yet acknowledged."""

    node: Node
    words: bytes
    began_at: float
    sent_at: float = 0.0


class Reports:
    """Publishes the events of all plugins, and records their number by subject and their delays."""

    def __init__(self, events_s: float) -> None:
        self.published: Counter[str] = Counter()
        self.stored_s: list[float] = []
        self._events_s = events_s
        self._waiting: dict[str, _Event] = {}
        self._sequence = itertools.count(1)

    async def publish(self, nodes: Sequence[Node]) -> None:
        """Publish an inventory for each node, then other events at the set rate, forever."""
        clock = asyncio.get_running_loop().time
        for node in nodes:
            self.change(node, "NVIDIA L4", 23_034)
        began_at, done = clock(), 0
        turns = itertools.cycle(nodes)
        while True:
            for event in self._waiting.values():
                if clock() - event.sent_at > _ACK_S and event.node.send(event.words):
                    event.sent_at = clock()
            due = int((clock() - began_at) * self._events_s)
            for node in itertools.islice(turns, max(0, due - done)):
                if not node.is_killed:
                    self._put(node, _allocation(node.name))
            done = max(due, done)
            await asyncio.sleep(_TURN_S)

    def change(self, node: Node, product: str, memory_mib: int) -> None:
        """Publish a node's inventory with these GPUs."""
        self._put(node, _inventory(node.name, product, memory_mib))

    async def settle(self) -> None:
        """Stop publishing; return once all events are acknowledged, or after a timeout."""
        self._events_s = 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while self._waiting:  # noqa: ASYNC110  # another process acknowledges
                    await asyncio.sleep(_TURN_S)

    def acknowledged(self, key: str) -> None:
        """Record that the event with this key is stored."""
        event = self._waiting.pop(key, None)
        if event is not None:
            self.stored_s.append(asyncio.get_running_loop().time() - event.began_at)

    def _put(self, node: Node, event: vocabulary.Event) -> None:
        """Enqueue an event, which is published from the next turn on until it is acknowledged."""
        sequence = next(self._sequence)
        key = f"{node.instance}-{sequence}"
        payload = codec.encode(
            event,
            event_id=key,
            producer=f"plugins/{_PLUGIN}",
            instance=node.instance,
            sequence=sequence,
            boot="",
        )
        reply = f"{permissions.inbox(permissions.plugin_user(node.token))}.{key}"
        head = f"NATS/1.0\r\nNats-Msg-Id: {key}\r\n\r\n".encode()
        line = f"HPUB {event.subject} {reply} {len(head)} {len(head) + len(payload)}\r\n"
        words = b"%b%b%b\r\n" % (line.encode(), head, payload)
        self._waiting[key] = _Event(node, words, asyncio.get_running_loop().time())
        self.published[event.subject] += 1


def _inventory(node: str, product: str, memory_mib: int) -> vocabulary.InventoryReported:
    gpus = tuple(
        vocabulary.Gpu(uuid=f"GPU-{node[:12]}-{index}", product=product, memory_mib=memory_mib)
        for index in range(_GPUS)
    )
    return vocabulary.InventoryReported(
        node=node,
        plugin=_PLUGIN,
        at=datetime.now(UTC),
        devices=tuple(vocabulary.Device(id=gpu.uuid, resource=_GPU) for gpu in gpus),
        resources=(_GPU,),
        gpus=vocabulary.GpuNode(gpus=gpus),
    )


def _allocation(node: str) -> vocabulary.AllocationObserved:
    """Return an event to which no service reacts."""
    return vocabulary.AllocationObserved(
        node=node, plugin=_PLUGIN, at=datetime.now(UTC), resource=_GPU, device_ids=("a",)
    )
