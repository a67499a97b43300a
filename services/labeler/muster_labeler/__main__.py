"""Door to the process: inventories come, labels are suggested or applied."""

import asyncio
import contextlib
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec
import prometheus_client

from muster import bus, codec, entry, logs, probes, runtime, streams
from muster_labeler import config, desired, fleet

if TYPE_CHECKING:
    from muster_labeler import nodes

_INVENTORIES: Final = "muster.event.*.*.inventory.reported"

_IN_A_POD: Final = "KUBERNETES_SERVICE_HOST"
_NO_CLUSTER: Final = desired.Unknown("no Kubernetes API", is_passing=False)

_DECISIONS = prometheus_client.Counter(
    "muster_labeler_decisions_total", "Decisions about nodes, by what was done.", ["action"]
)


def main() -> int:
    """Run the labeler; return its exit code."""
    return entry.main("labeler", config.Settings, _serve)


async def _serve(settings: config.Settings) -> None:
    logs.configure("labeler", level=settings.log.level)
    async with contextlib.AsyncExitStack() as open_:
        cluster = await _cluster(settings)
        if cluster is not None:
            await open_.enter_async_context(cluster)
        connected = await open_.enter_async_context(
            bus.Bus(settings.bus.url, producer="services/labeler", name="labeler", owner=True)
        )
        labeler = _Labeler(settings, connected, cluster)
        address = await open_.enter_async_context(
            probes.serve(
                settings.http.host,
                settings.http.port,
                ready=labeler.problem,
                more={"/state": labeler.state},
            )
        )
        logs.logger().info("listening", http=address)
        await runtime.run(labeler.run())


async def _cluster(settings: config.Settings) -> "nodes.Nodes | None":
    if settings.mode is config.Mode.OFF:
        return None
    where = settings.kubernetes
    if where.kubeconfig is None and _IN_A_POD not in os.environ:
        if settings.mode is config.Mode.APPLY:
            raise entry.CannotStart(
                "mode apply: no Kubernetes API: this is no pod, and no kubernetes.kubeconfig is set"
            )
        return None
    # the client costs 20 MiB and a quarter of a second: only whoever has a cluster pays
    from muster_labeler import nodes  # noqa: PLC0415

    try:
        return await nodes.Nodes.find(
            kubeconfig=where.kubeconfig, context=where.context, timeout_s=where.timeout_s
        )
    except nodes.NoCluster as error:
        raise entry.CannotStart(str(error)) from None


class _Labeler:
    def __init__(
        self, settings: config.Settings, connected: bus.Bus, cluster: "nodes.Nodes | None"
    ) -> None:
        self._settings = settings
        self._bus = connected
        self._cluster = cluster
        self._fleet = fleet.Fleet()
        self._turn = asyncio.Lock()
        self._is_restored = False
        self._is_away = False

    def problem(self) -> str | None:
        """Return why the labeler is not ready, or None."""
        if not self._bus.link.is_connected:
            return "NATS is away"
        return None if self._is_restored else "the inventories are being read"

    def state(self) -> probes.Answer:
        """Return every node as it stands."""
        return 200, "application/json", msgspec.json.encode({"nodes": self._fleet.view()})

    async def run(self) -> None:
        """Look at the inventories of today, then at each as it comes, for ever."""
        if self._settings.mode is config.Mode.OFF:
            self._is_restored = True
            await asyncio.Event().wait()
        if self._cluster is None:
            logs.logger().info(
                "no_kubernetes_api", consequence="suggestions from inventories alone"
            )
        for event in await self._bus.newest(streams.EVENTS, _INVENTORIES):
            await self._hear(event)
        self._is_restored = True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._try_again())

    async def _listen(self) -> None:
        deliveries = self._bus.consume(streams.EVENTS, durable="labeler", filters=[_INVENTORIES])
        async for delivery in deliveries:
            await self._hear(delivery.event)
            await delivery.ack()

    async def _try_again(self) -> None:
        while True:
            await asyncio.sleep(self._settings.retry_s)
            for node, cause in self._fleet.waiting().items():
                await self._settle(node, cause)

    async def _hear(self, event: codec.CloudEvent) -> None:
        if self._fleet.take(event):
            await self._settle(event.node, event.id)

    async def _settle(self, node: str, cause: str) -> None:
        """Decide about a node, do it, and tell it if it is news."""
        async with self._turn:
            decision = await self._carry_out(node)
            is_news = self._fleet.settle(node, decision, cause=cause)
            _DECISIONS.labels(decision.action).inc()
            if not is_news:
                return
            logs.logger().info(
                "decided",
                node=node,
                action=decision.action,
                labels=dict(decision.labels),
                reason=decision.reason,
            )
            event = desired.event_of(decision, node=node, at=datetime.now(UTC))
            if event is not None:
                await self._bus.publish(event, event_id=f"{cause}:{event.TYPE}")

    async def _carry_out(self, node: str) -> desired.Decision:
        products = self._fleet.products(node)
        current: desired.Node | desired.Unknown = _NO_CLUSTER
        if products and self._cluster is not None:
            current = self._noted(await self._cluster.get(node))
        decision = desired.decide(
            products,
            current,
            mode=self._settings.mode,
            aliases=self._settings.aliases,
            may_label_simulated=self._settings.simulated,
        )
        if decision.action is not desired.Action.APPLY:
            return decision
        assert self._cluster is not None, "only what could be read is written"
        assert isinstance(current, desired.Node), "only what could be read is written"
        failure = await self._cluster.apply(node, current, decision.labels)
        return decision if failure is None else desired.after_failure(decision.labels, failure)

    def _noted(self, current: desired.Node | desired.Unknown) -> desired.Node | desired.Unknown:
        """Log once when the API goes away, and once when it is back."""
        is_away = isinstance(current, desired.Unknown) and current.is_passing
        if is_away and not self._is_away:
            assert isinstance(current, desired.Unknown), "what is away is unknown"
            logs.logger().warning("kubernetes_api_away", error=current.text)
        elif self._is_away and not is_away:
            logs.logger().info("kubernetes_api_back")
        self._is_away = is_away
        return current


if __name__ == "__main__":
    sys.exit(main())
