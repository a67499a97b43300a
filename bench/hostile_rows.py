"""Pure: computes the table of `bench.hostile`: the effects of an attack on the honest nodes.

The targets: verdicts on other nodes are at most 1.5 times as late as before, none of their events
is lost, health uses at most 200 MiB and is never disconnected from NATS, the labeler reacts within
2 s, and after the attack everything is as before.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from bench import attacks, report

LABELLED_S: Final = 2.0
NATS: Final = "nats-server"
_LATER: Final = 1.5
_HEALTH_MIB: Final = 200.0
_POD_MIB: Final = 512.0
_NATS_MIB: Final = 1024.0
"""The memory limits of the pods in the manifests."""
_READY_S: Final = 10.0
_STORMS_SHOWN: Final = 2


@dataclass(slots=True)
class Phase:
    """The measurements of one phase."""

    name: str
    seconds: float = 0.0
    detections_s: list[float] = field(default_factory=list)
    inventories_s: list[float] = field(default_factory=list)
    memory_mib: dict[str, float] = field(default_factory=dict)
    cpu_percent: dict[str, float] = field(default_factory=dict)
    not_ready_s: dict[str, float] = field(default_factory=dict)
    not_live_s: dict[str, float] = field(default_factory=dict)
    """The longest period in which /healthz failed."""
    disconnected_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The results of one attack."""

    attack: attacks.Attack
    phases: list[Phase]
    sent_mib_s: float
    opened: int
    failed: int
    refused: Mapping[str, int]
    lost: int
    published: int
    slowest_s: float
    wrong: int
    """Honest nodes with a verdict although their plugin was not killed."""
    about_node: Counter[str]
    about_others: Counter[str]
    storms: list[str]
    """The summaries of mass failures, each preceded by the phase in which it began."""
    restarts_s: Mapping[str, float]


def rows(outcome: Outcome) -> list[report.Row]:
    """Return the figures of one attack."""
    name, phases = outcome.attack.value, outcome.phases
    refused = "; ".join(f"{count} x {text}" for text, count in outcome.refused.items())
    links = f"{outcome.opened} connections, {outcome.failed} failed"
    sent = f"{attacks.WHAT[outcome.attack]}; {links}; {refused or 'nothing refused'}"
    events = (
        f"{outcome.published} published, repeated until stored; slowest {outcome.slowest_s:.1f} s"
    )
    alerts, others = _counts(outcome.about_node), _counts(outcome.about_others)
    storms = "; ".join(outcome.storms[:_STORMS_SHOWN]) or "none"
    restarts = ", ".join(f"{service} {s:.1f}" for service, s in outcome.restarts_s.items())
    blind_s = phases[1].disconnected_s
    return [
        report.row(f"{name}: sent", outcome.sent_mib_s, "MiB/s", how=sent),
        *_detections(name, phases),
        *_labelling(name, phases),
        report.row(f"{name}: events lost", outcome.lost, "", target=0, how=events),
        report.row(
            f"{name}: wrong verdicts",
            outcome.wrong,
            "",
            target=0,
            how=f"on honest nodes; alerts not about the hostile one: {others}",
        ),
        report.row(
            f"{name}: alerts about the node",
            outcome.about_node.total(),
            "",
            how=f"{alerts}; storms: {storms}",
        ),
        report.row(f"{name}: health disconnected", blind_s, "s", target=0, how="from NATS, during"),
        _readiness(name, phases),
        *(_cost(name, service, phases) for service in phases[0].memory_mib),
        report.row(
            f"{name}: ready after SIGKILL",
            max(outcome.restarts_s.values()),
            "s",
            target=_READY_S,
            how=f"after the attack: {restarts}",
        ),
    ]


def _counts(alerts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in alerts.items()) or "none"


def _detections(name: str, phases: list[Phase]) -> list[report.Row]:
    """Return the detection delays of each phase, compared with those before the attack."""
    rows: list[report.Row] = []
    floors: list[float] = []
    for phase in phases:
        made = report.spread(
            f"{name}: detection {phase.name}",
            phase.detections_s,
            "s",
            how=f"{len(phase.detections_s)} honest plugins killed, to the verdict",
        )
        if not floors:
            floors = [row.value for row in made]
            rows += made
            continue
        rows += [
            dataclasses.replace(row, floor=floor, target=round(_LATER * floor, 3))
            for row, floor in zip(made, floors, strict=True)
        ]
    return rows


def _labelling(name: str, phases: list[Phase]) -> list[report.Row]:
    """Return the labeler's slowest reactions, compared with those before the attack."""
    slowest_s = [max(phase.inventories_s) for phase in phases]
    return [
        report.row(
            f"{name}: the labeler's delay {phase.name} the attack, max",
            seconds,
            "s",
            target=LABELLED_S,
            floor=slowest_s[0],
            how=(
                f"{len(phase.inventories_s)} inventories of another node, "
                "from the inventory to the suggested labels"
            ),
        )
        for phase, seconds in zip(phases[1:], slowest_s[1:], strict=True)
    ]


def _readiness(name: str, phases: list[Phase]) -> report.Row:
    """Return how long any service was not ready or not live, during and after the attack."""
    said = []
    for phase in phases[1:]:
        for what, spent in (("not ready", phase.not_ready_s), ("not live", phase.not_live_s)):
            shown = ", ".join(f"{service} {s:.0f} s" for service, s in spent.items() if s)
            said.append(f"{what} {phase.name}: {shown or 'none'}")
    most = max(s for phase in phases[1:] for s in phase.not_ready_s.values())
    return report.row(f"{name}: not ready", most, "s", target=0, how="; ".join(said))


def _cost(name: str, service: str, phases: list[Phase]) -> report.Row:
    """Return the cost of a service's largest replica, compared with that before the attack."""
    before, during, after = phases
    cpu = ", ".join(f"{phase.cpu_percent[service]:.1f} {phase.name}" for phase in phases)
    return report.row(
        f"{name}: {service}, memory",
        max(during.memory_mib[service], after.memory_mib[service]),
        "MiB",
        target={"health": _HEALTH_MIB, NATS: _NATS_MIB}.get(service, _POD_MIB),
        floor=before.memory_mib[service],
        how=f"during or after; CPU, % of a core: {cpu}",
    )
