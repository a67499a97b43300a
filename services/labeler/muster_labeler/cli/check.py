"""Adapter: the command line: `muster check` reads a cluster and reports its problems."""

import asyncio
import os
import sys
from datetime import UTC, datetime

from muster.cli import output as printing
from muster.kubernetes import api as kubernetes_api
from muster_labeler.check import cluster_reader, findings, report
from muster_labeler.check.report import Output, Topic
from muster_labeler.cli import options
from muster_labeler.kubernetes import cluster_api
from muster_labeler.naming import sources


def run(
    topic: str, *, cluster: options.ClusterOptions, output: str, strict: bool, node: str | None
) -> int:
    """Check a cluster and print the report; return the exit code. Raises UsageError."""
    topics = list(Topic) if topic == "all" else [Topic(topic)]
    aliases = options.aliases(cluster.aliases)
    kind = Output(output)
    try:
        result = asyncio.run(_report(topics, cluster, aliases, node))
    except (kubernetes_api.NoCluster, cluster_reader.Unreachable) as error:
        printing.warn("check", str(error))
        if kind is not Output.TEXT:
            # a program reads one document, whatever happened
            unread = findings.Unread("cluster", str(error))
            view = findings.ClusterView(now=datetime.now(UTC), unread=[unread])
            name = cluster.context or cluster.kubeconfig or "cluster"
            result = report.evaluate(view, [], findings.Commands(), cluster=name)
            sys.stdout.write(report.render(result, kind))
        return findings.Exit.UNREACHABLE
    sys.stdout.write(report.render(result, kind))
    return findings.exit_code(result, strict=strict)


async def _report(
    topics: list[Topic], cluster: options.ClusterOptions, aliases: dict[str, str], node: str | None
) -> findings.Report:
    progress = options.progress_printer()
    async with await options.connect(cluster) as api:
        reader = cluster_reader.ClusterReader(api, timeout_s=cluster.timeout, progress=progress)
        await reader.check_access(_permissions(topics))
        view = await _read(reader, topics, api, aliases, namespace=cluster.muster_namespace)
        progress("")
    if node and view.nodes is not None and node not in {entry.name for entry in view.nodes}:
        raise options.UsageError(f"no such node: {node}")
    is_usual = cluster.muster_namespace == options.CLUSTER.muster_namespace
    commands = findings.Commands(
        context=api.context,
        kubeconfig=cluster.kubeconfig or os.environ.get("KUBECONFIG"),
        aliases=str(cluster.aliases) if cluster.aliases else None,
        namespace=None if is_usual else cluster.muster_namespace,
    )
    name = cluster.context or api.server
    return report.evaluate(view, topics, commands, cluster=name, only=node)


def _permissions(topics: list[Topic]) -> tuple[cluster_api.Permission, ...]:
    if Topic.AUTOSCALER in topics:
        return cluster_reader.AUTOSCALER
    return cluster_reader.FUSE if Topic.FUSE in topics else cluster_reader.GPU


async def _read(
    reader: cluster_reader.ClusterReader,
    topics: list[Topic],
    api: kubernetes_api.Api,
    aliases: dict[str, str],
    *,
    namespace: str,
) -> findings.ClusterView:
    wants_pods = topics != [Topic.GPU]
    nodes = await reader.nodes()
    slices = await reader.slices()
    agents, simulated = await reader.reports(namespace)
    pods = await reader.pods() if wants_pods else None
    events = await reader.events() if wants_pods else None
    is_annotated = any(pod.is_annotated for pod in pods or ())
    namespaces = await reader.namespaces() if is_annotated else None
    autoscaler, karpenter = None, None
    if Topic.AUTOSCALER in topics:
        autoscaler, karpenter = await reader.autoscalers()
    return findings.ClusterView(
        now=api.now() or datetime.now(UTC),
        nodes=nodes,
        evidence=sources.Evidence(agents, cluster_reader.gpus_by_node(slices), aliases),
        simulated=simulated,
        slices=slices,
        pods=pods,
        events=events,
        namespaces=namespaces,
        autoscaler=autoscaler,
        karpenter=karpenter,
        unread=tuple(reader.unread),
    )
