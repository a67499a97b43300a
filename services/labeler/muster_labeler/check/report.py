"""Pure: evaluates a cluster, and renders the report as text, as JSON, or as JUnit XML for CI."""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from xml.sax import saxutils

import msgspec

from muster_labeler.check import autoscaler_findings, findings, fuse_findings, gpu_findings
from muster_labeler.check.findings import Finding, Id, Report, Severity
from muster_labeler.naming import node_labels

_LINES_MAX = 20
_NOUNS = {
    "error": ("error", "errors"),
    "warn": ("warning", "warnings"),
    "suggest": ("suggestion", "suggestions"),
    "info": ("remark", "remarks"),
    "unknown": ("unknown", "unknown"),
    "nodes": ("node", "nodes"),
    "gpuNodes": ("GPU node", "GPU nodes"),
    "fusePods": ("FUSE pod", "FUSE pods"),
}
"""How counts are called in text, one and several; in JSON the keys are what they are."""
_FAILING = frozenset({Severity.ERROR, Severity.WARN})


class Output(enum.StrEnum):
    """The format of a report."""

    TEXT = "text"
    JSON = "json"
    JUNIT = "junit"


def render(report: Report, output: Output) -> str:
    """Return a report as text, with a newline at the end."""
    match output:
        case Output.TEXT:
            return "\n".join(_text(report)) + "\n"
        case Output.JSON:
            return msgspec.json.format(msgspec.json.encode(report)).decode() + "\n"
        case Output.JUNIT:
            return "\n".join(_junit(report)) + "\n"


def _text(report: Report) -> Iterable[str]:
    shown: Counter[str] = Counter()
    totals = Counter(finding.id for finding in report.findings)
    for finding in report.findings:
        shown[finding.id] += 1
        if shown[finding.id] <= _LINES_MAX:
            yield findings.plain(
                f"{finding.severity.upper():<8} {finding.id:<8} {finding.object}: {finding.message}"
            )
        elif shown[finding.id] == totals[finding.id]:
            more = totals[finding.id] - _LINES_MAX
            yield f"{'':<8} {finding.id:<8} and {more} more; --json shows all"
    for note in report.notes:
        yield findings.plain(f"{'NOTE':<8} {note}")
    commands = _commands(report.findings)
    if commands:
        yield ""
        yield "To fix:"
        for command, ids in commands.items():
            yield f"  # {', '.join(ids)}"
            yield findings.plain(f"  {command}")
    summary = _counts(report.summary)
    checked = _counts(report.checked, with_zero=True)
    if report.findings:
        yield ""
    yield f"{report.cluster}: {summary or 'nothing found'} ({checked})"


def _counts(counts: Mapping[str, int], *, with_zero: bool = False) -> str:
    """Return counts in plain words."""
    return ", ".join(
        f"{count} {_NOUNS[what][count != 1]}"
        for what, count in counts.items()
        if count or with_zero
    )


def _commands(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """Return each command once with the ids of the findings it fixes, at most 20 for an id."""
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
            findings.plain("; ".join((*finding.evidence, finding.fix.command)))
        )
        match finding.severity:
            case Severity.ERROR | Severity.WARN:
                yield f"{head}><failure type={_quoted(finding.severity)} message={body}>{details}"
                yield "  </failure></testcase>"
            case Severity.UNKNOWN:
                yield f"{head}><skipped message={body}/></testcase>"
            case Severity.SUGGEST | Severity.INFO:
                text = saxutils.escape(findings.plain(finding.message))
                yield f"{head}><system-out>{text}</system-out>"
                yield "  </testcase>"
    yield "</testsuite>"


def _quoted(text: str) -> str:
    return saxutils.quoteattr(findings.plain(text))


class Topic(enum.StrEnum):
    """A topic that `muster check` can be limited to."""

    GPU = "gpu"
    FUSE = "fuse"
    AUTOSCALER = "autoscaler"


def evaluate(
    view: findings.ClusterView,
    topics: Sequence[Topic],
    commands: findings.Commands,
    *,
    cluster: str,
    only: str | None = None,
) -> findings.Report:
    """Return all findings about a cluster, or, with `only`, about one node."""
    results: list[Finding] = list(_unread(view.unread, commands))
    notes = [entry.why for entry in view.unread if _is_notable(entry)]
    fleet = node_labels.label_statuses(view.nodes or (), view.evidence)
    if Topic.GPU in topics and view.nodes is not None:
        results.extend(
            gpu_findings.evaluate(
                view.nodes, view.evidence, commands, simulated=view.simulated, only=only
            )
        )
        covering = node_labels.covering_scheme(fleet)
        if covering is not None:
            notes.append(f"{covering} names the model of every GPU node: nothing to label")
    if Topic.FUSE in topics:
        results.extend(fuse_findings.evaluate(view, commands, only=only))
    if Topic.AUTOSCALER in topics:
        results.extend(autoscaler_findings.evaluate(view, commands, only=only))
    checked = {"nodes": len(view.nodes or ()), "gpuNodes": len(fleet)}
    if view.pods is not None:
        checked["fusePods"] = sum(not pod.is_agent for pod in view.pods)
    return findings.report(
        _deduplicated(results),
        cluster=cluster,
        time=view.now,
        topics=topics,
        checked=checked,
        notes=notes,
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
    """Return whether an unreadable source is optional, so that a note about it is enough."""
    return entry.is_forbidden and not entry.is_needed


def _deduplicated(results: Iterable[Finding]) -> list[Finding]:
    """Return each finding about an object once: a pod and its event may report the same."""
    kept: dict[tuple[str, str, str], Finding] = {}
    for finding in results:
        kept.setdefault((finding.id, finding.object, finding.message), finding)
    return list(kept.values())
