"""Pure: A report as people read it, as JSON, and as JUnit XML for CI."""

import enum
from collections import Counter
from collections.abc import Iterable
from xml.sax import saxutils

import msgspec

from muster_labeler.findings import Finding, Report, Severity

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
