"""How many heartbeats of each node nats-server may deliver, with a stand-in for the server."""

import random
import re

import pytest

from muster.nats import heartbeat_budget
from muster.nats.heartbeat_budget import HeartbeatBudget, Limits

LIMITS = Limits()


class Server:
    """A stand-in for nats-server; `enforces` is whether it limits subscriptions as requested."""

    def __init__(self, *, enforces: bool = True) -> None:
        self.left: dict[bytes, int] = {}
        self.subjects: dict[bytes, bytes] = {}
        self._sids: dict[bytes, list[bytes]] = {}
        self.delivered: list[heartbeat_budget.Message] = []
        self._enforces = enforces

    def receive(self, lines: bytes) -> None:
        for line in lines.split(b"\r\n")[:-1]:
            match line.split():
                case [b"SUB", subject, sid]:
                    self.subjects[sid] = subject
                    self._sids.setdefault(subject, []).append(sid)
                    self.left[sid] = 10**9
                case [b"UNSUB", sid, most]:
                    if self._enforces:
                        self.left[sid] = int(most)
                case [b"UNSUB", sid]:
                    self._end(sid)
                case _:
                    raise AssertionError(line)

    def publish(self, subject: bytes, payload: bytes = b"x") -> None:
        of_node = subject.rpartition(b".")[0] + b".*"
        for pattern in (of_node, b"muster.heartbeat.*.*"):
            for sid in list(self._sids.get(pattern, ())):
                self.delivered.append((subject, sid, payload))
                self.left[sid] -= 1
                if not self.left[sid]:
                    self._end(sid)

    def _end(self, sid: bytes) -> None:
        if sid in self.subjects:
            self._sids[self.subjects.pop(sid)].remove(sid)


class Reader:
    """A budget that is connected to the stand-in."""

    def __init__(self, *nodes: str, enforces: bool = True) -> None:
        self.now = 100.0
        self.server = Server(enforces=enforces)
        self.budget = HeartbeatBudget(LIMITS)
        self.nodes = set(nodes)
        self.budget.follow(self.nodes, self.now)
        self.server.receive(self.budget.connect(self.now))
        self.excesses: list[heartbeat_budget.Excess] = []

    def read(self) -> list[tuple[bytes, bytes]]:
        """Return the delivered messages that the budget admits, and renew it."""
        delivered, self.server.delivered = self.server.delivered, []
        kept, lines = self.budget.admit(delivered, self.now)
        lines += self.budget.follow(self.nodes, self.now)
        more, excesses = self.budget.renew(self.now)
        self.server.receive(lines + more)
        self.excesses += excesses
        return list(kept)


def subject(node: str, plugin: str = "p") -> bytes:
    return f"muster.heartbeat.{node.replace('.', '_')}.{plugin}".encode()


def test_what_nodes_send_within_their_budget_is_read_and_seldom_twice() -> None:
    reader = Reader(*(f"n{number}" for number in range(20)))
    sent, received = [], []
    for turn in range(600):
        for number in range(20):
            sent.append((subject(f"n{number}"), str(turn).encode()))
            reader.server.publish(*sent[-1])
        received += reader.read()
        reader.now += 0.2
    assert set(received) == set(sent)
    assert len(received) <= 1.1 * len(sent)
    assert reader.excesses == []


def test_the_former_subscription_of_a_node_ends_after_the_new_one_has_begun() -> None:
    reader = Reader("a")
    (former,) = (sid for sid, name in reader.server.subjects.items() if b".a." in name)
    reader.now += 10.0
    for _ in range(LIMITS.messages // 2):
        reader.server.publish(subject("a"))
    reader.read()
    of_node = [sid for sid, name in reader.server.subjects.items() if b".a." in name]
    assert former in of_node
    assert len(of_node) == 2
    reader.now += 0.2
    reader.read()
    assert former not in reader.server.subjects
    reader.server.publish(subject("a"), b"new")
    assert reader.read() == [(subject("a"), b"new")]


def test_what_a_node_sends_before_its_subscription_begins_is_read() -> None:
    reader = Reader()
    reader.nodes.add("a")
    subscribing = reader.budget.follow(reader.nodes, reader.now)
    reader.server.publish(subject("a"), b"before")
    reader.server.receive(subscribing)
    reader.server.publish(subject("a"), b"after")
    assert reader.read() == [(subject("a"), b"before"), (subject("a"), b"after")]


def test_of_a_flood_only_the_budget_is_delivered_and_of_the_others_everything() -> None:
    reader = Reader("noisy", "calm")
    most, calm = [], []
    for turn in range(10):
        for _ in range(5_000):
            reader.server.publish(subject("noisy"), b"x" * 1_000)
        reader.server.publish(subject("calm"), str(turn).encode())
        most.append(len(reader.server.delivered))
        calm += [payload for name, payload in reader.read() if name == subject("calm")]
        reader.now += 1.0
    assert calm == [str(turn).encode() for turn in range(10)]
    assert most[0] <= LIMITS.messages + LIMITS.unknown_messages + 2
    assert most[-1] <= LIMITS.noisy_messages + LIMITS.unknown_messages + 2
    assert {excess.node for excess in reader.excesses} == {"noisy"}
    assert reader.excesses[0] == heartbeat_budget.Excess(
        node="noisy", messages=48, bytes=48_000, seconds=1.0, senders=("p",)
    )


def test_of_a_noisy_node_the_newest_heartbeat_of_each_plugin_is_read() -> None:
    reader = Reader("noisy")
    for turn in range(5):
        for number in range(100):
            reader.server.publish(subject("noisy", f"p{number % 2}"), b"%d %d" % (turn, number))
        read = reader.read()
        reader.now += 1.0
    assert sorted(read) == [(subject("noisy", "p0"), b"4 6"), (subject("noisy", "p1"), b"4 7")]


def test_when_the_flood_is_over_the_node_is_read_as_before() -> None:
    reader = Reader("a")
    for _ in range(5):
        for _ in range(1_000):
            reader.server.publish(subject("a"))
        reader.read()
        reader.now += 1.0
    reports = len(reader.excesses)
    assert reports > 0
    received = set()
    for number in range(60):
        reader.server.publish(subject("a"), b"%d" % number)
        received |= {payload for _, payload in reader.read()}
        reader.now += 1.0
    assert (len(received), len(reader.excesses)) == (60, reports)


def test_a_server_that_does_not_count_is_told_to_end_the_subscription() -> None:
    reader = Reader("noisy", enforces=False)
    for _ in range(500):
        reader.server.publish(subject("noisy"))
    read = [reader.read() for _ in range(3)]
    assert [len(batch) for batch in read] == [LIMITS.messages, 0, 0]
    assert b"muster.heartbeat.noisy.*" not in reader.server.subjects.values()


def test_a_discovered_node_gets_its_subscription_without_a_comparison_of_all() -> None:
    reader = Reader("a")
    reader.server.publish(subject("b"))
    reader.read()
    lines = reader.budget.follow_discovered({"b", "c"}, reader.now)
    assert re.findall(rb"SUB (muster\S+)", lines) == [b"muster.heartbeat.b.*"]
    assert reader.budget.follow_discovered({"b", "c"}, reader.now) == b""
    lines = reader.budget.follow({"b", "c"}, reader.now)
    assert re.findall(rb"SUB (muster\S+)", lines) == [b"muster.heartbeat.c.*"]


def test_thousands_of_unknown_nodes_are_discovered_within_two_of_their_intervals() -> None:
    reader = Reader()
    names = [f"n{number}" for number in range(5_000)]
    for _ in range(2):
        for at in range(0, len(names), 40):
            for name in names[at : at + 40]:
                reader.server.publish(subject(name))
            for heard, _ in reader.read():
                reader.nodes.add(heard.split(b".")[2].decode())
            reader.now += 0.01
    assert len(reader.nodes) == 5_000


def test_an_unknown_node_is_discovered_in_a_busy_fleet() -> None:
    reader = Reader(*(f"n{number}" for number in range(1_000)))
    found_after = None
    for turn in range(2_000):
        for number in range(10):
            reader.server.publish(subject(f"n{(turn * 10 + number) % 1_000}"))
        if turn % 250 == 100:
            reader.server.publish(subject("new"))
        if any(name == subject("new") for name, _ in reader.read()):
            found_after = turn
            break
        reader.now += 0.02
    assert found_after is not None


@pytest.mark.parametrize("phase", [0.1, 1.3, 2.5, 3.7, 4.9])
def test_an_unknown_node_is_discovered_whenever_it_sends_its_heartbeats(phase: float) -> None:
    names = [f"n{number}" for number in range(10_000)]
    reader = Reader(*names)
    # each node sends a heartbeat every 5 s, always at the same time
    sends = sorted([(number / 2_000, name) for number, name in enumerate(names)] + [(phase, "new")])
    reads = random.Random(1)  # noqa: S311  # not a secret
    began, read_at = reader.now, 0.0
    for at, name in ((cycle * 5.0 + at, name) for cycle in range(24) for at, name in sends):
        while read_at < at:
            reader.now = began + read_at
            if any(heard == subject("new") for heard, _ in reader.read()):
                return
            read_at += 0.25 * reads.uniform(0.9, 1.0)
        # the first heartbeats end the discovery of new nodes
        if name != "new" or at > 20.0:
            reader.server.publish(subject(name))
    pytest.fail("not discovered within 2 minutes")


def test_a_burst_after_a_quiet_time_is_far_below_what_the_server_keeps() -> None:
    names = [f"n{number}" for number in range(20_000)]
    reader = Reader(*names)
    delivered = []
    for turn in range(400):
        if turn in {100, 200, 201, 202, 300, 305, 310}:
            for _ in range(3_000):
                reader.server.publish(subject("n0"), b"x" * LIMITS.message_bytes)
        for name in names[turn % 100 :: 100]:
            reader.server.publish(subject(name), b"x" * 500)
        if turn % 5 == 4:
            delivered.append(sum(len(payload) for _, _, payload in reader.server.delivered))
            reader.read()
        reader.now += 0.05
    # max_pending of nats-server is 16 MB in muster's manifests
    assert max(delivered) < 12_000_000


@pytest.mark.parametrize("size", [1, 900_000])
def test_an_unknown_node_that_floods_is_named_and_known_ones_are_read(size: int) -> None:
    reader = Reader("calm")
    calm = 0
    for _ in range(10):
        for _ in range(1_000):
            reader.server.publish(subject("alien.a"), b"x" * size)
        reader.server.publish(subject("calm"))
        calm += sum(name == subject("calm") for name, _ in reader.read())
        reader.now += 1.0
    assert calm == 10
    assert {excess.node for excess in reader.excesses} == {"alien.a"}


def test_large_messages_are_delivered_in_small_numbers() -> None:
    reader = Reader("a")
    delivered = []
    for _ in range(4):
        for _ in range(1_000):
            reader.server.publish(subject("a"), b"x" * 100_000)
        delivered.append(len(reader.server.delivered))
        reader.read()
        reader.now += 1.0
    assert delivered[2:] == [2 * LIMITS.noisy_messages] * 2


@pytest.mark.parametrize("node", ["", "A", "a..", "a b", "a>"])
def test_a_name_that_is_no_node_gets_no_subscription(node: str) -> None:
    assert HeartbeatBudget(LIMITS).follow({node}, 0.0) == b""


def test_the_subscriptions_of_a_node_that_left_end() -> None:
    reader = Reader("a", "b")
    reader.nodes.discard("a")
    reader.read()
    reader.server.publish(subject("a"))
    reader.server.publish(subject("b"))
    assert sorted(name for name, _ in reader.read()) == [subject("a"), subject("b")]
    # the message of a was delivered by the discovery subscription only
    assert len(reader.server.subjects) == 2
