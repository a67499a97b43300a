"""Pure. What can be set about the health service, with every default and bound."""

from typing import Annotated

import msgspec

from muster import sections

Beats = Annotated[int, msgspec.Meta(ge=1, le=100)]


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """When silence is suspicious, and what it takes to believe it, or to believe in a recovery."""

    suspicion_beats: Annotated[float, msgspec.Meta(gt=1, le=100)] = 2.5
    """A half beat more than whole ones: with jitter, k beats act like k - 1."""
    probe_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0
    probes_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 256
    trouble_beats: Beats = 2
    trouble_s: sections.Period = 3.0
    """A plugin repairs a lost registration by itself; the shorter of the two is its time for it."""
    recover_beats: Beats = 3
    recover_s: sections.Period = 15.0
    maintenance_s: sections.Period = 300.0
    """How long a plugin may stay away that said goodbye and not for how long."""
    reconnect_s: sections.Period = 5.0
    """How long clients need to find a restarted NATS server again, at most."""
    stall_s: sections.Period = 1.0
    """A deadline seen this much too late tells of us, not of the plugins."""
    interval_s: sections.Period = 5.0
    """Assumed of a plugin whose beats have not told its own."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the health service."""

    bus: sections.Bus = sections.Bus()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
    detection: Detection = Detection()
    runbook_url: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] = "docs/runbooks/"
    """What stands before `<alert kind>.md` in an alert's link."""
