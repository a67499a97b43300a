"""Pure: What is checked: topics, and the report of a cluster as far as it could be read."""

import enum
from collections.abc import Iterable, Sequence

from muster_labeler import (
    autoscaler_findings,
    findings,
    fuse_findings,
    gpu_findings,
    states,
    world,
)
from muster_labeler.findings import Finding, Fix, Id, Scope, Severity


class Topic(enum.StrEnum):
    """What is looked at."""

    GPU = "gpu"
    FUSE = "fuse"
    AUTOSCALER = "autoscaler"


def report(
    seen: world.World,
    topics: Sequence[Topic],
    where: findings.Where,
    *,
    cluster: str,
    only: str | None = None,
) -> findings.Report:
    """Return everything that is found in a cluster, about `only` one node if it is named."""
    found: list[Finding] = list(_unread(seen.unread, where))
    notes = [one.why for one in seen.unread if _is_notable(one)]
    fleet = states.fleet(seen.nodes or (), seen.views)
    if Topic.GPU in topics and seen.nodes is not None:
        found.extend(
            gpu_findings.found(seen.nodes, seen.views, where, simulated=seen.simulated, only=only)
        )
        covering = states.covering(fleet)
        if covering is not None:
            notes.append(f"{covering} names the model of every GPU node: nothing to label")
    if Topic.FUSE in topics:
        found.extend(fuse_findings.found(seen, where, only=only))
    if Topic.AUTOSCALER in topics:
        found.extend(autoscaler_findings.found(seen, where, only=only))
    checked = {"nodes": len(seen.nodes or ()), "gpuNodes": len(fleet)}
    if seen.pods is not None:
        checked["fusePods"] = sum(not pod.is_agent for pod in seen.pods)
    return findings.report(
        _once(found),
        cluster=cluster,
        time=seen.now,
        topics=topics,
        checked=checked,
        notes=notes,
    )


def _unread(unread: Iterable[world.Unread], where: findings.Where) -> Iterable[Finding]:
    for one in unread:
        if _is_notable(one):
            continue
        path = one.what if one.what.startswith("/") else ""
        asking = ("get", "--raw", path) if path else ("auth", "can-i", "list", one.what, "-A")
        yield Finding(
            id=Id.ACCESS if one.is_forbidden else Id.UNREAD,
            severity=Severity.UNKNOWN,
            scope=Scope.CLUSTER,
            object=one.what,
            message=f"cannot be seen: {one.why}",
            fix=Fix(command=where.kubectl(*asking)),
        )


def _is_notable(one: world.Unread) -> bool:
    """Tell whether something may stay unseen: a source to which we have no right."""
    return one.is_forbidden and not one.is_needed


def _once(found: Iterable[Finding]) -> list[Finding]:
    """Return each finding about an object once: a pod and its event tell the same."""
    kept: dict[tuple[str, str, str], Finding] = {}
    for one in found:
        kept.setdefault((one.id, one.object, one.message), one)
    return list(kept.values())
