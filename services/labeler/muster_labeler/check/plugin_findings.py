"""Pure: reports faulty device plugins and DRA drivers (PLUG001 to PLUG008, DRA001 to DRA009)."""

from collections.abc import Iterable
from typing import Final

from muster.kubernetes import driver_findings, plugin_facts, plugin_findings
from muster.kubernetes.plugin_facts import Kind, Level, PluginFinding
from muster_labeler import model
from muster_labeler.check import findings
from muster_labeler.check.findings import Commands, Finding, Id, Severity

_IDS: Final = {
    Kind.LOST: Id.PLUG001,
    Kind.NONE: Id.PLUG002,
    Kind.NEVER: Id.PLUG003,
    Kind.FEWER: Id.PLUG004,
    Kind.POD: Id.PLUG005,
    Kind.ADMISSION: Id.PLUG006,
    Kind.UNHEALTHY: Id.PLUG007,
    Kind.NODE: Id.PLUG008,
    Kind.PREPARE: Id.DRA001,
    Kind.NO_DRIVER: Id.DRA002,
    Kind.NO_SLICE: Id.DRA003,
    Kind.POOL: Id.DRA004,
    Kind.TERMINATING: Id.DRA005,
    Kind.OFFERED_TWICE: Id.DRA006,
    Kind.SAME_DEVICE: Id.DRA007,
    Kind.CDI: Id.DRA008,
    Kind.KUBELET: Id.DRA009,
}
_SEVERITIES: Final = {
    Level.ERROR: Severity.ERROR,
    Level.WARN: Severity.WARN,
    Level.INFO: Severity.INFO,
}
_DOCS: Final = "docs/check.md#muster-check-plugins"


def evaluate(
    view: plugin_facts.View, commands: Commands, *, only: str | None = None
) -> Iterable[Finding]:
    """Yield the problems of plugins and drivers, or, with `only`, of those on one node."""
    facts = plugin_facts.gather(view)
    for each in (*plugin_findings.evaluate(facts), *driver_findings.evaluate(facts)):
        # FUSE008 says more about fuse resources, and covers every plugin
        is_fuse = each.kind in {Kind.LOST, Kind.NONE} and model.is_fuse(each.name)
        if is_fuse or only not in {None, each.node}:
            continue
        id_ = _IDS[each.kind]
        is_pod = each.kind in {Kind.POD, Kind.TERMINATING, Kind.CDI}
        yield findings.finding(
            id_,
            _SEVERITIES[each.level],
            each.pod if is_pod else each.node or each.name,
            each.text,
            evidence=each.evidence,
            command=_command(each, commands),
            docs=_DOCS,
        )


def _command(each: PluginFinding, commands: Commands) -> str:
    """Return a finding's command, which deletes the plugin's pod, or shows a log or an object."""
    namespace, _, name = each.pod.partition("/")
    match each.kind:
        case Kind.POOL | Kind.SAME_DEVICE:
            words = _slices(f"spec.driver={each.name}")
        case Kind.OFFERED_TWICE:
            words = _slices(f"spec.nodeName={each.node}")
        case Kind.NODE | Kind.KUBELET:
            words = ["describe", "node", each.node]
        case _ if not name:
            return commands.pods_of(each.node)
        case Kind.LOST | Kind.NONE:
            words = ["-n", namespace, "delete", "pod", name]
        case Kind.POD | Kind.TERMINATING | Kind.CDI | Kind.ADMISSION:
            words = ["-n", namespace, "describe", "pod", name]
        case _:
            words = ["-n", namespace, "logs", name, "--all-containers", "--tail=50"]
    return commands.kubectl(*words)


def _slices(selector: str) -> list[str]:
    return ["get", "resourceslices", f"--field-selector={selector}", "-o", "yaml"]
