"""Adapter: the broker's Prometheus metrics, collected from its state at each scrape."""

import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import prometheus_client
from prometheus_client import core, registry

from muster import vocabulary
from muster.service import metrics
from muster_fuse import registration, self_check
from muster_fuse.broker import service
from muster_fuse.kernel import mounter_client
from muster_fuse.request import decision
from muster_fuse.volume import csi, volumes

MOUNTED: Final = prometheus_client.Counter(
    "muster_fuse_mounted_total", "File systems mounted in pods."
)
REFUSED: Final = metrics.counter(
    "muster_fuse_refused_total",
    "Refusals reported, by reason; at most one a second for each pod and reason.",
    "reason",
    decision.Reason,
)
ABORTED: Final = prometheus_client.Counter(
    "muster_fuse_aborted_total", "FUSE connections aborted, usually after their pod had ended."
)
UNPUBLISHED: Final = prometheus_client.Counter(
    "muster_fuse_events_unpublished_total",
    "Events about mounts and refusals that were only logged, because there were too many.",
)


class Parts(NamedTuple):
    """The parts of a broker that the metrics describe."""

    broker: service.Broker
    mounter: mounter_client.Mounter
    served: volumes.Volumes
    driver: csi.Driver
    offered: registration.Registration
    check: self_check.SelfCheck


class Collector(registry.Collector):
    """Turns the state of a broker into metrics."""

    def __init__(self, parts: Parts, heartbeat_at: Callable[[], float]) -> None:
        self._parts = parts
        self._heartbeat_at = heartbeat_at

    def collect(self) -> Iterator[core.Metric]:
        """Collect all metrics."""
        broker, mounter, served, driver, offered, check = self._parts
        now = time.monotonic()
        # excludes the mounts of the self-check
        mounts = [mount for mount in broker.mounts() if served.pod(mount.pod_uid) is not None]
        yield _gauge("muster_fuse_mounts", "File systems mounted in pods now.", len(mounts))
        conditions = [each for mount in mounts for each in broker.conditions(mount)]
        by_condition = core.GaugeMetricFamily(
            "muster_fuse_mount_conditions",
            "Mounts that need attention, by condition.",
            labels=["condition"],
        )
        for condition in vocabulary.FuseCondition:
            by_condition.add_metric([condition], conditions.count(condition))
        yield by_condition
        yield _gauge("muster_fuse_pods", "Pods that have volumes now.", served.pods)
        yield _gauge(
            "muster_fuse_pods_unserved",
            "Pods whose socket could not be created.",
            len(served.problems),
        )
        yield _counter("muster_fuse_volumes_published", "Volumes published.", driver.published)
        yield _counter(
            "muster_fuse_volumes_refused", "Volumes that could not be published.", driver.refused
        )
        yield _counter(
            "muster_fuse_registrations",
            "Times the kubelet registered the driver.",
            offered.registrations,
        )
        yield _gauge(
            "muster_fuse_registered",
            "1 while the kubelet has the driver registered.",
            offered.registered_at is not None,
        )
        yield _gauge(
            "muster_fuse_self_test_passed",
            "1 if the latest self-test passed and is recent.",
            check.problem(now) is None,
        )
        yield _gauge(
            "muster_fuse_self_test_seconds", "How long the last self-test took.", check.seconds
        )
        yield _counter(
            "muster_fuse_mounter_restarts",
            "Times the process that makes mounts was restarted.",
            mounter.restarts,
        )
        yield _gauge(
            "muster_fuse_children_stuck",
            "Processes that hang in the kernel even after they were killed.",
            mounter.stuck,
        )
        yield _gauge(
            "muster_fuse_last_heartbeat_timestamp_seconds",
            "When the last heartbeat was sent; before the first one, when the process started.",
            metrics.timestamp(self._heartbeat_at()),
        )


def register(parts: Parts, heartbeat_at: Callable[[], float]) -> None:
    """Serve the metrics of a broker on this process's /metrics."""
    prometheus_client.REGISTRY.register(Collector(parts, heartbeat_at))


def _gauge(name: str, text: str, value: float) -> core.Metric:
    return core.GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> core.Metric:
    return core.CounterMetricFamily(name, text, value=value)
