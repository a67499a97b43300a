"""Adapter: the file system: a detector whose inputs are written down, in two files of bounded size.

When the newer file is full it becomes the older one, `FILE.1`. What cannot be written is said once,
and nothing more is written: the detector goes on.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO, Final

from muster import vocabulary
from muster.service import logs
from muster_health.fleet import detector
from muster_health.model import config, signals, snapshot
from muster_health.replay import recording

_BUFFER_BYTES: Final = 64 * 1024


class Recorder:
    """A `muster.machine.Machine` around a detector; `close` it in the end."""

    def __init__(
        self, watched: detector.Detector, settings: config.Settings, *, has_cluster: bool
    ) -> None:
        self._watched = watched
        self._settings = settings
        self._has_cluster = has_cluster
        self._path = Path(settings.recording.file)
        self._half = settings.recording.mib_max * 1024 * 1024 // 2
        self._file: BinaryIO | None = None
        self._size = 0
        self._levels: dict[tuple[str, str], signals.Input] = {}
        """The newest of what is told only when it changes, and what is remembered, for a file that
        begins later."""

    def receive(self, event: signals.Input, now: float) -> Sequence[signals.Output]:
        """Write an input down, and have it taken."""
        self._write(event, now)
        outs = self._watched.receive(event, now)
        self._follow(outs, now)
        return outs

    def tick(self, now: float) -> Sequence[signals.Output]:
        """Have done what is due."""
        outs = self._watched.tick(now)
        self._follow(outs, now)
        return outs

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        return self._watched.next_deadline()

    def begin(self, now: float) -> None:
        """Begin, behind what a process before us wrote. Raises OSError."""
        self._open(now, begins=True)

    def close(self) -> None:
        """Write what is left."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _follow(self, outs: Sequence[signals.Output], now: float) -> None:
        """Write down what the detector told and asked; all is on file before it is done."""
        for out in outs:
            match out:
                case signals.Probe() | signals.AskCluster():
                    self._write(out, now)
                case signals.Remember(key=key, value=b""):
                    self._levels.pop(("state", key), None)
                case signals.Remember(key=key, value=value):
                    state = snapshot.decode(value)
                    self._levels["state", key] = signals.Restored(state=state)
                case signals.Publish(event=vocabulary.AlertChanged() as alert):
                    self._write(recording.Told(alert=alert), now)
                case signals.Noted(note=signals.Note.STALLED, seconds=seconds):
                    self._write(signals.ClockStalled(seconds=seconds), now)
                case _:
                    pass
        self._flush()

    def _write(self, entry: recording.Entry, now: float) -> None:
        match entry:
            case signals.ExpectedNodes():
                self._levels["expected", entry.plugin] = entry
            case signals.NodeOffers():
                self._levels["offers", entry.node] = entry
            case signals.Restored(state=state):
                self._levels["state", recording.key_of(state)] = entry
            case _:
                pass
        if self._file is None:
            return
        try:
            for line in recording.encode(now, entry):
                self._size += self._file.write(line)
            if self._size > self._half:
                self._file.close()
                self._path.replace(f"{self._path}.1")
                self._open(now, begins=False)
        except OSError as error:
            self._end(error)

    def _flush(self) -> None:
        """Leave nothing to a process that may be killed."""
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        self._file = None
        logs.logger().error("recording_ended", file=str(self._path), error=str(error))

    def _open(self, now: float, *, begins: bool) -> None:
        self._file = self._path.open("ab", buffering=_BUFFER_BYTES)
        self._size = self._file.tell()
        header = recording.Header(
            at_zero=datetime.now(UTC) - timedelta(seconds=now),
            begins=begins,
            sees=not self._watched.is_disconnected,
            leads=self._watched.leader is not None,
            has_cluster=self._has_cluster,
            detection=self._settings.detection,
            bounds=self._settings.bounds,
        )
        for entry in (header, *self._levels.values()):
            for line in recording.encode(now, entry):
                self._size += self._file.write(line)
