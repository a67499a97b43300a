"""Adapter for the command line: `muster check` reads a cluster and prints its problems.

The report is printed as text, as JSON, or as JUnit XML for CI.
"""

import asyncio
import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from xml.sax import saxutils

from muster.cli import output as printing
from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import plugin_facts, plugin_objects
from muster_labeler.check import (
    autoscaler_findings,
    cluster_reader,
    findings,
    fuse_findings,
    fuse_ways,
    gpu_findings,
    muster_findings,
    plugin_findings,
)
from muster_labeler.check.findings import Finding, Id, Report, Severity
from muster_labeler.cli import options
from muster_labeler.kubernetes import cluster_api
from muster_labeler.naming import node_labels, sources

_LINES_MAX = 20
_CHOICE = ["fuse"]
"""The topics of a check that recommends a way to FUSE; with `all`, FUSE may not be needed."""
_NOUNS = {
    "error": ("error", "errors"),
    "warn": ("warning", "warnings"),
    "suggest": ("suggestion", "suggestions"),
    "info": ("remark", "remarks"),
    "unknown": ("unknown", "unknown"),
    "nodes": ("node", "nodes"),
    "gpuNodes": ("GPU node", "GPU nodes"),
    "fusePods": ("FUSE pod", "FUSE pods"),
    "plugins": ("pod of a known plugin", "pods of known plugins"),
}
"""The singular and plural noun of each count in the text report; JSON uses the keys."""
_FAILING = frozenset({Severity.ERROR, Severity.WARN})
_ORDER = tuple(Severity).index
"""The sort key of a severity: the worst findings come first."""


def run(
    topic: str, *, cluster: options.ClusterOptions, output: str, strict: bool, node: str | None
) -> int:
    """Check a cluster and print the report; return the exit code. Raises UsageError."""
    topics = ["gpu", "fuse", "autoscaler", "plugins", "muster"] if topic == "all" else [topic]
    aliases = options.aliases(cluster.aliases)
    try:
        result = asyncio.run(_report(topics, cluster, aliases, node))
    except (kubernetes_api.NoCluster, cluster_reader.Unreachable) as error:
        printing.warn("check", str(error))
        if output != "text":
            # JSON and JUnit output always is one document, even after a failure
            unread = findings.Unread("cluster", str(error))
            view = findings.ClusterView(now=datetime.now(UTC), unread=[unread])
            name = cluster.context or cluster.kubeconfig or "cluster"
            result = _evaluate(view, [], findings.Commands(), cluster=name)
            _print(result, output)
        return findings.Exit.UNREACHABLE
    _print(result, output)
    return findings.exit_code(result, strict=strict)


async def _report(
    topics: list[str], cluster: options.ClusterOptions, aliases: dict[str, str], node: str | None
) -> Report:
    progress = printing.progress
    async with await options.connect(cluster) as api:
        reader = cluster_reader.ClusterReader(api, timeout_s=cluster.timeout, progress=progress)
        try:
            await reader.check_access(_permissions(topics))
            view = await _read(reader, topics, api, aliases, namespace=cluster.muster_namespace)
        except cluster_reader.Unreachable as error:
            raise cluster_reader.Unreachable(f"{api.name}: {error}") from None
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
    return _evaluate(view, topics, commands, cluster=api.name, only=node)


def _permissions(topics: list[str]) -> tuple[cluster_api.Permission, ...]:
    if "autoscaler" in topics:
        return cluster_reader.AUTOSCALER
    return cluster_reader.GPU if topics == ["gpu"] else cluster_reader.FUSE


async def _read(
    reader: cluster_reader.ClusterReader,
    topics: list[str],
    api: kubernetes_api.Api,
    aliases: dict[str, str],
    *,
    namespace: str,
) -> findings.ClusterView:
    wants_pods = bool({"fuse", "autoscaler", "plugins"} & {*topics})
    wants_plugins = "plugins" in topics
    is_choice = topics == _CHOICE
    # concurrently, because a large cluster's API sends a list more slowly than it is decoded here
    async with asyncio.TaskGroup() as group:
        start = group.create_task
        nodes, slices = start(reader.full_nodes()), start(reader.slices())
        reports = start(reader.reports(namespace))
        pods = start(reader.pods()) if wants_pods else None
        wants_events = bool({"fuse", "autoscaler"} & {*topics})
        events = start(reader.events()) if wants_events else None
        wants_autoscalers = is_choice or "autoscaler" in topics
        scalers = start(reader.autoscalers(is_optional=is_choice)) if wants_autoscalers else None
        fuse = start(reader.fuse_support()) if is_choice else None
        plugins = start(_read_plugins(reader)) if wants_plugins else None
        own_pods = start(reader.own_pods(namespace)) if "muster" in topics else None
        own_claims = start(reader.own_claims(namespace)) if "muster" in topics else None
    read_nodes, read_pods = nodes.result(), pods.result() if pods else None
    fuse_pods = None if read_pods is None else [each.pod for each in read_pods if each.pod]
    is_annotated = any(pod.is_annotated for pod in fuse_pods or ())
    namespaces = None
    if is_annotated or is_choice:
        namespaces = await reader.namespaces(is_optional=not is_annotated)
    agents, simulated = reports.result()
    autoscaler, karpenter = scalers.result() if scalers else (None, None)
    now = api.now() or datetime.now(UTC)
    return findings.ClusterView(
        now=now,
        nodes=None if read_nodes is None else [each.node for each in read_nodes],
        evidence=sources.Evidence(agents, cluster_reader.gpus_by_node(slices.result()), aliases),
        simulated=simulated,
        slices=slices.result(),
        pods=fuse_pods,
        events=events.result() if events else None,
        namespaces=namespaces,
        autoscaler=autoscaler,
        karpenter=karpenter,
        fuse=fuse.result() if fuse else None,
        own_pods=own_pods.result() if own_pods else (),
        own_claims=own_claims.result() if own_claims else (),
        plugins=dataclasses.replace(
            plugins.result(),
            now=now,
            nodes=[each.raw for each in read_nodes or ()],
            pods=None if read_pods is None else [each.raw for each in read_pods if each.raw],
        )
        if plugins
        else None,
        unread=tuple(sorted(reader.unread, key=lambda entry: entry.what)),
    )


async def _read_plugins(reader: cluster_reader.ClusterReader) -> plugin_facts.View:
    """Return the objects that the checks of plugins and drivers need besides nodes and pods."""
    dra = "/apis/resource.k8s.io/v1"
    read = reader.plugin_objects
    async with asyncio.TaskGroup() as group:
        start = group.create_task
        events = start(reader.plugin_events())
        sets = start(read("/apis/apps/v1/daemonsets", plugin_objects.DaemonSet))
        slices = start(read(f"{dra}/resourceslices", plugin_objects.ResourceSlice))
        claims = start(read(f"{dra}/resourceclaims", plugin_objects.ResourceClaim))
        classes = start(read(f"{dra}/deviceclasses", plugin_objects.DeviceClass))
    return plugin_facts.View(
        now=datetime.now(UTC),
        daemon_sets=sets.result(),
        slices=slices.result(),
        claims=claims.result() or (),
        classes=classes.result() or (),
        events=events.result(),
    )


def _evaluate(
    view: findings.ClusterView,
    topics: Sequence[str],
    commands: findings.Commands,
    *,
    cluster: str,
    only: str | None = None,
) -> Report:
    """Return the report on a cluster or, with `only`, on one node."""
    results: list[Finding] = list(_unread(view.unread, commands))
    notes = [entry.why for entry in view.unread if _is_notable(entry)]
    fleet = node_labels.label_statuses(view.nodes or (), view.evidence)
    if "gpu" in topics and view.nodes is not None:
        results.extend(
            gpu_findings.evaluate(
                view.nodes, view.evidence, commands, simulated=view.simulated, only=only
            )
        )
        covering = node_labels.covering_scheme(fleet)
        if covering is not None:
            notes.append(f"{covering} names the model of every GPU node: nothing to label")
    if "fuse" in topics:
        results.extend(fuse_findings.evaluate(view, commands, only=only))
        if only is None:
            results.extend(fuse_ways.evaluate(view))
    if "autoscaler" in topics:
        results.extend(autoscaler_findings.evaluate(view, commands, only=only))
    if view.plugins is not None:
        results.extend(plugin_findings.evaluate(view.plugins, commands, only=only))
    if "muster" in topics and only is None:
        results.extend(muster_findings.evaluate(view, commands))
    checked = {"nodes": len(view.nodes or ()), "gpuNodes": len(fleet)}
    if view.plugins is not None:
        checked["plugins"] = len(plugin_facts.gather(view.plugins).plugins)
    if view.pods is not None and {"fuse", "autoscaler"} & {*topics}:
        checked["fusePods"] = sum(not (pod.is_agent or pod.is_nri) for pod in view.pods)
    results = sorted(
        _deduplicated(results), key=lambda each: (_ORDER(each.severity), each.id, each.object)
    )
    counts = Counter(finding.severity for finding in results)
    return Report(
        cluster=cluster,
        time=view.now,
        topics=tuple(topics),
        checked=checked,
        summary={str(severity): counts[severity] for severity in Severity},
        notes=tuple(dict.fromkeys(notes)),
        findings=tuple(results),
    )


def _unread(unread: Iterable[findings.Unread], commands: findings.Commands) -> Iterable[Finding]:
    for entry in unread:
        if _is_notable(entry):
            continue
        path = entry.what if entry.what.startswith("/") else ""
        asking = ("get", "--raw", path) if path else ("auth", "can-i", "list", entry.what, "-A")
        yield findings.finding(
            Id.ACCESS if entry.is_forbidden else Id.UNREAD,
            Severity.UNKNOWN,
            entry.what,
            f"cannot be read: {entry.why}",
            command=commands.kubectl(*asking),
        )


def _is_notable(entry: findings.Unread) -> bool:
    """Return whether a note is enough, because access to an optional source is forbidden."""
    return entry.is_forbidden and not entry.is_needed


def _deduplicated(results: Iterable[Finding]) -> list[Finding]:
    """Return each finding about an object once: a pod and its event may report the same problem."""
    kept: dict[tuple[str, str, str], Finding] = {}
    for finding in results:
        kept.setdefault((finding.id, finding.object, finding.message), finding)
    return list(kept.values())


def _print(report: Report, output: str) -> None:
    if output == "json":
        printing.print_json(report, indent=2)
    else:
        printing.show(*(_junit(report) if output == "junit" else _text(report)))


def _text(report: Report) -> Iterable[str]:
    shown: Counter[str] = Counter()
    totals = Counter(finding.id for finding in report.findings)
    for finding in report.findings:
        shown[finding.id] += 1
        if shown[finding.id] <= _LINES_MAX:
            where = f"{finding.id:<8} {finding.object}"
            yield f"{finding.severity.upper():<8} {where}: {finding.message}"
        elif shown[finding.id] == totals[finding.id]:
            more = totals[finding.id] - _LINES_MAX
            yield f"{'':<8} {finding.id:<8} and {more} more; --json shows all"
    for note in report.notes:
        yield f"{'NOTE':<8} {note}"
    commands = _commands(report.findings)
    if commands:
        yield ""
        yield "To fix:"
        for command, ids in commands.items():
            yield f"  # {', '.join(ids)}"
            yield f"  {command}"
    summary = _counts(report.summary)
    checked = _counts(report.checked, with_zero=True)
    if report.findings:
        yield ""
    yield f"{report.cluster}: {summary or 'nothing found'} ({checked})"


def _counts(counts: Mapping[str, int], *, with_zero: bool = False) -> str:
    """Return counts and their nouns as text; zeros are left out unless `with_zero` is true."""
    return ", ".join(
        f"{count} {_NOUNS[what][count != 1]}"
        for what, count in counts.items()
        if count or with_zero
    )


def _commands(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """Return at most 20 commands per finding id, each with the ids of the findings it fixes."""
    commands: dict[str, list[str]] = {}
    used: Counter[str] = Counter()
    for finding in findings:
        command = finding.fix.command
        if not command or (command not in commands and used[finding.id] >= _LINES_MAX):
            continue
        if command not in commands:
            used[finding.id] += 1
        ids = commands.setdefault(command, [])
        if finding.id not in ids:
            ids.append(finding.id)
    return commands


def _junit(report: Report) -> Iterable[str]:
    failures = sum(finding.severity in _FAILING for finding in report.findings)
    skipped = sum(finding.severity is Severity.UNKNOWN for finding in report.findings)
    count = len(report.findings) or 1
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield (
        f'<testsuite name="muster check" tests="{count}" failures="{failures}" '
        f'skipped="{skipped}" timestamp="{report.time:%Y-%m-%dT%H:%M:%S}">'
    )
    if not report.findings:
        yield f'  <testcase classname="muster" name={_quoted(", ".join(report.topics))}/>'
    for finding in report.findings:
        head = f"  <testcase classname={_quoted(finding.id)} name={_quoted(finding.object)}"
        body = _quoted(finding.message)
        details = saxutils.escape(
            printing.plain("; ".join((*finding.evidence, finding.fix.command)))
        )
        match finding.severity:
            case Severity.ERROR | Severity.WARN:
                yield f"{head}><failure type={_quoted(finding.severity)} message={body}>{details}"
                yield "  </failure></testcase>"
            case Severity.UNKNOWN:
                yield f"{head}><skipped message={body}/></testcase>"
            case Severity.SUGGEST | Severity.INFO:
                text = saxutils.escape(printing.plain(finding.message))
                yield f"{head}><system-out>{text}</system-out>"
                yield "  </testcase>"
    yield "</testsuite>"


def _quoted(text: str) -> str:
    return saxutils.quoteattr(printing.plain(text))
