"""Pure: heartbeats: what a plugin sends every few seconds and answers a probe with."""

import enum
from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec

from muster.vocabulary import facts


class Phase(enum.StrEnum):
    """Where in its life cycle a plugin is."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class ResourceBeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One resource in a heartbeat. Ages are the sender's monotonic seconds; -1 is never."""

    name: facts.Name = msgspec.field(name="r")
    registered_age_s: float = msgspec.field(name="reg", default=-1.0)
    streams: facts.Count = msgspec.field(name="law", default=0)
    last_send_age_s: float = msgspec.field(name="snd", default=-1.0)
    registrations: facts.Count = msgspec.field(name="n", default=0)
    probe_ok: bool = msgspec.field(name="ok", default=False)
    probe_ms: float = msgspec.field(name="ms", default=0.0)
    probe_age_s: float = msgspec.field(name="pa", default=-1.0)
    devices: facts.Count = msgspec.field(name="tot", default=0)
    healthy: facts.Count = msgspec.field(name="up", default=0)
    allocated: facts.Count = msgspec.field(name="al", default=0)
    problem: facts.Text = msgspec.field(name="bad", default="")
    """Why this resource is not registered with the kubelet; empty if it is."""
    short: facts.Text = msgspec.field(name="few", default="")
    """How many devices fewer than expected there are, in words; empty if none."""
    apart: facts.Text = msgspec.field(name="odd", default="")
    """How the kubelet's list differs from ours, and for how long; empty if it does not."""
    degraded: facts.Count = msgspec.field(name="deg", default=0)
    unmonitored: facts.Count = msgspec.field(name="unm", default=0)
    """How many devices are Healthy, but degraded; and how many cannot be monitored."""
    away: bool = msgspec.field(name="awy", default=False)
    """Whether it is not registered only because the kubelet is away or has just started."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A heartbeat, with what only the plugin itself can know; also the answer to a probe.

    Crosses core NATS as compact JSON: not stored, not acknowledged, its loss is the information.
    Order is (`instance`, `seq`); `wall` is shown and never compared.
    """

    SUBJECT: ClassVar[str] = "muster.heartbeat.{node}.{plugin}"
    TYPE: ClassVar[str] = "heartbeat"

    v: int = 1
    node: facts.BeatNode
    plugin: facts.BeatPlugin
    instance: facts.Name = msgspec.field(name="i")
    boot: str = msgspec.field(name="b", default="")
    version: str = msgspec.field(name="ver", default="")
    config_hash: str = msgspec.field(name="cfg", default="")
    seq: facts.Count
    interval_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = msgspec.field(name="t")
    uptime_s: facts.Seconds = msgspec.field(name="up", default=0.0)
    wall: float = msgspec.field(name="w", default=0.0)
    phase: Phase = msgspec.field(name="ph", default=Phase.SERVING)
    kubelet_socket: str = msgspec.field(name="ks", default="")
    """`<inode>.<ctime>` of kubelet.sock at the last registration; empty before it."""
    resources: tuple[ResourceBeat, ...] = msgspec.field(name="res", default=())
    checkers: Mapping[str, float] = msgspec.field(name="chk", default_factory=dict)
    """Seconds since each health checker last succeeded."""
    loop_lag_ms: float = msgspec.field(name="lag", default=0.0)
    reconnects: facts.Count = msgspec.field(name="rc", default=0)
    problems: tuple[facts.Text, ...] = msgspec.field(name="prb", default=())
    """The first problems that concern no single resource."""

    @property
    def subject(self) -> str:
        """The NATS subject it is published on. Raises ValueError for names without one."""
        return f"muster.heartbeat.{facts.node_token(self.node)}.{facts.plugin_token(self.plugin)}"
