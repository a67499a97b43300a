"""Adapter: people: `muster check`, which reads a cluster and says what is wrong with it."""

import argparse
import asyncio
import os
import sys
from datetime import UTC, datetime

from muster.kubernetes import api
from muster_labeler import (
    access,
    checks,
    findings,
    inventory,
    naming,
    options,
    reports,
    sources,
    survey,
    world,
)
from muster_labeler.checks import Topic
from muster_labeler.findings import Exit


def run(chosen: argparse.Namespace) -> int:
    """Check what was chosen and print it; return the exit code."""
    try:
        known = naming.aliases(chosen.aliases)
        report = asyncio.run(_report(chosen, known))
    except (naming.BadAliases, options.Mistake) as error:
        return options.mistake("check", str(error))
    except (api.NoCluster, survey.Unreachable) as error:
        options.tell("check", str(error))
        if chosen.output != reports.Output.TEXT:
            # a program reads one document, whatever happened
            unread = world.World(
                now=datetime.now(UTC), unread=[world.Unread("cluster", str(error))]
            )
            cluster = chosen.context or chosen.kubeconfig or "cluster"
            report = checks.report(unread, [], findings.Where(), cluster=cluster)
            sys.stdout.write(reports.written(report, reports.Output(chosen.output)))
        return Exit.UNREACHABLE
    sys.stdout.write(reports.written(report, reports.Output(chosen.output)))
    return findings.exit_code(report, strict=chosen.strict)


async def _report(chosen: argparse.Namespace, aliases: dict[str, str]) -> findings.Report:
    topics = list(Topic) if chosen.topic == "all" else [Topic(chosen.topic)]
    progress = options.progress()
    async with await options.api(chosen) as api:
        read = survey.Survey(api, timeout_s=chosen.timeout, say=progress)
        await read.begin(_rights(topics))
        seen = await _read(read, topics, chosen, aliases, api)
        progress("")
    if chosen.node and seen.nodes is not None and chosen.node not in {n.name for n in seen.nodes}:
        raise options.Mistake(f"no such node: {chosen.node}")
    where = findings.Where(
        context=api.context,
        kubeconfig=chosen.kubeconfig or os.environ.get("KUBECONFIG"),
        aliases=str(chosen.aliases) if chosen.aliases else None,
        namespace=chosen.muster_namespace
        if chosen.muster_namespace != inventory.NAMESPACE
        else None,
    )
    cluster = chosen.context or api.server
    return checks.report(seen, topics, where, cluster=cluster, only=chosen.node)


def _rights(topics: list[Topic]) -> tuple[access.Right, ...]:
    if Topic.AUTOSCALER in topics:
        return survey.AUTOSCALER
    return survey.FUSE if Topic.FUSE in topics else survey.GPU


async def _read(
    read: survey.Survey,
    topics: list[Topic],
    chosen: argparse.Namespace,
    aliases: dict[str, str],
    api: api.Api,
) -> world.World:
    wants_pods = topics != [Topic.GPU]
    nodes = await read.nodes()
    slices = await read.slices()
    agents, simulated = await read.reports(chosen.muster_namespace)
    pods = await read.pods() if wants_pods else None
    events = await read.events() if wants_pods else None
    is_annotated = any(pod.is_annotated for pod in pods or ())
    namespaces = await read.namespaces() if is_annotated else None
    scaler, karpenter = await read.autoscalers() if Topic.AUTOSCALER in topics else (None, None)
    return world.World(
        now=api.now() or datetime.now(UTC),
        nodes=nodes,
        views=sources.Views(agents, survey.of_slices(slices), aliases),
        simulated=simulated,
        slices=slices,
        pods=pods,
        events=events,
        namespaces=namespaces,
        autoscaler=scaler,
        karpenter=karpenter,
        unread=tuple(read.unread),
    )
