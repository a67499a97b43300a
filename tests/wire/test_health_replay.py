"""The replay of recordings: files on disk, the command, and the detector of the service."""

import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from muster import vocabulary
from muster.cli import registry
from muster_health.fleet import detector
from muster_health.model import config, limits, signals, snapshot
from muster_health.replay import recorder, recording
from tests.worlds import muster_command

ZERO = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = config.Detection(patience_s=0.0, interval_s=1.0, reconnect_s=1.0, review_s=1000.0)
INSTANCES = itertools.count()


class Night:
    """A simulated plugin that sends a heartbeat each second unless silent, recorded by health."""

    def __init__(self, file: Path, *, mib_max: int = 64) -> None:
        settings = config.Settings(
            detection=POLICY, recording=config.Recording(file=str(file), mib_max=mib_max)
        )
        self.now = 0.0
        self.alerts: list[vocabulary.AlertChanged] = []
        self._detector = detector.Detector(POLICY, runbook_url="", at_zero=ZERO)
        self.recorder = recorder.Recorder(self._detector, settings, has_cluster=False)
        self.recorder.begin(self.now)
        self._instance = f"i{next(INSTANCES)}"
        self.feed(signals.BusBack(at=ZERO))

    def feed(self, event: signals.Input) -> None:
        self._execute(self.recorder.receive(event, self.now))

    def run(self, seconds: int, *, silent: bool = False) -> None:
        """Advance the time second by second; a silent plugin does not answer probes."""
        for _ in range(seconds):
            self.now += 1.0
            while (due := self.recorder.next_deadline()) is not None and due <= self.now:
                self._execute(self.recorder.tick(due))
            if not silent:
                beat = vocabulary.Heartbeat(
                    node="node-a",
                    plugin="p",
                    instance=self._instance,
                    seq=int(self.now),
                    interval_s=1.0,
                    uptime_s=self.now,
                )
                self.feed(signals.HeartbeatsArrived(heartbeats=[beat]))

    def _execute(self, outputs: Any) -> None:
        for output in outputs:
            match output:
                case signals.Probe():
                    no_answer = signals.ProbeFailed(
                        node=output.node,
                        plugin=output.plugin,
                        number=output.number,
                        subscribed=False,
                    )
                    self.feed(no_answer)
                case signals.Publish(event=vocabulary.AlertChanged() as alert):
                    self.alerts.append(alert)
                case _:
                    pass


class Command:
    """A callable that runs `muster replay` in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, file: Path, policy: str, *more: str) -> tuple[int, str, str]:
        settings = file.with_suffix(".yaml")
        settings.write_text(policy)
        code = registry.call("replay", str(file), "--policy", str(settings), *more)
        printed = self._capture.readouterr()
        return code, printed.out, printed.err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def record(file: Path) -> Night:
    """Record a plugin that is silent for 8 s, and later for 60 s."""
    night = Night(file)
    night.run(20)
    night.run(8, silent=True)
    night.run(100)
    night.run(60, silent=True)
    night.run(60)
    night.recorder.close()
    return night


def test_the_recorded_policy_raises_what_was_published_and_a_calmer_one_less(
    tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "night.rec"
    night = record(file)
    assert [alert.state.value for alert in night.alerts] == ["firing", "resolved"] * 2

    calmer = "detection: {suspicion_beats: 12, interval_s: 1, patience_s: 0}"
    code, out, err = command(file, calmer, "--json")
    assert (code, err) == (0, "")
    report = orjson.loads(out)
    assert report["alerts"] == {"published": 2, "recorded_policy": 2, "other_policy": 1}
    assert report["faithful"]
    assert [alert["kind"] for alert in report["only_recorded_policy"]] == ["plugin_down"]
    assert report["only_other_policy"] == []
    assert [(alert["kind"], alert["later_s"]) for alert in report["both"]] == [("plugin_down", 9.0)]

    policy = str(file.with_suffix(".yaml"))
    code, out, _ = muster_command.muster("replay", str(file), "--policy", policy)
    assert code == 0
    assert "2 alerts published; replayed, the recorded policy raises 2, and" in out
    assert "9 s later" in out


def test_only_alerts_after_the_given_time_are_shown(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "night.rec"
    record(file)
    same = "detection: {interval_s: 1, patience_s: 0, reconnect_s: 1, review_s: 1000}"
    _, out, _ = command(file, same, "--since", "130s", "--json")
    assert orjson.loads(out)["alerts"] == {"published": 1, "recorded_policy": 1, "other_policy": 1}


def test_each_alert_that_the_recorded_policy_does_not_raise_as_published_is_shown(
    tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "night.rec"
    record(file)
    lines = file.read_bytes().splitlines(keepends=True)
    published = [line for line in lines if b'"k":"Told"' in line]
    elsewhere = [line.replace(b"node-a", b"node-b") for line in published[:2]]
    file.write_bytes(
        b"".join(elsewhere.pop(0) if line in published[:2] else line for line in lines)
    )

    _, out, _ = command(file, "detection: {}", "--json")
    report = orjson.loads(out)
    assert not report["faithful"]
    missing, additional = report["published_not_replayed"], report["replayed_not_published"]
    assert [(alert["node"], alert["kind"]) for alert in missing] == [("node-b", "plugin_down")]
    assert [(alert["node"], alert["kind"]) for alert in additional] == [("node-a", "plugin_down")]
    _, out, _ = command(file, "detection: {}")
    shown = [line for line in out.splitlines() if line.startswith("!")]
    assert [line.split("  ")[-1] for line in shown] == [
        "(published, not replayed)",
        "(replayed, not published)",
    ]
    assert missing[0]["fired_at"][:19] in shown[0]


def test_a_killed_process_leaves_a_complete_recording(tmp_path: Path) -> None:
    file = tmp_path / "night.rec"
    night = Night(file)
    night.run(20)
    night.run(30, silent=True)
    kinds = [type(recording.decode(line)[1]) for line in file.read_bytes().splitlines()]
    assert (kinds.count(signals.HeartbeatArrived), kinds.count(recording.PublishedAlert)) == (20, 1)
    night.recorder.close()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda file: file.unlink(), "No such file or directory"),
        (lambda file: file.write_bytes(b""), "it is empty"),
        (lambda file: file.write_bytes(b'{"t":1,"k":"BusLost","v":{}}\n'), "begin with a header"),
        (lambda file: file.write_bytes(b"nonsense\n"), "line 1"),
        (lambda file: file.write_bytes(b'{"t":1,"k":"Cake","v":{}}\n'), "unknown kind 'Cake'"),
    ],
)
def test_an_unreadable_recording_is_refused_in_one_line(
    tmp_path: Path, spoil: Callable[[Path], object], problem: str, command: Command
) -> None:
    file = tmp_path / "night.rec"
    file.touch()
    spoil(file)
    code, out, err = command(file, "detection: {}")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert problem in err


def test_an_invalid_policy_and_an_invalid_time_are_refused(
    tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "night.rec"
    record(file)
    code, _, err = command(file, "detection: {suspicion_beats: -1}")
    assert code == 2
    assert "suspicion_beats" in err
    code, _, err = command(file, "detection: {}", "--since", "yesterday")
    assert (code, err.count("\n")) == (2, 1)


def test_a_recording_stays_within_its_limit_and_continues_in_a_second_file(
    tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "long.rec"
    night = Night(file, mib_max=1)
    night.run(20)
    while not Path(f"{file}.1").exists():
        night.run(100)
    night.run(20)
    night.run(30, silent=True)
    night.run(30)
    night.recorder.close()
    # the second file begins with the known state, which is not published again
    newer = [recording.decode(line)[1] for line in file.read_bytes().splitlines()[:2]]
    assert isinstance(newer[0], recording.Header)
    assert not newer[0].begins
    assert isinstance(newer[1], signals.Restored)
    assert newer[1].state.state is snapshot.State.HEALTHY
    assert file.stat().st_size + Path(f"{file}.1").stat().st_size < 1.1 * 2**20
    Path(f"{file}.1").unlink()
    _, out, _ = command(file, "detection: {interval_s: 1, patience_s: 0}", "--json")
    assert orjson.loads(out)["alerts"] == {"published": 1, "recorded_policy": 1, "other_policy": 1}


def test_the_last_line_of_a_killed_process_may_be_incomplete(
    tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "night.rec"
    record(file)
    file.write_bytes(file.read_bytes()[:-7])
    code, _, err = command(file, "detection: {}")
    assert (code, err) == (0, "")


HEARTBEAT = vocabulary.Heartbeat(node="a", plugin="p", instance="i", seq=1, interval_s=1.0)
FACTS = signals.Facts(
    exists=True,
    lease_age_s=1.5,
    planned=(signals.Planned.UNSCHEDULABLE,),
    pods=(signals.Pod(name="m/p", uid="1", phase="Running", ready=True),),
    offers={"r": signals.Offer(capacity=2, allocatable=1)},
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
    signals.HeartbeatArrived(heartbeat=HEARTBEAT),
    signals.FromPlugin(event=STOPPING, instance="i", sequence=4, position=9),
    signals.ProbeAnswered(heartbeat=HEARTBEAT, number=3),
    signals.ProbeFailed(node="a", plugin="p", number=3, subscribed=True),
    signals.ProbeInconclusive(node="a", plugin="p", number=3),
    signals.BusLost(),
    signals.BusBack(at=ZERO),
    signals.Restored(state=STATE),
    signals.Connected(node="a", plugin="p", server="s", client=1),
    signals.Disconnected(node="a", plugin="p", server="s", client=1, reason="Client Closed"),
    signals.ServerEvent(server="s", what="shutdown"),
    signals.ClusterAnswered(node="a", plugin="p", number=4, facts=FACTS),
    signals.ClusterAnswered(node="a", plugin="p", number=4, facts=None),
    signals.ExpectedNodes(plugin="p", nodes={"a": signals.Expected(age_s=1.0, causes=("z=1",))}),
    signals.NodeOffers(node="a", offers={"r": signals.Offer(capacity=2, allocatable=1)}),
    signals.NodeOffers(node="a", offers=None),
    signals.NodesListed(),
    signals.Leadership(revision=7),
    signals.ClockStalled(seconds=1.5),
    limits.NodeNoisy(
        node="a", channel=limits.Channel.EVENTS, messages=9, seconds=1.0, senders=("p",)
    ),
    signals.StreamsChecked(early=("MUSTER_EVENTS has 512 of 512 MiB",)),
    signals.Remediated(node="a", plugin="p", pod="m/p", error="gone"),
]


@pytest.mark.parametrize("entry", INPUTS, ids=lambda entry: type(entry).__name__)
def test_every_input_is_read_as_it_was_written(entry: recording.Entry) -> None:
    (line,) = recording.encode(1.25, entry)
    assert recording.decode(line) == (1.25, entry)


def test_a_recording_of_version_1_can_be_read_whatever_its_classes_are_called() -> None:
    lines = [
        (
            b'{"t":0.0,"k":"Header","v":{"v":1,"at_zero":"2026-01-01T00:00:00Z","begins":true,'
            b'"sees":true,"leads":true,"has_cluster":false,"detection":{},"bounds":{}}}'
        ),
        b'{"t":1.0,"k":"Beat","v":{"heartbeat":{"node":"a","plugin":"p","i":"i","seq":1,"t":1.0}}}',
        (
            b'{"t":2.0,"k":"FromPlugin","v":{"type":"plugin.stopping","event":{"node":"a",'
            b'"at":"2026-01-01T00:00:02Z","plugin":"p","reason":"upgrade","expected_return_s":3.0},'
            b'"instance":"i","sequence":4,"position":9}}'
        ),
        b'{"t":3.0,"k":"Probe","v":{"node":"a","plugin":"p","number":3,"timeout_s":2.0}}',
        b'{"t":4.0,"k":"ProbeFailed","v":{"node":"a","plugin":"p","number":3,"subscribed":true}}',
        b'{"t":5.0,"k":"Leadership","v":{"revision":null}}',
    ]
    at, entries = zip(*map(recording.decode, lines), strict=True)
    assert at == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert entries == (
        recording.Header(
            at_zero=ZERO,
            sees=True,
            has_cluster=False,
            detection=config.Detection(),
            bounds=config.Bounds(),
        ),
        signals.HeartbeatArrived(heartbeat=HEARTBEAT),
        signals.FromPlugin(
            event=msgspec.structs.replace(STOPPING, at=ZERO + timedelta(seconds=2)),
            instance="i",
            sequence=4,
            position=9,
        ),
        signals.Probe(node="a", plugin="p", number=3, timeout_s=2.0),
        signals.ProbeFailed(node="a", plugin="p", number=3, subscribed=True),
        signals.Leadership(revision=None),
    )
