"""Adapter: records a detector's inputs, queries and alerts in two limited files, and reads them.

When the newer file is full, it becomes the older one, `FILE.1`. If a file cannot be written, that
is logged once and recording ends, while the detector continues.
"""

from collections.abc import Iterator, Sequence
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
    """Records what a detector receives and returns, as a `muster.machine.Machine` around it.

    The recording must be ended with `close`.
    """

    def __init__(
        self, recorded: detector.Detector, settings: config.Settings, *, has_cluster: bool
    ) -> None:
        self._recorded = recorded
        self._settings = settings
        self._has_cluster = has_cluster
        self._path = Path(settings.recording.file)
        self._half_bytes = settings.recording.mib_max * 1024 * 1024 // 2
        self._file: BinaryIO | None = None
        self._size_bytes = 0
        self._levels: dict[tuple[str, str], signals.Input] = {}
        """Saved state, and the newest inputs of kinds that are sent only on change.

        Each new file repeats both.
        """

    def receive(self, event: signals.Input, now: float) -> Sequence[signals.Output]:
        """Record an input and pass it to the detector."""
        self._write(event, now)
        outputs = self._recorded.receive(event, now)
        self._write_outputs(outputs, now)
        return outputs

    def tick(self, now: float) -> Sequence[signals.Output]:
        """Let the detector perform all actions whose deadline has passed."""
        outputs = self._recorded.tick(now)
        self._write_outputs(outputs, now)
        return outputs

    def next_deadline(self) -> float | None:
        """Return the time at which `tick` must be called next."""
        return self._recorded.next_deadline()

    def begin(self, now: float) -> None:
        """Open the file and continue after the entries of a previous process. Raises OSError."""
        self._open(now, begins=True)

    def close(self) -> None:
        """Write buffered entries and close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_outputs(self, outputs: Sequence[signals.Output], now: float) -> None:
        """Write alerts and queries to the file before they are executed."""
        for output in outputs:
            match output:
                case signals.Probe() | signals.AskCluster():
                    self._write(output, now)
                case signals.Store(key=key, value=b""):
                    self._levels.pop(("state", key), None)
                case signals.Store(key=key, value=value):
                    state = snapshot.decode(value)
                    self._levels["state", key] = signals.Restored(state=state)
                case signals.Publish(event=vocabulary.AlertChanged() as alert):
                    self._write(recording.PublishedAlert(alert=alert), now)
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
                self._size_bytes += self._file.write(line)
            if self._size_bytes > self._half_bytes:
                self._file.close()
                self._path.replace(f"{self._path}.1")
                self._open(now, begins=False)
        except OSError as error:
            self._end(error)

    def _flush(self) -> None:
        """Flush the buffer, because the process may be killed at any time."""
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
        self._size_bytes = self._file.tell()
        header = recording.Header(
            at_zero=datetime.now(UTC) - timedelta(seconds=now),
            begins=begins,
            sees=not self._recorded.is_disconnected,
            leads=self._recorded.leader is not None,
            has_cluster=self._has_cluster,
            detection=self._settings.detection,
            bounds=self._settings.bounds,
        )
        for entry in (header, *self._levels.values()):
            for line in recording.encode(now, entry):
                self._size_bytes += self._file.write(line)


def read(path: Path) -> recording.Recording:
    """Return the recording in a file and its predecessor. Raises UnreadableRecording."""
    older = Path(f"{path}.1")
    files = (older, path) if older.exists() else (path,)
    entries = [entry for file in files for entry in _entries(file)]
    try:
        return recording.read(entries)
    except recording.UnreadableRecording as error:
        raise recording.UnreadableRecording(f"{path}: {error}") from None


def _entries(path: Path) -> Iterator[tuple[float, recording.Entry]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    # health crashed, or is writing at this moment
                    return
                try:
                    yield recording.decode(line)
                except recording.UnreadableRecording as error:
                    text = f"{path}, line {number}: {error}"
                    raise recording.UnreadableRecording(text) from None
    except OSError as error:
        raise recording.UnreadableRecording(f"{path}: {error.strerror}") from None
