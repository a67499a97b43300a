"""Adapter for NATS: sends a plugin's heartbeats (at an interval) and inventory to the bus.

Changes alone are not reliable, so the whole inventory is published again after each connect and
periodically. The plugin never waits for the bus, which may never become reachable.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

import muster
from muster import codec, vocabulary
from muster.nats import bus
from muster.service import logs

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_STOP_FLUSH_S: Final = 0.5
_HEARTBEATS_MISSED_MAX: Final = 3
_TEXTS_MAX: Final = (300, 100, 30, 10)
"""Texts are cut to each of these lengths in turn until the heartbeat fits."""
_DIGITS: Final = 2


class Sender(NamedTuple):
    """The heartbeat fields that the sender adds."""

    instance: str
    boot: str
    seq: int
    interval_s: float
    loop_lag_ms: float
    reconnects: int
    is_draining: bool


class Plugin(Protocol):
    """The plugin to report on."""

    @property
    def name(self) -> str:
        """The name of the node."""

    @property
    def plugin(self) -> str:
        """The name of the plugin."""

    @property
    def config_hash(self) -> str:
        """The hash of the configuration in force."""

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of the resources."""

    @property
    def heartbeat_due(self) -> asyncio.Event:
        """Set when the next heartbeat should be sent immediately."""

    def heartbeat(self, sender: Sender) -> vocabulary.Heartbeat:
        """Return the current status."""

    def snapshot(self, at: datetime) -> vocabulary.InventoryReported:
        """Return the whole inventory."""

    def publish_to(self, publish: Callable[[vocabulary.Event], None]) -> None:
        """Publish all further changes with this function, which never waits."""

    def stop_reason(self) -> vocabulary.StopReason | None:
        """Return why the plugin is stopping; None after a failure."""


class Reporter:
    """Reports on a plugin that started at `started_at`, in monotonic seconds."""

    def __init__(
        self,
        plugin: Plugin,
        *,
        url: str,
        interval_s: float,
        snapshot_period_s: float,
        started_at: float,
    ) -> None:
        self._plugin = plugin
        self._url = url
        self._interval_s = interval_s
        self._snapshot_period_s = snapshot_period_s
        self._boot = _boot()
        self.heartbeat_at = started_at
        """When the last heartbeat was sent, or else the plugin started or last began to report, in
        monotonic seconds.
        """
        self._lag_s = 0.0
        self._sequence = 0
        self._is_draining = False

    def stuck(self) -> str | None:
        """Return how long the event loop has been stuck, as a text; None if it is not stuck."""
        age_s = time.monotonic() - self.heartbeat_at
        if age_s > _HEARTBEATS_MISSED_MAX * self._interval_s:
            return f"the event loop is stuck: the last heartbeat was {age_s:.1f} s ago"
        return None

    async def report(self, until: asyncio.Event) -> None:
        """Connect, and report until `until` is set or the task is cancelled.

        `plugin.stopping` is published only when the plugin stops on purpose, not after a crash.
        """
        plugin = self._plugin
        self._is_draining = False
        # after an earlier report, the last heartbeat may be long ago
        self.heartbeat_at = time.monotonic()
        async with bus.Bus(
            self._url,
            producer=f"plugins/{plugin.plugin}",
            name=f"{plugin.plugin} {plugin.name}",
            boot=self._boot,
        ) as connected:
            await connected.reply(
                vocabulary.rpc_subject(plugin.name, plugin.plugin, "probe"),
                lambda: codec.encode_heartbeat(self._heartbeat(connected)),
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    reporting = [
                        tasks.create_task(self._send_heartbeats(connected)),
                        tasks.create_task(self._resync(connected)),
                        tasks.create_task(self._publish_snapshots(connected)),
                    ]
                    await until.wait()
                    for task in reporting:
                        task.cancel()
            finally:
                # reporting has ended, or a successor reports
                plugin.publish_to(lambda _: None)
                if (reason := plugin.stop_reason()) is not None:
                    await self._publish_stopping(connected, reason)

    async def _send_heartbeats(self, connected: bus.Bus) -> None:
        """Send a heartbeat in every interval, and immediately when a problem begins or ends."""
        clock = asyncio.get_running_loop().time
        due = clock() + first_heartbeat_s(self._plugin.name, self._interval_s)
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._plugin.heartbeat_due.wait()
                self._plugin.heartbeat_due.clear()
            except TimeoutError:
                # the heartbeat after a late one is due at once: that it is punctual does not prove
                # a recovery
                self._lag_s = max(clock() - due, min(self._lag_s, self._interval_s) / 2)
                due = max(due + self._interval_s, clock())
            self.heartbeat_at = clock()
            self._sequence += 1
            await connected.send_heartbeat(self._heartbeat(connected))

    async def _resync(self, connected: bus.Bus) -> None:
        async for is_connected in connected.link.changes():
            if not is_connected:
                continue
            connected.enqueue(
                vocabulary.PluginStarted(
                    node=self._plugin.name,
                    plugin=self._plugin.plugin,
                    at=datetime.now(UTC),
                    version=muster.__version__,
                    instance=connected.instance,
                    config_hash=self._plugin.config_hash,
                    resources=self._plugin.resources,
                )
            )
            self._plugin.publish_to(connected.enqueue)
            connected.enqueue(self._plugin.snapshot(datetime.now(UTC)))

    async def _publish_snapshots(self, connected: bus.Bus) -> None:
        while True:
            await asyncio.sleep(self._snapshot_period_s)
            if connected.link.is_connected:
                connected.enqueue(self._plugin.snapshot(datetime.now(UTC)))

    async def _publish_stopping(self, connected: bus.Bus, reason: vocabulary.StopReason) -> None:
        self._is_draining = True
        connected.enqueue(
            vocabulary.PluginStopping(
                node=self._plugin.name,
                plugin=self._plugin.plugin,
                at=datetime.now(UTC),
                reason=reason,
            )
        )
        if connected.link.is_connected and not await connected.flush(_STOP_FLUSH_S):
            logs.logger().warning("stop_announcement_not_delivered")

    def _heartbeat(self, connected: bus.Bus) -> vocabulary.Heartbeat:
        sender = Sender(
            instance=connected.instance,
            boot=self._boot,
            seq=self._sequence,
            interval_s=self._interval_s,
            loop_lag_ms=round(self._lag_s * 1000, _DIGITS),
            reconnects=max(0, connected.link.epoch - 1),
            is_draining=self._is_draining,
        )
        return fit_heartbeat(self._plugin.heartbeat(sender), codec.HEARTBEAT_BYTES_MAX)


def fit_heartbeat(heartbeat: vocabulary.Heartbeat, bytes_max: int) -> vocabulary.Heartbeat:
    """Cut the texts of a heartbeat until it has at most `bytes_max` bytes, if possible.

    Consumers reject larger heartbeats. The numbers remain complete, and the events contain the full
    texts.
    """
    for text_max in _TEXTS_MAX:
        shorter = msgspec.structs.replace(
            heartbeat,
            problems=tuple(problem[:text_max] for problem in heartbeat.problems),
            resources=tuple(_shorten(resource, text_max) for resource in heartbeat.resources),
        )
        if len(msgspec.json.encode(shorter)) <= bytes_max:
            break
    return shorter


def first_heartbeat_s(node: str, interval_s: float) -> float:
    """Return the delay of a node's first heartbeat; it differs by node, to spread the load."""
    share = int.from_bytes(hashlib.sha256(node.encode()).digest()[:4]) / 2**32
    return share * interval_s


def _shorten(resource: vocabulary.ResourceBeat, text_max: int) -> vocabulary.ResourceBeat:
    return msgspec.structs.replace(
        resource,
        problem=resource.problem[:text_max],
        short=resource.short[:text_max],
        mismatch=resource.mismatch[:text_max],
    )


def _boot() -> str:
    """Return the machine's boot id; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text("ascii").strip()
    return ""
