"""What was recorded, judged anew: files on disk, the command, and the detector of the service."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest

from muster import vocabulary
from muster_health.fleet import detector
from muster_health.model import config, facts, signals, snapshot
from muster_health.replay import command as replay_command
from muster_health.replay import recorder, recording

ZERO = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = config.Detection(patience_s=0.0, interval_s=1.0, reconnect_s=1.0, review_s=1000.0)
INSTANCES = itertools.count()


class Night:
    """A node whose plugin beats once a second, but for its silences, and health that records it."""

    def __init__(self, file: Path, *, mib_max: int = 64) -> None:
        settings = config.Settings(
            detection=POLICY, recording=config.Recording(file=str(file), mib_max=mib_max)
        )
        self.now = 0.0
        self.alerts: list[vocabulary.AlertChanged] = []
        self._watched = detector.Detector(POLICY, runbook_url="", at_zero=ZERO)
        self.recorder = recorder.Recorder(self._watched, settings, has_cluster=False)
        self.recorder.begin(self.now)
        self._instance = f"i{next(INSTANCES)}"
        self.feed(signals.BusBack(at=ZERO))

    def feed(self, event: signals.Input) -> None:
        self._do(self.recorder.receive(event, self.now))

    def run(self, seconds: int, *, silent: bool = False) -> None:
        """Let time pass, a second at a time; a probe of a silent plugin finds nobody."""
        for _ in range(seconds):
            self.now += 1.0
            while (due := self.recorder.next_deadline()) is not None and due <= self.now:
                self._do(self.recorder.tick(due))
            if not silent:
                beat = vocabulary.Heartbeat(
                    node="node-a",
                    plugin="p",
                    instance=self._instance,
                    seq=int(self.now),
                    interval_s=1.0,
                    uptime_s=self.now,
                )
                self.feed(signals.Beats(heartbeats=[beat]))

    def _do(self, outs: Any) -> None:
        for out in outs:
            match out:
                case signals.Probe():
                    gone = signals.ProbeFailed(
                        node=out.node, plugin=out.plugin, number=out.number, subscribed=False
                    )
                    self.feed(gone)
                case signals.Publish(event=vocabulary.AlertChanged() as alert):
                    self.alerts.append(alert)
                case _:
                    pass


class Command:
    """`muster replay` in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, file: Path, policy: str, *more: str) -> tuple[int, str, str]:
        settings = file.with_suffix(".yaml")
        settings.write_text(policy)
        code = replay_command.main([str(file), "--policy", str(settings), *more])
        said = self._capture.readouterr()
        return code, said.out, said.err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def night(file: Path) -> Night:
    """Record a plugin that is gone for 8 s, and later for 60."""
    found = Night(file)
    found.run(20)
    found.run(8, silent=True)
    found.run(100)
    found.run(60, silent=True)
    found.run(60)
    found.recorder.close()
    return found


def test_the_policy_of_then_raises_what_was_told_and_a_calmer_one_less(
    tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "night.rec"
    found = night(file)
    assert [alert.state.value for alert in found.alerts] == ["firing", "resolved"] * 2

    calmer = "detection: {suspicion_beats: 12, interval_s: 1, patience_s: 0}"
    code, out, err = command(file, calmer, "--json")
    assert (code, err) == (0, "")
    report = orjson.loads(out)
    assert report["alerts"] == {"told": 2, "recorded_policy": 2, "other_policy": 1}
    assert report["faithful"]
    assert [one["kind"] for one in report["only_recorded_policy"]] == ["plugin_down"]
    assert report["only_other_policy"] == []
    assert [(one["kind"], one["later_s"]) for one in report["both"]] == [("plugin_down", 9.0)]

    done = subprocess.run(
        (sys.executable, "-m", "muster.cli", "replay", file, "--policy", file.with_suffix(".yaml")),
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    out = done.stdout
    assert "2 alerts told; the recorded policy, played again, raises 2" in out
    assert "9 s later" in out


def test_only_what_is_new_enough_is_shown(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "night.rec"
    night(file)
    same = "detection: {interval_s: 1, patience_s: 0, reconnect_s: 1, review_s: 1000}"
    _, out, _ = command(file, same, "--since", "130s", "--json")
    assert orjson.loads(out)["alerts"] == {"told": 1, "recorded_policy": 1, "other_policy": 1}


def test_where_the_recorded_policy_does_not_raise_what_was_told_is_shown_alert_by_alert(
    tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "night.rec"
    night(file)
    lines = file.read_bytes().splitlines(keepends=True)
    told = [line for line in lines if b'"k":"Told"' in line]
    elsewhere = [line.replace(b"node-a", b"node-b") for line in told[:2]]
    file.write_bytes(b"".join(elsewhere.pop(0) if line in told[:2] else line for line in lines))

    _, out, _ = command(file, "detection: {}", "--json")
    report = orjson.loads(out)
    assert not report["faithful"]
    missed, more = report["told_not_raised"], report["raised_not_told"]
    assert [(one["node"], one["kind"]) for one in missed] == [("node-b", "plugin_down")]
    assert [(one["node"], one["kind"]) for one in more] == [("node-a", "plugin_down")]
    _, out, _ = command(file, "detection: {}")
    shown = [line for line in out.splitlines() if line.startswith("!")]
    assert [line.split("  ")[-1] for line in shown] == ["(told, not raised)", "(raised, not told)"]
    assert missed[0]["fired_at"][:19] in shown[0]


def test_who_is_killed_leaves_all_that_it_took_in_and_told(tmp_path: Path) -> None:
    file = tmp_path / "night.rec"
    found = Night(file)
    found.run(20)
    found.run(30, silent=True)
    kinds = [type(recording.decode(line)[1]) for line in file.read_bytes().splitlines()]
    assert (kinds.count(signals.Beat), kinds.count(recording.Told)) == (20, 1)
    found.recorder.close()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda file: file.unlink(), "No such file or directory"),
        (lambda file: file.write_bytes(b""), "it is empty"),
        (lambda file: file.write_bytes(b'{"t":1,"k":"BusLost","v":{}}\n'), "begin with a header"),
        (lambda file: file.write_bytes(b"nonsense\n"), "line 1"),
        (lambda file: file.write_bytes(b'{"t":1,"k":"Cake","v":{}}\n'), "called 'Cake'"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(
    tmp_path: Path, spoil: Callable[[Path], object], problem: str, command: Command
) -> None:
    file = tmp_path / "night.rec"
    file.touch()
    spoil(file)
    code, out, err = command(file, "detection: {}")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert problem in err


def test_a_policy_that_cannot_be_used_and_a_time_that_is_none_are_refused(
    tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "night.rec"
    night(file)
    code, _, err = command(file, "detection: {suspicion_beats: -1}")
    assert code == 2
    assert "suspicion_beats" in err
    code, _, err = command(file, "detection: {}", "--since", "yesterday")
    assert (code, err.count("\n")) == (2, 1)


def test_a_recording_takes_no_more_than_it_may_and_goes_on_in_the_second_file(
    tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "long.rec"
    found = Night(file, mib_max=1)
    found.run(20)
    while not Path(f"{file}.1").exists():
        found.run(100)
    found.run(20)
    found.run(30, silent=True)
    found.run(30)
    found.recorder.close()
    # what was known when the file began is told anew to nobody
    newer = [recording.decode(line)[1] for line in file.read_bytes().splitlines()[:2]]
    assert isinstance(newer[0], recording.Header)
    assert not newer[0].begins
    assert isinstance(newer[1], signals.Restored)
    assert newer[1].state.state is snapshot.State.HEALTHY
    assert file.stat().st_size + Path(f"{file}.1").stat().st_size < 1.1 * 2**20
    Path(f"{file}.1").unlink()
    _, out, _ = command(file, "detection: {interval_s: 1, patience_s: 0}", "--json")
    assert orjson.loads(out)["alerts"] == {"told": 1, "recorded_policy": 1, "other_policy": 1}


def test_the_last_line_of_a_process_that_was_killed_may_be_half(
    tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "night.rec"
    night(file)
    file.write_bytes(file.read_bytes()[:-7])
    code, _, err = command(file, "detection: {}")
    assert (code, err) == (0, "")


BEAT = vocabulary.Heartbeat(node="a", plugin="p", instance="i", seq=1, interval_s=1.0)
SEEN = facts.Facts(
    exists=True,
    lease_age_s=1.5,
    planned=(facts.Planned.UNSCHEDULABLE,),
    pods=(facts.Pod(name="m/p", uid="1", phase="Running", ready=True),),
    offers={"r": facts.Offer(capacity=2, allocatable=1)},
)
STATE = snapshot.Snapshot(
    node="a", plugin="p", state=snapshot.State.HEALTHY, interval_s=1.0, since=ZERO
)
STOPPING = vocabulary.PluginStopping(
    node="a", plugin="p", at=ZERO, reason=vocabulary.StopReason.UPGRADE, expected_return_s=3.0
)
INPUTS: list[recording.Entry] = [
    signals.Probe(node="a", plugin="p", number=3, timeout_s=2.0),
    signals.AskCluster(node="a", plugin="p", number=4, timeout_s=2.0, resources=("r",)),
    signals.Beat(heartbeat=BEAT),
    signals.FromPlugin(event=STOPPING, instance="i", sequence=4, position=9),
    signals.ProbeAnswered(heartbeat=BEAT, number=3),
    signals.ProbeFailed(node="a", plugin="p", number=3, subscribed=True),
    signals.ProbeInconclusive(node="a", plugin="p", number=3),
    signals.BusLost(),
    signals.BusBack(at=ZERO),
    signals.Restored(state=STATE),
    signals.Connected(node="a", plugin="p", server="s", client=1),
    signals.Disconnected(node="a", plugin="p", server="s", client=1, reason="Client Closed"),
    signals.ServerEvent(server="s", what="shutdown"),
    signals.ClusterAnswered(node="a", plugin="p", number=4, facts=SEEN),
    signals.ClusterAnswered(node="a", plugin="p", number=4, facts=None),
    signals.ExpectedNodes(plugin="p", nodes={"a": facts.Expected(age_s=1.0, causes=("z=1",))}),
    signals.NodeOffers(node="a", offers={"r": facts.Offer(capacity=2, allocatable=1)}),
    signals.NodeOffers(node="a", offers=None),
    signals.Leadership(revision=7),
    signals.ClockStalled(seconds=1.5),
    signals.Remediated(node="a", plugin="p", pod="m/p", error="gone"),
]


@pytest.mark.parametrize("said", INPUTS, ids=lambda said: type(said).__name__)
def test_every_input_is_read_as_it_was_written(said: recording.Entry) -> None:
    (line,) = recording.encode(1.25, said)
    assert recording.decode(line) == (1.25, said)
