"""What of the FUSE broker's observations reaches the bus."""

import asyncio

from muster import vocabulary
from muster_fuse import bus_reporter, config, metrics
from muster_fuse.broker import observations
from muster_fuse.request import caller, decision


def unpublished() -> float:
    (family,) = metrics.UNPUBLISHED.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_total"))


def test_pods_cannot_make_the_broker_flood_the_bus() -> None:
    published: list[vocabulary.Event] = []
    reporting = bus_reporter.BusReporter(config.Settings(), "n1", stopping=asyncio.Event())
    reporting.publish_to(published.append)
    before = unpublished()
    for number in range(10_000):
        pod = caller.Pod(uid=f"u{number}", namespace="default", name=f"p{number}")
        reason = decision.Reason.MALFORMED
        reporting.observe(observations.Refused(pod=pod, reason=reason, text="cut"))
    # fewer than those that make the gates refuse the node
    assert 200 <= len(published) < 1000
    assert len(published) + unpublished() - before == 10_000
