"""Fuzz targets for stored data: state, silences, the outbox, the ledger, locks, recordings."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from muster import matching, vocabulary
from muster.nats import leader_lock
from muster_health.fleet import detector
from muster_health.model import config, signals, snapshot
from muster_health.replay import player, recording
from muster_labeler.kubernetes import projection
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import chat, kubernetes_api, message, pagerduty, webhook
from muster_notifier.receivers import email as mail
from muster_notifier.routing import notifications
from tests.fuzz.target import compact, recorded, target

_ZERO: Final = datetime(2026, 1, 2, tzinfo=UTC)
_REPLAYED_S: Final = 1e6
_FORMATS: Final = tuple(receiver_settings.Format)


def _states() -> Iterator[bytes]:
    return (payload for _, payload in recorded("muster_state"))


def _many_faults(count: int) -> bytes:
    fault = snapshot.KnownFault(vocabulary.AlertKind.DEGRADED, "a.com/x", "why", ("d0",))
    return snapshot.encode(
        snapshot.Snapshot(
            node="a", plugin="p", state=snapshot.State.HEALTHY, interval_s=5.0, bad=(fault,) * count
        )
    )


@target(
    seeds=_states,
    words=tuple(f'"{name}":' for name in snapshot.Snapshot.__struct_fields__),
    long=_many_faults,
)
def states(data: bytes) -> None:
    """Check that saved state is refused, or survives a round trip and restores a detector."""
    try:
        stored = snapshot.decode(data)
    except ValueError:
        return
    if len(data) < 100_000:
        assert snapshot.decode(snapshot.encode(stored)) == stored
    watched = detector.Detector(
        config.Detection(), runbook_url="", at_zero=_ZERO, bounds=config.Bounds(), has_cluster=False
    )
    watched.receive(signals.Restored(state=stored), 0.0)
    watched.receive(signals.BusBack(at=_ZERO), 1.0)
    watched.receive(signals.Leadership(revision=1), 2.0)
    watched.tick(100.0)
    for plugin in watched.plugins():
        msgspec.json.encode(plugin.shown(100.0))


def _silences() -> Iterator[bytes]:
    yield from (payload for _, payload in recorded("muster_silences"))
    silence = matching.Silence(
        id="a-1",
        matchers=('node=~"gpu-.*"', '{kind!="stuck", plugin!~"a|b"}'),
        starts_at=_ZERO,
        ends_at=_ZERO + timedelta(hours=1),
        author="ops",
        comment="driver upgrade",
    )
    yield matching.encode_silence(silence)


@target(seeds=_silences, words=('"matchers":', "=~", "!~", '\\"', "(?i)", "[[:alpha:]]", "{1000}"))
def silences(data: bytes) -> None:
    """Check that a silence is refused, or survives a round trip and can be evaluated."""
    try:
        silence = matching.decode_silence(data)
    except matching.MalformedSilence:
        return
    assert matching.decode_silence(matching.encode_silence(silence)) == silence
    silence.is_active(_ZERO)
    silence.expired(_ZERO)


@target(
    seeds=lambda: iter(
        (b'severity="critical"', b'{node=~"gpu-.*",kind!~stuck|lost}', b'a="\\"\\n"')
    ),
    words=("=~", "!~", "!=", '\\"', "{", "}", ","),
    long=lambda size: b"{" + b'node="gpu",' * size + b"}",
)
def matchers(data: bytes) -> None:
    """Check that matchers are refused, or survive a round trip and can be evaluated."""
    try:
        parsed = matching.parse(data.decode("utf-8", "surrogateescape"))
    except ValueError:
        return
    assert matching.parse(",".join(map(str, parsed))) == parsed
    matching.all_hold(parsed, {"node": "gpu-1", "kind": "stuck"})
    for matcher in parsed:
        matching.doubt(matcher)


def _outbox() -> Iterator[bytes]:
    return (payload for _, payload in recorded("outbox"))


@target(
    seeds=_outbox,
    words=(
        *(f'"{name}":' for name in notifications.Notification.__struct_fields__),
        *(f'"{name}":' for name in vocabulary.AlertChanged.__struct_fields__),
        *("<!channel>", "```", "\\x1b[31m", "\\x0d\\x0aBcc: ", "\\xe2\\x80\\xae"),
    ),
)
def outbox(data: bytes) -> None:
    """Check that a notification is refused, or encoded within the limits of each receiver."""
    try:
        note = notifications.decode(data)
    except notifications.Malformed:
        return
    # encoded the first time, it may be shortened
    shortened = notifications.decode(notifications.encode(note))
    assert notifications.decode(notifications.encode(shortened)) == shortened
    text = message.PLAIN.compose(note)
    for format_ in _FORMATS:
        body = webhook.encode_body(note, text, format_=format_)
        assert len(body) <= webhook.BODY_BYTES_MAX
    assert len(chat.teams_card(note, text)) <= chat.TEAMS_BYTES_MAX
    slack = msgspec.json.decode(chat.encode_slack(note, text))
    assert "<!" not in slack["text"]
    msgspec.json.decode(pagerduty.encode(note, text, routing_key="k"))
    msgspec.json.decode(webhook.encode_alerts(note, lifetime=timedelta(hours=1)))
    sent = mail.encode_mail(note, text, sender="a@example.com", to=("b@example.com",))
    head = sent.partition(b"\r\n\r\n")[0]
    assert head.count(b"\r\nTo: ") == 1
    assert b"\nBcc:" not in head
    list(kubernetes_api.events(note, receiver_settings.KubernetesEvents()))


@target(
    seeds=lambda: (payload for _, payload in recorded("muster_ledger")),
    words=tuple(f'"{name}":' for name in notifications.LedgerEntry.__struct_fields__),
)
def ledger(data: bytes) -> None:
    """Check that an entry of the ledger is refused, or survives a round trip."""
    try:
        entry = notifications.decode_entry(data)
    except notifications.Malformed:
        return
    assert notifications.decode_entry(notifications.encode_entry(entry)) == entry


def _holders() -> Iterator[bytes]:
    yield msgspec.json.encode(leader_lock.this_process("muster-health"))
    yield b'{"name":"h","host":"x","space":"b pid:[4026531836]","pid":-1}'


@target(seeds=_holders)
def locks(data: bytes) -> None:
    """Check that a claim to a lock names a process or none, and that `is_gone` never fails."""
    holder = leader_lock.decode_holder(data)
    if holder is not None:
        str(holder)
        holder.is_gone()


def _inventories() -> Iterator[bytes]:
    yield b'{"products":[],"nodes":{},"simulated":[]}'
    yield compact(
        {
            "products": [{"name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559}],
            "nodes": {"node-a": {"0": 8}},
            "simulated": ["node-a"],
        }
    )


@target(
    seeds=_inventories,
    words=('"products":', '"nodes":', '"simulated":', '"name":', '"memory_mib":'),
    long=lambda size: compact(
        {"products": [{"name": "H100"}], "nodes": {f"n{n}": {"0": 8} for n in range(size)}}
    ),
)
def labeler_inventory(data: bytes) -> None:
    """Check that the labeler's ConfigMap is refused, or that a round trip adds nothing to it."""
    try:
        nodes, simulated = projection.decode_inventory(data.decode("utf-8", "replace"))
    except projection.UnreadableInventory:
        return
    again, simulated_again = projection.decode_inventory(
        projection.encode_inventory(nodes, simulated)
    )
    assert again.items() <= nodes.items()
    assert simulated_again <= simulated


def _recordings() -> Iterator[bytes]:
    header = recording.Header(
        at_zero=_ZERO,
        sees=True,
        has_cluster=False,
        detection=config.Detection(),
        bounds=config.Bounds(),
    )
    beats = [
        vocabulary.Heartbeat(node="a", plugin="p", instance="i", seq=seq, interval_s=1.0)
        for seq in range(3)
    ]
    stopping = vocabulary.PluginStopping(
        node="a", at=_ZERO, plugin="p", reason=vocabulary.StopReason.UPGRADE
    )
    entries: list[recording.Entry] = [
        header,
        signals.BusBack(at=_ZERO),
        *(signals.HeartbeatArrived(heartbeat=beat) for beat in beats),
        signals.FromPlugin(event=stopping, instance="i", sequence=1, position=1),
        signals.Disconnected(node="a", plugin="p", server="N", client=7, reason="x"),
        signals.ClockStalled(seconds=2.0),
        signals.Probe(node="a", plugin="p", number=1, timeout_s=1.0),
        signals.ProbeFailed(node="a", plugin="p", number=1, subscribed=True),
        signals.Leadership(revision=2),
    ]
    lines = [line for at, entry in enumerate(entries) for line in recording.encode(at, entry)]
    yield b"".join(lines)
    yield from (lines[0] + line for line in lines[1:])


@target(seeds=_recordings, words=('"Header"', '"Beat"', '"FromPlugin"', '"Restored"', '"begins":'))
def recordings(data: bytes) -> None:
    """Check that a recording is refused, or survives a round trip and can be replayed."""
    entries: list[tuple[float, recording.Entry]] = []
    for line in data.splitlines()[:50]:
        with contextlib.suppress(recording.UnreadableRecording):
            entries.append(recording.decode(line))
    for at, entry in entries:
        for line in recording.encode(at, entry):
            assert recording.decode(line) == (round(at, 6), entry)
    with contextlib.suppress(recording.UnreadableRecording):
        read = recording.read(entries)
        if read.entries[-1][0] - read.entries[0][0] > _REPLAYED_S:
            # a replay processes every deadline, which takes too long for decades
            return
        player.compare(read, config.Settings(), read.begin)
