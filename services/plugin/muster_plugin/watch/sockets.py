"""Pure: tracks which process serves each socket, and when to probe it next.

Each probe costs the plugin a connection, so a process receives at most four within a minute. A
refused connection reaches no process and does not count. If the kernel cannot report the end of a
process (`Process.is_watched`), one connection a minute is reserved for a probe when the kubelet
drops the plugin. A plugin that ends after connections is probed less often (`backoff`).
"""

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from muster_plugin.watch import backoff, finding, observation

SOCKETS_MAX: Final = 256
AT_ONCE_MAX: Final = 32
PERIOD_S: Final = 15.2
"""The time between two probes.

A plugin that stops answering is detected within 20 s: this period, and a probe's timeout.
"""
_UNWATCHED_PERIOD_S: Final = 20.0
_WINDOW_S: Final = 60.0
CONNECTIONS_MAX: Final = 4
_BOUND_S: Final = 0.1
"""Delay of the first probe: a socket exists before its server listens."""
_BIND_S: Final = 1.0
"""How long a starting plugin may take to listen; it may create its socket's file twice."""
_DROPPED_S: Final = 5.0
"""The longest delay before the kubelet's list shows the end of a process."""
_REFUSED_S: Final = (0.5, 0.5, 1.0, 1.0, 5.0)
"""Delay of the next probe after the first, second, ... refusal in a row."""
_LOST_S: Final = 30.0
"""A probe without a result after this time is repeated."""

_Answer = observation.Answer
_Server = finding.Server


class Socket:
    """The socket at one path: its file, and the last known state of its server."""

    def __init__(self, file: observation.SocketFile, now: float) -> None:
        self.file = file
        self.answer: _Answer | None = None
        """The last conclusive answer on this file; None before the first."""
        self.detail = ""
        self.driver: observation.Driver | None = None
        self.has_answered = False
        """Whether this path has ever answered, even before its file was replaced."""
        self.is_removed = False
        self.changed_at = now
        """When the file appeared or disappeared, or its server started or ended."""
        self.process: observation.Process | None = None
        self.has_ended = False
        self.halted = ""
        self.rival: observation.Process | None = None
        """The process that served the path before and still runs."""
        self.servers = 0
        """How many processes have served this path."""
        self._ended, self._ended_at = "", -math.inf
        """The identity of the last process that ended, and when it ended."""
        self._backoff = backoff.ProbeBackoff()
        self._refusals = 0
        self._asked_at: float | None = None
        self._due_at: float = now + _BOUND_S
        self._connected: collections.deque[float] = collections.deque(maxlen=CONNECTIONS_MAX)

    def server(self, listed: int | None) -> tuple[_Server, str]:
        """Return the state of the server, and its problem as text.

        An unknown process behind a removed socket counts as ended if no device is `listed`.
        """
        name = self.file.name
        if self.is_removed:
            if self.has_ended or (self.process is None and listed == 0):
                return _Server.ENDED, f"its process has ended, and its socket {name} is gone"
            text = f"its socket {name} was removed, so the kubelet cannot connect to it again"
            return _Server.REMOVED, text
        if self.halted:
            return _Server.HALTED, f"its process is {self.halted}"
        if self.answer is None and self._backoff.pause_s and listed != 0:
            # the agent makes no connections for now, but the kubelet still has its own
            return _Server.ANSWERS, ""
        return self._server_by_answer(name)

    @property
    def state(self) -> tuple[object, ...]:
        """The values that determine the finding about the plugin."""
        outcome = self.file.identity, self.answer, self.detail, self.driver, self.is_removed
        return *outcome, self.process, self.has_ended, self.halted, self.rival

    @property
    def is_usable(self) -> bool:
        """Whether the file exists, and its server answered the last conclusive probe."""
        return not self.is_removed and self.answer is _Answer.ANSWERED

    def replace_file(self, file: observation.SocketFile, now: float) -> None:
        """Record the current file; if it is new, its server is new too."""
        if file.identity == self.file.identity and not self.is_removed:
            return
        if self.process is not None and self.process.is_watched and not self.has_ended:
            self.rival = self.process
        if self.process is None and now - self.changed_at >= _BIND_S:
            # its process ended although nothing had connected
            self._backoff.ended(now)
        self.file = file
        self.is_removed = self.has_ended = False
        self.answer, self.process, self.halted, self.changed_at = None, None, "", now
        self._ended, self._refusals, self._asked_at = "", 0, None
        self._due_at = now + max(_BOUND_S, self._backoff.pause_s)

    def remove_file(self, now: float) -> None:
        """Record that the file is gone."""
        if not self.is_removed:
            self.is_removed, self.changed_at = True, now

    def record(self, probed: observation.Probed, now: float) -> None:
        """Record the result of a probe."""
        if probed.identity != self.file.identity:
            return
        asked_at, self._asked_at = self._asked_at, None
        if probed.answer is _Answer.REFUSED and probed.process is None:
            self._due_at = now + _REFUSED_S[min(self._refusals, len(_REFUSED_S) - 1)]
            self._refusals += 1
            if self.process is None and now - self.changed_at >= _BIND_S:
                self._backoff.ended(now)
        else:
            self._refusals = 0
            # a call that timed out connected seconds ago
            began_at = now if asked_at is None else asked_at
            is_over = self._is_over(probed.process, asked_at)
            if probed.process is not None:
                self._connected.append(began_at)
            if probed.process is not None and not is_over:
                self._backoff.connected(now)
            self._due_at = now if is_over else began_at + self._period_s(probed)
        if probed.answer is _Answer.INCONCLUSIVE:
            return
        if (probed.answer is _Answer.REFUSED) != (self.answer is _Answer.REFUSED):
            self.changed_at = now
        self.answer, self.detail = probed.answer, probed.detail
        self.driver = probed.driver or self.driver
        self.has_answered |= probed.answer is _Answer.ANSWERED
        self._record_process(probed.process, asked_at)

    def record_end(self, identity: str, now: float) -> None:
        """Record the end of a process; if it served the socket, schedule a probe.

        Another process may serve the socket now.
        """
        if self.rival is not None and self.rival.identity == identity:
            self.rival = None
        is_served = self.process is not None and self.process.identity == identity
        is_first_probed = self.process is None and self.is_being_probed
        if self._ended != identity and (is_served or is_first_probed):
            if self.is_being_probed:
                self._backoff.connected(now)
            self._backoff.ended(now)
            self._ended, self._ended_at = identity, now
            self.has_ended, self.halted, self.changed_at = True, "", now
            self._due_at = now
            # the next connection is refused, or is the first to a new process
            self._connected.clear()

    @property
    def is_leftover(self) -> bool:
        """Whether the socket refuses connections repeatedly and has never answered."""
        return self.is_dead and not self.has_answered

    @property
    def is_dead(self) -> bool:
        """Whether connections were refused repeatedly: no server can return to this file."""
        return self.answer is _Answer.REFUSED and self._refusals > 1

    @property
    def is_being_probed(self) -> bool:
        """Whether a probe has no result yet."""
        return self._asked_at is not None and not self.is_removed

    def is_due(self, now: float) -> bool:
        """Return whether a probe is due now."""
        return not self.is_removed and now >= self._next_at()

    def next_deadline(self) -> float | None:
        """Return when the next probe is due; None if none is."""
        return None if self.is_removed else self._next_at()

    def drop_lost_probe(self, now: float) -> None:
        """Plan another probe if the result of the last one is so late that it counts as lost."""
        if self._asked_at is not None and now >= self._asked_at + _LOST_S:
            self._asked_at, self._due_at = None, now

    def start_probe(self, now: float) -> observation.Probe:
        """Return a probe to make; the next one is due after its result."""
        self._asked_at = now
        return observation.Probe(self.file)

    def hurry(self, now: float) -> None:
        """Schedule a probe now if only a probe can detect the end of the process.

        A plugin in back-off whose process has just changed is not probed early.
        """
        if self._backoff.pause_s and now - self.changed_at < _DROPPED_S:
            # the kubelet may have dropped the former process
            return
        if self.process is None or not self.process.is_watched:
            self._due_at = min(self._due_at, now)

    def _server_by_answer(self, name: str) -> tuple[_Server, str]:
        match self.answer:
            case _Answer.REFUSED:
                text = self.detail or f"connections to {name} are refused"
                return _Server.ENDED, f"{text}{self._backoff.text}"
            case _Answer.MISSING:
                return _Server.REMOVED, self.detail
            case _Answer.SILENT:
                return _Server.SILENT, f"{name} does not answer: {self.detail}"
            case _Answer.WRONG:
                return _Server.WRONG, f"{name} does not answer like a device plugin: {self.detail}"
            case _Answer.ANSWERED:
                return _Server.ANSWERS, ""
            case _:
                return _Server.UNKNOWN, ""

    def _next_at(self) -> float:
        if self._asked_at is not None:
            return self._asked_at + _LOST_S
        if len(self._connected) < CONNECTIONS_MAX:
            return self._due_at
        return max(self._due_at, self._connected[0] + _WINDOW_S)

    def _period_s(self, probed: observation.Probed) -> float:
        process = probed.process or self.process
        is_watched = process is not None and process.is_watched
        return max(self._backoff.pause_s, PERIOD_S if is_watched else _UNWATCHED_PERIOD_S)

    def _is_over(self, process: observation.Process | None, asked_at: float | None) -> bool:
        """Return whether the end of a process was reported before the result of its probe."""
        is_ended = (
            process is not None and bool(process.identity) and process.identity == self._ended
        )
        return is_ended and asked_at is not None and asked_at <= self._ended_at

    def _record_process(self, process: observation.Process | None, asked_at: float | None) -> None:
        if process is None:
            return
        before = self.process
        if before is None or before.identity != process.identity:
            self.servers += 1
            self.halted = ""
        self.process, self.has_ended = process, self._is_over(process, asked_at)
        if self.rival is not None and self.rival.identity == process.identity:
            self.rival = None


def best(group: Sequence[Socket]) -> Socket | None:
    """Return the preferred socket (served sockets first, then the newest); None without sockets."""

    def rank(socket: Socket) -> tuple[int, int]:
        answer = socket.answer
        if socket.is_removed:
            served = 0
        elif answer is _Answer.ANSWERED:
            served = 4
        elif answer in {_Answer.SILENT, _Answer.WRONG}:
            served = 3
        else:
            served = 1 if answer in {_Answer.REFUSED, _Answer.MISSING} else 2
        return served, socket.file.created_at

    return max(group, key=rank, default=None)


def rival(group: Sequence[Socket]) -> str:
    """Describe two processes that serve the same resource; empty if there is at most one."""
    for socket in group:
        if socket.is_usable and socket.rival is not None:
            pid = socket.rival.pid
            former = "the previous process" if pid is None else f"process {pid}"
            return f"another process took over {socket.file.name}, but {former} still runs"
    served = sorted(
        (socket.process.identity, socket.file.name)
        for socket in group
        if socket.is_usable and socket.process is not None and socket.process.identity
    )
    if len({identity for identity, _ in served}) > 1:
        return f"two processes serve it, on {served[0][1]} and on {served[-1][1]}"
    return ""


class Sockets:
    """The sockets in the kubelet's directories, by path."""

    def __init__(self) -> None:
        self._by_path: dict[str, Socket] = {}
        self._waiting: dict[str, observation.SocketFile] = {}
        """The socket files that wait because SOCKETS_MAX sockets are already watched."""
        self._dead: set[tuple[str, str]] = set()
        """The path and identity of the files that refuse connections and are no longer watched."""
        self.has_changed = False
        """Whether the state of any socket has changed; the caller resets it."""

    def __iter__(self) -> Iterator[Socket]:
        return iter(self._by_path.values())

    def record_scan(self, files: tuple[observation.SocketFile, ...], now: float) -> None:
        """Record which socket files exist now."""
        present = {file.path: file for file in files}
        for path, socket in [*self._by_path.items()]:
            if path in present or socket.is_removed:
                continue
            self.has_changed = True
            if socket.has_answered:
                socket.remove_file(now)
            else:
                del self._by_path[path]
        for path, file in present.items():
            if path in self._by_path:
                with self._observed(path) as socket:
                    socket.replace_file(file, now)
        self._dead &= {(file.path, file.identity) for file in files}
        self._waiting = {
            path: file
            for path, file in present.items()
            if path not in self._by_path and (path, file.identity) not in self._dead
        }
        self._admit(now)

    @property
    def left_out(self) -> int:
        """How many sockets are not watched, because there are too many."""
        return len(self._waiting)

    def record_probe(self, probed: observation.Probed, now: float) -> None:
        """Record the result of a probe."""
        if probed.path in self._by_path:
            with self._observed(probed.path) as socket:
                socket.record(probed, now)
            if self._waiting and socket.is_leftover:
                self.stop_watching(probed.path, now)

    def record_end(self, ended: observation.ProcessEnded, now: float) -> None:
        """Record that a process has ended."""
        if ended.path in self._by_path:
            with self._observed(ended.path) as socket:
                socket.record_end(ended.identity, now)

    def record_halted(self, halted: Mapping[str, str]) -> None:
        """Record which sockets belong to processes that cannot run, and why."""
        for path in self._by_path:
            with self._observed(path) as socket:
                socket.halted = halted.get(path, "")

    def forget(self, path: str) -> None:
        """Remove the state of a socket whose file is gone."""
        self._by_path.pop(path, None)

    def stop_watching(self, path: str, now: float) -> None:
        """Stop watching a socket that refuses connections; a waiting socket takes its place."""
        self._dead.add((path, self._by_path.pop(path).file.identity))
        self._admit(now)

    def due(self, now: float) -> list[observation.Probe]:
        """Return the probes to start now; at most AT_ONCE_MAX probes run at the same time."""
        for socket in self:
            # a lost probe that counted as running would block all others
            socket.drop_lost_probe(now)
        free = AT_ONCE_MAX - sum(socket.is_being_probed for socket in self)
        # the most overdue sockets come first, so that those which never answer hardly delay others
        due = sorted(
            (socket for socket in self if socket.is_due(now)),
            key=lambda socket: socket.next_deadline() or now,
        )
        return [socket.start_probe(now) for socket in due[: max(0, free)]]

    def next_deadline(self) -> float | None:
        """Return when the next probe is due; None if none is."""
        probed = [socket for socket in self if socket.is_being_probed]
        if len(probed) >= AT_ONCE_MAX:
            return min(socket.next_deadline() or math.inf for socket in probed)
        deadlines = (socket.next_deadline() for socket in self)
        return min((at for at in deadlines if at is not None), default=None)

    def _admit(self, now: float) -> None:
        """Start watching the files that wait, up to SOCKETS_MAX."""
        while self._waiting and len(self._by_path) < SOCKETS_MAX:
            path = next(iter(self._waiting))
            self._by_path[path] = Socket(self._waiting.pop(path), now)
            self.has_changed = True

    @contextlib.contextmanager
    def _observed(self, path: str) -> Iterator[Socket]:
        """Yield a socket, then record whether its state has changed."""
        socket = self._by_path[path]
        before = socket.state
        yield socket
        self.has_changed |= socket.state != before
