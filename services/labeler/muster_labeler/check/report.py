"""Pure: A report as people read it, as JSON, and as JUnit XML for CI."""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from xml.sax import saxutils

import msgspec

from muster_labeler.check import autoscaler_findings, findings, fuse_findings, gpu_findings
from muster_labeler.check.findings import Finding, Fix, Id, Report, Scope, Severity
from muster_labeler.naming import node_labels

_LINES_MAX = 20
_FAILING = frozenset({Severity.ERROR, Severity.WARN})


class Output(enum.StrEnum):
    """How a report is written."""

    TEXT = "text"
    JSON = "json"
    JUNIT = "junit"


def written(report: Report, output: Output) -> str:
    """Return a report, with a line's end."""
    match output:
        case Output.TEXT:
            return "\n".join(_text(report)) + "\n"
        case Output.JSON:
            return msgspec.json.format(msgspec.json.encode(report)).decode() + "\n"
        case Output.JUNIT:
            return "\n".join(_junit(report)) + "\n"


def plain(text: str) -> str:
    """Return a text without what could command a terminal: the cluster is not ours alone."""
    return "".join(c if c.isprintable() else " " for c in text)


def _text(report: Report) -> Iterable[str]:
    shown: Counter[str] = Counter()
    totals = Counter(one.id for one in report.findings)
    for one in report.findings:
        shown[one.id] += 1
        if shown[one.id] <= _LINES_MAX:
            yield plain(f"{one.severity.upper():<8} {one.id:<8} {one.object}: {one.message}")
        elif shown[one.id] == totals[one.id]:
            more = totals[one.id] - _LINES_MAX
            yield f"{'':<8} {one.id:<8} and {more} more; --output json tells all"
    for note in report.notes:
        yield plain(f"{'NOTE':<8} {note}")
    commands = _commands(report.findings)
    if commands:
        yield ""
        yield "To mend:"
        for command, ids in commands.items():
            yield f"  # {', '.join(ids)}"
            yield plain(f"  {command}")
    said = ", ".join(f"{count} {severity}" for severity, count in report.summary.items() if count)
    seen = ", ".join(f"{count} {what}" for what, count in report.checked.items())
    if report.findings:
        yield ""
    yield f"{report.cluster}: {said or 'nothing found'} ({seen})"


def _commands(found: Iterable[Finding]) -> dict[str, list[str]]:
    """Return the commands, each once, with the findings that each mends; at most 20 for an id."""
    commands: dict[str, list[str]] = {}
    used: Counter[str] = Counter()
    for one in found:
        command = one.fix.command
        if not command or (command not in commands and used[one.id] >= _LINES_MAX):
            continue
        if command not in commands:
            used[one.id] += 1
        ids = commands.setdefault(command, [])
        if one.id not in ids:
            ids.append(one.id)
    return commands


def _junit(report: Report) -> Iterable[str]:
    failures = sum(one.severity in _FAILING for one in report.findings)
    skipped = sum(one.severity is Severity.UNKNOWN for one in report.findings)
    count = len(report.findings) or 1
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield (
        f'<testsuite name="muster check" tests="{count}" failures="{failures}" '
        f'skipped="{skipped}" timestamp="{report.time:%Y-%m-%dT%H:%M:%S}">'
    )
    if not report.findings:
        yield f'  <testcase classname="muster" name={_quoted(", ".join(report.topics))}/>'
    for one in report.findings:
        head = f"  <testcase classname={_quoted(one.id)} name={_quoted(one.object)}"
        body = _quoted(one.message)
        details = saxutils.escape(plain("; ".join((*one.evidence, one.fix.command))))
        match one.severity:
            case Severity.ERROR | Severity.WARN:
                yield f"{head}><failure type={_quoted(one.severity)} message={body}>{details}"
                yield "  </failure></testcase>"
            case Severity.UNKNOWN:
                yield f"{head}><skipped message={body}/></testcase>"
            case Severity.SUGGEST | Severity.INFO:
                yield f"{head}><system-out>{saxutils.escape(plain(one.message))}</system-out>"
                yield "  </testcase>"
    yield "</testsuite>"


def _quoted(text: str) -> str:
    return saxutils.quoteattr(plain(text))


class Topic(enum.StrEnum):
    """What is looked at."""

    GPU = "gpu"
    FUSE = "fuse"
    AUTOSCALER = "autoscaler"


def report(
    seen: findings.World,
    topics: Sequence[Topic],
    where: findings.Where,
    *,
    cluster: str,
    only: str | None = None,
) -> findings.Report:
    """Return everything that is found in a cluster, about `only` one node if it is named."""
    found: list[Finding] = list(_unread(seen.unread, where))
    notes = [one.why for one in seen.unread if _is_notable(one)]
    fleet = node_labels.fleet(seen.nodes or (), seen.views)
    if Topic.GPU in topics and seen.nodes is not None:
        found.extend(
            gpu_findings.found(seen.nodes, seen.views, where, simulated=seen.simulated, only=only)
        )
        covering = node_labels.covering(fleet)
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


def _unread(unread: Iterable[findings.Unread], where: findings.Where) -> Iterable[Finding]:
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


def _is_notable(one: findings.Unread) -> bool:
    """Tell whether something may stay unseen: a source to which we have no right."""
    return one.is_forbidden and not one.is_needed


def _once(found: Iterable[Finding]) -> list[Finding]:
    """Return each finding about an object once: a pod and its event tell the same."""
    kept: dict[tuple[str, str, str], Finding] = {}
    for one in found:
        kept.setdefault((one.id, one.object, one.message), one)
    return list(kept.values())
