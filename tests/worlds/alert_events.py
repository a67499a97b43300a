"""Events about alerts, for tests of the programs that show them."""

from datetime import datetime, timedelta

from muster import codec, vocabulary


def event(data: vocabulary.Event, number: int = 1) -> codec.CloudEvent:
    """Return an event as it arrives from the bus."""
    return codec.CloudEvent(
        id=f"e{number}",
        source="/nodes/x/test",
        type=data.TYPE,
        time=data.at,
        instance="i",
        sequence=number,
        boot="b",
        data=data,
        position=number,
        stream="S",
    )


def changed(
    number: int, at: datetime, *, node: str = "node-a", resolved: bool = False
) -> vocabulary.AlertChanged:
    """Return the event of an alert that fires, or is resolved, at this time."""
    return vocabulary.AlertChanged(
        node=node,
        at=at,
        plugin="device-plugin",
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.CRITICAL,
        state=vocabulary.AlertState.RESOLVED if resolved else vocabulary.AlertState.FIRING,
        fingerprint=f"{number:016x}",
        summary="stuck",
        starts_at=at - timedelta(minutes=5),
        ends_at=at if resolved else None,
    )
