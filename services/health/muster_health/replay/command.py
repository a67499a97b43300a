"""Adapter for the command `muster replay`: shows which alerts another policy would have raised."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import cyclopts
import msgspec
import orjson
from cyclopts import Parameter

from muster.cli import output, texts
from muster.service import settings

if TYPE_CHECKING:
    from muster_health.replay import player, recording

app = cyclopts.App(name="replay")


@app.default
def replay(
    recorded: Annotated[Path, Parameter(name="RECORDING")],
    /,
    *,
    policy: Path,
    since: str | None = None,
    json: output.Json = False,
) -> int:
    """Show which alerts another policy would have raised.

    Two policies are replayed: the recorded one, which health used at the time, and that of
    --policy. The output shows alerts that only one of them raises, and alerts that come later or
    sooner; equal alerts are only counted. If a replay of the recorded policy raises other alerts
    than were published, these differences come first. Another policy may send probes and queries
    that were not recorded: the last line counts how they were answered.

    The exit code is 0, or 2 if a file or an argument cannot be used.

    Parameters
    ----------
    recorded
        The file that health writes if `recording.file` is set (docs/how-to/replay.md); its
        predecessor RECORDING.1 is read as well.
    policy
        A file with settings of health; only `detection` and `bounds` are used.
    since
        Show only later alerts: a duration before the end of the recording (24h, 30m, 7d), or a time
        (2026-11-21T03:00:00Z).
    json
        Print one JSON object.
    """
    from muster_health.model import config  # noqa: PLC0415  # a command imports what it needs when it is called
    from muster_health.replay import player, recorder, recording  # noqa: PLC0415  # as above

    try:
        other = settings.load(config.Settings, prefix="MUSTER_HEALTH", file=policy, environment={})
        read = recorder.read(recorded)
    except (recording.UnreadableRecording, settings.BadSettings) as error:
        return output.fail("replay", str(error))
    try:
        begin = texts.since(since) if since is not None else datetime.min.replace(tzinfo=UTC)
    except ValueError as error:
        return output.fail("replay", f"--since: {error}")
    shown_from = read.end - begin if isinstance(begin, timedelta) else begin
    try:
        comparison = player.compare(read, other, shown_from)
    except recording.UnreadableRecording as error:
        return output.fail("replay", str(error))
    span = {"from": read.begin, "to": read.end, "entries": len(read.entries)}
    tree = {"recording": span, "policy": str(policy), **_report(comparison)}
    # orjson writes times with their offset, as all of muster's JSON does
    report = orjson.loads(orjson.dumps(msgspec.to_builtins(tree, builtin_types=(datetime,))))
    if json:
        output.print_json(report, indent=2)
    else:
        output.show(*_text(report))
    return 0


def _report(comparison: "player.Comparison") -> dict[str, object]:
    pairs, only_recorded = comparison.both, comparison.only_recorded_policy
    return {
        "alerts": {
            "published": comparison.published,
            "recorded_policy": len(pairs) + len(only_recorded),
            "other_policy": len(pairs) + len(comparison.only_other_policy),
        },
        "faithful": not comparison.not_replayed and not comparison.not_published,
        "published_not_replayed": [_episode(episode) for episode in comparison.not_replayed],
        "replayed_not_published": [_episode(episode) for episode in comparison.not_published],
        "only_recorded_policy": [_episode(episode) for episode in only_recorded],
        "only_other_policy": [_episode(episode) for episode in comparison.only_other_policy],
        "both": [
            {**_episode(then), "later_s": round((now.fired_at - then.fired_at).total_seconds(), 1)}
            for then, now in pairs
        ],
        "questions": dict(comparison.questions),
    }


def _episode(episode: "recording.Episode") -> dict[str, object]:
    alert = episode.alert
    return {
        "node": alert.node,
        "plugin": alert.plugin,
        "kind": alert.kind,
        "resource": alert.resource,
        "summary": alert.summary,
        "fired_at": episode.fired_at,
        "resolved_at": episode.resolved_at,
        "evidence": [evidence.observed for evidence in alert.evidence],
    }


_ANSWERED: Final = {"as recorded": "answered from the recording"}


def _text(report: Mapping[str, Any]) -> Iterator[str]:
    span, alerts, other = report["recording"], report["alerts"], report["policy"]
    yield f"recorded from {span['from'][:19]} to {span['to'][:19]} UTC, {span['entries']} entries"
    noun = "alert" if alerts["published"] == 1 else "alerts"
    yield (
        f"{alerts['published']} {noun} published; replayed, the recorded policy raises "
        f"{alerts['recorded_policy']}, and {other} {alerts['other_policy']}"
    )
    if not report["faithful"]:
        yield (
            "a replay of the recorded policy differs from the published alerts; do not rely on "
            "results about these alerts"
        )
        for alert in report["published_not_replayed"]:
            yield _line("!", alert, "published, not replayed")
        for alert in report["replayed_not_published"]:
            yield _line("!", alert, "replayed, not published")
    for alert in report["only_recorded_policy"]:
        yield _line("-", alert, "only with the recorded policy")
    for alert in report["only_other_policy"]:
        yield _line("+", alert, f"only with {other}")
    moved = [alert for alert in report["both"] if alert["later_s"]]
    for alert in moved:
        seconds = alert["later_s"]
        direction = "later" if seconds > 0 else "sooner"
        yield _line("~", alert, f"{abs(seconds):g} s {direction} with {other}")
    same = len(report["both"]) - len(moved)
    yield f"{same} {'alert is' if same == 1 else 'alerts are'} the same with both"
    answered = ", ".join(
        f"{count} {_ANSWERED.get(how, how)}" for how, count in sorted(report["questions"].items())
    )
    yield f"probes and queries under {other}: {answered or 'none'}"


def _line(sign: str, alert: Mapping[str, str], remark: str) -> str:
    return f"{sign} {alert['fired_at'][:19]}  {alert['kind']:<18} {alert['summary']}  ({remark})"
