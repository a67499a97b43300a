"""Adapter: the command line: `muster replay`, how another policy judges a recording."""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import orjson

from muster.service import settings
from muster_health.model import config
from muster_health.replay import player, recording

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_EXAMPLE: Final = """\
A recording is what health writes with `recording.file` (docs/health.md); FILE.1, the one before it,
is read as well. FILE of --policy are settings of health, of which `detection` and `bounds` matter.

  muster replay health.rec --policy calmer.yaml
  muster replay health.rec --policy calmer.yaml --since 24h

Played are two policies: the recorded one, which health had then, and that of --policy. Every alert
that only one of them raises is shown, and what comes later or sooner; what is the same is counted.
Where the recorded policy, played again, does not raise what was told then, that is shown first.
Another policy asks other questions than were asked: how they were answered is counted.

TIME of --since is a date, or counts back from the end of the recording, not from now.
Exit code 0, or 2 for a file that cannot be used.
"""


class _Unusable(ValueError):
    """What the user gave cannot be used; the text says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="muster replay",
        description="Show which alerts another policy would have raised.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recording", type=Path, metavar="RECORDING")
    parser.add_argument("--policy", type=Path, required=True, metavar="FILE", help="other settings")
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="24h, 30m, 7d: so long before the recording's end; or 2026-11-21T03:00:00Z",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    try:
        report = _report(chosen.recording, chosen.policy, chosen.since)
    except (_Unusable, settings.BadSettings) as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"muster replay: {line}\n")
        return 2
    tree = orjson.dumps(report, option=orjson.OPT_INDENT_2)
    sys.stdout.write((tree.decode() if chosen.json else _text(orjson.loads(tree))) + "\n")
    return 0


def _report(file: Path, policy: Path, since: str | None) -> dict[str, object]:
    other = settings.load(config.Settings, prefix="MUSTER_HEALTH", file=policy, environment={})
    try:
        recorded = recording.tape(_lines(file))
    except recording.NotARecording as error:
        raise _Unusable(f"{file}: {error}") from None
    end = recorded.zero + timedelta(seconds=recorded.entries[-1][0])
    begin = recorded.zero + timedelta(seconds=recorded.entries[0][0])
    shown = _since(since, end)
    then = player.play(recorded)
    now = player.play(recorded, player.Policy(detection=other.detection, bounds=other.bounds))
    both, gone, new = recording.matched(then.episodes, now.episodes)
    untold, unraised = recording.held_against(recorded, then.episodes)
    both = [pair for pair in both if max(one.fired_at for one in pair) >= shown]
    gone, new, untold, unraised = (
        [one for one in many if one.fired_at >= shown] for many in (gone, new, untold, unraised)
    )
    return {
        "recording": {"from": begin, "to": end, "entries": len(recorded.entries)},
        "policy": str(policy),
        "alerts": {
            "told": sum(one.fired_at >= shown for one in recorded.told),
            "recorded_policy": len(both) + len(gone),
            "other_policy": len(both) + len(new),
        },
        "faithful": not untold and not unraised,
        "told_not_raised": [_episode(one) for one in untold],
        "raised_not_told": [_episode(one) for one in unraised],
        "only_recorded_policy": [_episode(one) for one in gone],
        "only_other_policy": [_episode(one) for one in new],
        "both": [
            {**_episode(one), "later_s": round((two.fired_at - one.fired_at).total_seconds(), 1)}
            for one, two in both
        ],
        "questions": dict(now.questions),
    }


def _lines(file: Path) -> Iterator[tuple[float, recording.Entry]]:
    older = Path(f"{file}.1")
    for path in (older, file) if older.exists() else (file,):
        try:
            with path.open("rb") as lines:
                yield from _decoded(path, lines)
        except OSError as error:
            raise _Unusable(f"{path}: {error.strerror}") from None


def _decoded(path: Path, lines: Iterator[bytes]) -> Iterator[tuple[float, recording.Entry]]:
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            # a crash, or health is writing just now
            return
        try:
            yield recording.decode(line)
        except recording.NotARecording as error:
            raise _Unusable(f"{path}, line {number}: {error}") from None


def _since(text: str | None, end: datetime) -> datetime:
    if text is None:
        return datetime.min.replace(tzinfo=UTC)
    ago = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if ago:
        return end - timedelta(seconds=int(ago[1]) * _UNITS[ago[2]])
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise _Unusable(f"--since {text}: neither like 24h nor like 2026-11-21T03:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _episode(one: recording.Episode) -> dict[str, object]:
    alert = one.alert
    return {
        "node": alert.node,
        "plugin": alert.plugin,
        "kind": alert.kind,
        "resource": alert.resource,
        "summary": alert.summary,
        "fired_at": one.fired_at,
        "resolved_at": one.resolved_at,
        "evidence": [seen.observed for seen in alert.evidence],
    }


def _text(tree: Mapping[str, Any]) -> str:
    span, alerts, other = tree["recording"], tree["alerts"], tree["policy"]
    again = f"the recorded policy, played again, raises {alerts['recorded_policy']}"
    lines = [
        f"recorded from {span['from'][:19]} to {span['to'][:19]} UTC, {span['entries']} entries",
        f"{alerts['told']} alerts told; {again}, and {other} {alerts['other_policy']}",
    ]
    if not tree["faithful"]:
        lines.append(
            "played again, the recorded policy does not raise what was told: take with care what "
            "concerns these"
        )
        lines += [_line("!", one, "told, not raised") for one in tree["told_not_raised"]]
        lines += [_line("!", one, "raised, not told") for one in tree["raised_not_told"]]
    only = "only with the recorded policy"
    lines += [_line("-", one, only) for one in tree["only_recorded_policy"]]
    lines += [_line("+", one, f"only with {other}") for one in tree["only_other_policy"]]
    moved = [one for one in tree["both"] if one["later_s"]]
    for one in moved:
        seconds = one["later_s"]
        late = f"{abs(seconds):g} s {'later' if seconds > 0 else 'sooner'} with {other}"
        lines.append(_line("~", one, late))
    same = len(tree["both"]) - len(moved)
    lines.append(f"{same} {'alert is' if same == 1 else 'alerts are'} the same with both")
    asked = ", ".join(f"{many} {how}" for how, many in sorted(tree["questions"].items()))
    lines.append(f"questions of {other}, and how they were answered: {asked or 'none'}")
    return "\n".join(lines)


def _line(sign: str, one: Mapping[str, str], word: str) -> str:
    return f"{sign} {one['fired_at'][:19]}  {one['kind']:<18} {one['summary']}  ({word})"


if __name__ == "__main__":
    sys.exit(main())
