"""A fleet with a value in every field, and with given words in every text that others choose.

By default the words are injection attacks on the programs that show them.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from muster import matching, vocabulary
from muster.nats import bus, storage, streams
from tests.worlds import console_fleet

ATTACKS: Final = (
    "<img src=x onerror=document.title='taken'>",
    "</script></title></svg><script>document.title='taken'</script>",
    "\"'><a autofocus onfocus=document.title='taken' href=//evil.example/>",
    "javascript:document.title='taken'",
    "//evil.example/x?y=z#top",
    "../../alerts?q=<b>&amp;%2e%2e/",
    "{{7*7}}${7*7}{% print(7*7) %}<%= 7*7 %>",
    "\x1b[31m\x1b]8;;https://evil.example\x07\x9b2J\x00",
    "\u202egpj.exe\u2066\u200b\u2028",
    "a\r\nX-Taken: 1\n\nevent: restart\ndata: {}\n\n",
    "w" * 253,
)
NODE: Final = "gpu-a100-001"
"""A node whose name is no attack; all other texts about it are attacks."""


def health(words: tuple[str, ...] = ATTACKS) -> console_fleet.Health:
    """Return a stand-in for health: the words are names of nodes, and all texts about `NODE`."""
    every = " ".join(words)
    alert = console_fleet.alert(
        NODE,
        number=1,
        kind=every,
        summary=every,
        advice=every,
        resource=every,
        devices=words,
        pods=words,
        runbook="javascript:document.title='taken'",
        evidence=[{"source": word, "observed": word} for word in words],
        watched=every,
    )
    plugin = console_fleet.plugin(
        NODE,
        every,
        plugin=every,
        state=every,
        rule=every,
        instance=every,
        watched=every,
        agent=every,
        finding=every,
        text=every,
        socket=every,
        process=every,
        devices=dict.fromkeys(words, 8),
        allocatable=dict.fromkeys(words, 3),
        problems=words,
        unhealthy=[dict.fromkeys(("kind", "resource", "device", "why"), word) for word in words],
        evidence=[{"source": word, "observed": word} for word in words],
        alerts=[alert],
    )
    nodes = [
        console_fleet.plugin(word, word, alerts=[console_fleet.alert(word, number=9 + number)])
        for number, word in enumerate(words)
    ]
    made = console_fleet.Health([plugin, *nodes])
    made.groups = words
    made.fleet_alerts = [console_fleet.alert("_fleet", number=2, severity=every, kind=every)]
    made.service |= {
        "leader": every,
        "leads": None,
        "notified": every,
        "telling": every,
        "advisories": every,
        "cluster": {every: every},
    }
    return made


async def publish(link: bus.Bus, words: tuple[str, ...] = ATTACKS) -> None:
    """Publish the words in all texts of events, silences and a dead letter."""
    for event in _events(words, datetime.now(UTC)):
        await link.publish(event)
    for number, word in enumerate(words):
        silence = matching.Silence(
            id=f"silence-{number}",
            matchers=(str(matching.Matcher("node", matching.Operator.EQUAL, word)),),
            starts_at=datetime.now(UTC),
            ends_at=datetime.now(UTC) + timedelta(hours=1),
            author=word[:200],
            comment=word,
        )
        encoded = matching.encode_silence(silence)
        await storage.put(link.link, streams.SILENCES, silence.id, encoded)
    # a dead letter, whose error was chosen by others
    letter = "muster.dlq.notification.ops.0badcafe.0123456789abcdef"
    headers = {"Muster-Receiver": "ops", "Muster-Error": " ".join(words)[:400]}
    await storage.enqueue(link.link, letter, b"{}", key="letter", headers=headers)


def _events(words: tuple[str, ...], at: datetime) -> Iterable[vocabulary.Event]:
    plugin: dict[str, Any] = {"node": NODE, "at": at, "plugin": "device-plugin"}
    every = " ".join(words)
    resource, devices = every[:253], tuple(word[:63] for word in words)
    evidence = tuple(vocabulary.Evidence(source=word, observed=word) for word in words)
    gpus = tuple(vocabulary.Gpu(uuid=each, product=every, pci_bus_id=each) for each in devices)
    yield vocabulary.InventoryReported(
        **plugin,
        devices=tuple(
            vocabulary.Device(
                id=each,
                resource=resource,
                health=vocabulary.Health.UNHEALTHY,
                reason=each,
                physical=each,
            )
            for each in devices
        ),
        resources=(resource,),
        gpus=vocabulary.GpuNode(gpus=gpus),
        fuse_mounts=(
            vocabulary.FuseMount(
                id="1", pod=every, connection=1, source=every, subtype=every, mount_point=every
            ),
        ),
    )
    for device in devices:
        yield vocabulary.DeviceHealthChanged(
            **plugin,
            resource=resource,
            device_id=device,
            health=vocabulary.Health.UNHEALTHY,
            reason=every,
        )
        yield vocabulary.AllocationObserved(
            **plugin, resource=resource, device_ids=(device,), pod=every
        )
    yield vocabulary.ProblemChanged(**plugin, problem=every, holds=True)
    yield vocabulary.ConfigurationRefused(**plugin, config_hash=every, problems=words)
    yield vocabulary.VerdictChanged(
        **plugin,
        verdict=vocabulary.Verdict.STUCK,
        rule=every,
        evidence=evidence,
        resources=words,
        watched=every,
    )
    for number, state in ((1, vocabulary.AlertState.FIRING), (3, vocabulary.AlertState.RESOLVED)):
        yield vocabulary.AlertChanged(
            **plugin,
            kind=vocabulary.AlertKind.STUCK,
            severity=vocabulary.Severity.CRITICAL,
            state=state,
            fingerprint=f"{number:016x}",
            summary=every,
            starts_at=at,
            resource=every,
            devices=devices,
            pods=words,
            evidence=evidence,
            advice=every,
            runbook="javascript:document.title='taken'",
            watched=every,
        )
    sent: dict[str, Any] = {
        "node": "_fleet",
        "at": at,
        "receiver": "slack",
        "group": f"{every}:{{{every}}}",
        "reason": vocabulary.NotificationReason.FIRST,
        "firing": (f"{1:016x}",),
    }
    yield vocabulary.NotificationDelivered(**sent, answer=every)
    yield vocabulary.NotificationFailed(**sent, error=every, outcome=every)
