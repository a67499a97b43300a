"""A simulated node for tests of the watch of plugins: the kubelet, plugins and the prober.

A probe's result arrives at once, or after a deadline if the plugin is silent.
"""

import collections
import math

from muster import vocabulary
from muster_plugin.config import watch as config_watch
from muster_plugin.watch import expectation, node_model, observation

Answer = observation.Answer
Finding = vocabulary.WatchedFinding
GPU = "nvidia.com/gpu"
GPU_SOCKET = "nvidia-gpu.sock"
DEADLINE_S = 4.0


class Node:
    """A node on which plugins serve sockets; `answers` are the sockets' answers to probes."""

    def __init__(
        self,
        *,
        expect: dict[str, int] | None = None,
        ignore: tuple[str, ...] = (),
        memory: expectation.Memory | None = None,
        is_process_watched: bool = True,
    ) -> None:
        self.now = 1000.0
        self.model = node_model.NodeModel(
            config_watch.Watch(enabled=True, expect=expect or {}, ignore=ignore),
            memory=memory or expectation.Memory(),
            timing=node_model.Timing(),
            now=self.now,
        )
        self.files: dict[str, str] = {}
        self.answers: dict[str, Answer] = {}
        self.processes: dict[str, str] = {}
        self.counts: dict[str, int] | None = {}
        self.kubelet_age_s: float | None = 1000.0
        self.is_answering = True
        self.changes: list[tuple[float, str, Finding, bool]] = []
        self.connections: dict[str, list[float]] = collections.defaultdict(list)
        self.connections_by_process: dict[str, list[float]] = collections.defaultdict(list)
        self._is_process_watched = is_process_watched
        self._serial = 0
        self._poll_at = self.now
        self._results: list[tuple[float, observation.Probed]] = []

    def serve(self, name: str, process: str = "") -> None:
        """Create a socket with a server that answers, and scan the sockets."""
        self.make(name, process)
        self.scan()

    def make(self, name: str, process: str = "") -> None:
        """Create a socket with a server that answers."""
        self._serial += 1
        self.files[name] = str(self._serial)
        self.answers[name] = Answer.ANSWERED
        self.processes[name] = process or f"process of {name} {self._serial}"

    def kill(self, name: str) -> None:
        self.answers[name] = Answer.REFUSED
        self.send(observation.ProcessEnded(f"device-plugins/{name}", self.processes[name]))

    def remove(self, name: str) -> None:
        del self.files[name]
        self.scan()

    def scan(self) -> None:
        files = tuple(
            observation.SocketFile(name=name, identity=identity, created_at=int(identity))
            for name, identity in self.files.items()
        )
        age_s = self.kubelet_age_s
        self.send(
            observation.Scanned(
                sockets=files,
                kubelet_age_s=age_s if age_s is None else max(0.0, age_s),
                kubelet_identity="" if age_s is None else f"{self.now - age_s:.3f}",
            )
        )

    def register(self, counts: dict[str, int]) -> None:
        """Report the number of devices of each resource in the kubelet's checkpoint."""
        self.send(observation.Registered(counts))

    def run(self, seconds: float) -> None:
        """Advance the time, and send the model its inputs as its driver does."""
        until = self.now + seconds
        while True:
            result_at = min((at for at, _ in self._results), default=math.inf)
            deadline = self.model.next_deadline()
            at = min(until, self._poll_at, result_at, math.inf if deadline is None else deadline)
            if at > self.now and self.kubelet_age_s is not None:
                self.kubelet_age_s += at - self.now
            self.now = max(self.now, at)
            if at == result_at:
                result = min(self._results, key=lambda each: each[0])
                self._results.remove(result)
                self.send(result[1])
            elif at == self._poll_at:
                self._poll_at += 3.0
                counts = self.counts if self.is_answering else None
                self.send(observation.Listed(counts=counts, is_answering=self.is_answering))
            elif deadline is not None and at == deadline and deadline <= until:
                self._act(self.model.tick(self.now))
                after = self.model.next_deadline()
                assert after is None or after > self.now
            else:
                return

    def findings(self) -> dict[str, Finding]:
        return {each.name: each.finding for each in self.model.watched}

    def send(self, observed: observation.Observation) -> None:
        self._act(self.model.receive(observed, self.now))

    def _act(self, actions: object) -> None:
        assert isinstance(actions, list)
        for action in actions:
            match action:
                case observation.Probe(file=file):
                    self._probe(file)
                case observation.Change(watched=watched, gone=gone):
                    self.changes.append((self.now, watched.name, watched.finding, gone))
                case _:
                    pass

    def _probe(self, file: observation.SocketFile) -> None:
        answer = self.answers[file.name]
        identity = self.processes[file.name]
        if answer is not Answer.REFUSED:
            self.connections[file.name].append(self.now)
            self.connections_by_process[identity].append(self.now)
        process = observation.Process(identity=identity, is_watched=self._is_process_watched)
        probed = observation.Probed(
            path=file.path,
            identity=file.identity,
            answer=answer,
            detail="" if answer in {Answer.ANSWERED, Answer.REFUSED} else "nobody answers",
            process=None if answer is Answer.REFUSED else process,
        )
        after_s = DEADLINE_S if answer is Answer.SILENT else 0.001
        self._results.append((self.now + after_s, probed))


def healthy(**more: object) -> Node:
    """Return a node whose only plugin has offered 8 GPUs for a minute."""
    node = Node(**more)  # type: ignore[arg-type]
    node.serve(GPU_SOCKET)
    node.counts = {GPU: 8}
    node.run(60)
    assert node.findings() == {GPU: Finding.NONE}
    return node


def delay_s(node: Node, finding: Finding) -> float:
    """Run for two minutes; return the delay of the first change with this finding."""
    began = node.now
    node.run(120)
    return next(at - began for at, _, each, _ in node.changes if each is finding and at >= began)
