"""The publication of the FUSE broker's observations on the bus."""

import asyncio

import pytest

from muster import vocabulary
from muster_fuse import bus_reporter, config, metrics
from muster_fuse.broker import observations
from muster_fuse.request import caller, decision
from muster_fuse.watch import mounts


def unpublished() -> float:
    (family,) = metrics.UNPUBLISHED.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_total"))


MOUNT = mounts.Mount(
    pod_uid="u",
    connection=42,
    inode=1,
    created_ns=1,
    mount_point="/data",
    source="s3",
    subtype="",
    user_id=1000,
)
POD = caller.Pod(uid="u", namespace="default", name="p")
REFUSED = observations.Refused(pod=POD, reason=decision.Reason.MALFORMED, text="cut")
CHANGED = observations.ConditionChanged(
    pod=POD, mount=MOUNT, condition=vocabulary.FuseCondition.DEAD, holds=True, text="gone"
)


@pytest.mark.parametrize("observed", [REFUSED, CHANGED], ids=["refused", "changed"])
def test_pods_cannot_make_the_broker_flood_the_bus(observed: observations.Observation) -> None:
    published: list[vocabulary.Event] = []
    reporting = bus_reporter.BusReporter(config.Settings(), "n1", stopping=asyncio.Event())
    reporting.publish_to(published.append)
    before = unpublished()
    for _ in range(10_000):
        reporting.observe(observed)
    # fewer events than would make the gates refuse the node
    assert 200 <= len(published) < 1000
    assert len(published) + unpublished() - before == 10_000


def test_a_mount_made_before_the_broker_is_reported_on_is_published() -> None:
    published: list[vocabulary.Event] = []
    reporting = bus_reporter.BusReporter(config.Settings(), "n1", stopping=asyncio.Event())
    reporting.publish_to(published.append)
    reporting.observe(observations.Mounted(pod=POD, mount=MOUNT))
    (event,) = published
    assert isinstance(event, vocabulary.FuseMounted)
    assert (event.mount.pod, event.mount.mount_point) == ("default/p", "/data")
