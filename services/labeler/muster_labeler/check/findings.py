"""Pure: defines the findings of `muster check`, with stable ids, and its exit codes."""

import enum
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import msgspec

from muster.kubernetes import objects, plugin_facts, scheduling
from muster_labeler import model
from muster_labeler.naming import sources

SCHEMA_VERSION: Final = 1
CHECK_DOCS: Final = "docs/check.md"


class Severity(enum.StrEnum):
    """The severity of a finding: an error makes workloads fail; `unknown` means not checked."""

    ERROR = "error"
    WARN = "warn"
    SUGGEST = "suggest"
    INFO = "info"
    UNKNOWN = "unknown"


class Scope(enum.StrEnum):
    """The kind of object that a finding is about."""

    NODE = "node"
    POD = "pod"
    CLUSTER = "cluster"


class Id(enum.StrEnum):
    """The ids of all findings; an id is never reused.

    ACCESS: permission to read something is missing; UNREAD: reading failed for another reason.
    """

    GPU001 = "GPU001"
    GPU002 = "GPU002"
    GPU003 = "GPU003"
    GPU004 = "GPU004"
    GPU005 = "GPU005"
    GPU006 = "GPU006"
    GPU007 = "GPU007"
    GPU008 = "GPU008"
    GPU009 = "GPU009"
    GPU010 = "GPU010"
    FUSE001 = "FUSE001"
    FUSE002 = "FUSE002"
    FUSE003 = "FUSE003"
    FUSE004 = "FUSE004"
    FUSE005 = "FUSE005"
    FUSE006 = "FUSE006"
    FUSE007 = "FUSE007"
    FUSE008 = "FUSE008"
    FUSE009 = "FUSE009"
    FUSE010 = "FUSE010"
    AS001 = "AS001"
    AS002 = "AS002"
    AS003 = "AS003"
    AS004 = "AS004"
    AS005 = "AS005"
    AS006 = "AS006"
    RUN001 = "RUN001"
    RUN002 = "RUN002"
    RUN003 = "RUN003"
    RUN004 = "RUN004"
    PLUG001 = "PLUG001"
    PLUG002 = "PLUG002"
    PLUG003 = "PLUG003"
    PLUG004 = "PLUG004"
    PLUG005 = "PLUG005"
    PLUG006 = "PLUG006"
    PLUG007 = "PLUG007"
    PLUG008 = "PLUG008"
    DRA001 = "DRA001"
    DRA002 = "DRA002"
    DRA003 = "DRA003"
    DRA004 = "DRA004"
    DRA005 = "DRA005"
    DRA006 = "DRA006"
    DRA007 = "DRA007"
    DRA008 = "DRA008"
    DRA009 = "DRA009"
    ACCESS = "ACCESS"
    UNREAD = "UNREAD"


_SCOPES: Final = {
    **dict.fromkeys((Id.GPU004, Id.AS002, Id.AS003, Id.AS004, Id.AS006), Scope.CLUSTER),
    **dict.fromkeys((Id.ACCESS, Id.UNREAD), Scope.CLUSTER),
    **dict.fromkeys((Id.FUSE001, Id.FUSE002, Id.FUSE006, Id.FUSE007, Id.FUSE009), Scope.POD),
    **dict.fromkeys((Id.AS001, Id.AS005, Id.RUN001, Id.RUN003, Id.RUN004), Scope.POD),
    Id.RUN002: Scope.CLUSTER,
    Id.FUSE010: Scope.CLUSTER,
    **dict.fromkeys((Id.PLUG005, Id.DRA005, Id.DRA008), Scope.POD),
    Id.DRA007: Scope.CLUSTER,
}
"""The scopes of the findings that are not about a node."""


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """The fix for a finding: a complete command, or an empty one, and the documentation page."""

    command: str = ""
    docs: str = CHECK_DOCS


class Finding(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One problem, with its evidence."""

    id: Id
    severity: Severity
    scope: Scope
    object: str
    message: str
    evidence: tuple[str, ...] = ()
    fix: Fix = Fix()
    safe_to_auto_apply: bool = False


def finding(  # the fields that every finding has
    id_: Id,
    severity: Severity,
    about: str,
    message: str,
    *,
    evidence: tuple[str, ...] = (),
    command: str = "",
    docs: str = CHECK_DOCS,
    is_safe: bool = False,
) -> Finding:
    """Return a finding about an object; `id_` determines the scope of the finding."""
    return Finding(
        id=id_,
        severity=severity,
        scope=_SCOPES.get(id_, Scope.NODE),
        object=about,
        message=message,
        evidence=evidence,
        fix=Fix(command=command, docs=docs),
        safe_to_auto_apply=is_safe,
    )


class Report(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The result of a check, with the numbers of findings by severity and of objects read."""

    schema_version: int = SCHEMA_VERSION
    cluster: str
    time: datetime
    topics: tuple[str, ...]
    checked: dict[str, int]
    summary: dict[str, int]
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


class Exit(enum.IntEnum):
    """The exit codes of `muster check` and of the commands that write."""

    FINE = 0
    PROBLEMS = 1
    USAGE = 2
    UNREACHABLE = 3
    NO_PERMISSION = 4
    INTERNAL = 5


class Commands(msgspec.Struct, frozen=True, kw_only=True):
    """Builds commands for the checked cluster, with the options by which the check reached it.

    `aliases` is a file of reviewed names; `namespace` is muster's namespace, None for the default.
    """

    context: str | None = None
    kubeconfig: str | None = None
    aliases: str | None = None
    namespace: str | None = None

    def muster(self, *words: str) -> str:
        """Return a `muster` command."""
        named = ["--muster-namespace", self.namespace] if self.namespace else []
        reviewed = ["--aliases", self.aliases] if self.aliases else []
        return shlex.join(["muster", *words, *self._options(), *named, *reviewed])

    def kubectl(self, *words: str) -> str:
        """Return a `kubectl` command."""
        return shlex.join(["kubectl", *self._options(), *words])

    def pods_of(self, node: str) -> str:
        """Return the `kubectl` command that lists a node's pods."""
        return self.kubectl(
            "get", "pods", "-A", "-o", "wide", f"--field-selector=spec.nodeName={node}"
        )

    def _options(self) -> list[str]:
        context = ["--context", self.context] if self.context else []
        return [*context, *(["--kubeconfig", self.kubeconfig] if self.kubeconfig else [])]


def exit_code(report: Report, *, strict: bool) -> Exit:
    """Return the exit code for a report.

    Objects that could not be read matter only if no finding already makes the check fail.
    """
    counts = {Severity(word) for word, count in report.summary.items() if count}
    if Severity.ERROR in counts or (strict and counts & {Severity.WARN, Severity.SUGGEST}):
        return Exit.PROBLEMS
    ids = {finding.id for finding in report.findings}
    if Id.ACCESS in ids:
        return Exit.NO_PERMISSION
    return Exit.UNREACHABLE if Id.UNREAD in ids else Exit.FINE


@dataclass(frozen=True, slots=True)
class Unread:
    """Objects that could not be read, and whether permission is missing.

    `is_needed` means that nothing can be decided without these objects. Other objects are optional:
    they may be absent or hidden.
    """

    what: str
    why: str
    is_forbidden: bool = False
    is_needed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAutoscaler:
    """The facts about the Cluster Autoscaler from its Deployment and its status."""

    arguments: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    renewed: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Karpenter:
    """Karpenter: its feature gates, and the resources that NodeOverlays add."""

    namespace: str = ""
    name: str = ""
    gates: str = ""
    overlays: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseSupport:
    """The FUSE components installed in a cluster; None for those that could not be read."""

    has_driver: bool | None = None
    """Whether the CSI driver fuse.muster.dev is installed."""
    has_class: bool | None = None
    """Whether the DeviceClass fuse.muster.dev is installed."""
    has_dra: bool | None = None
    """Whether the API of Dynamic Resource Allocation is served, as v1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The objects read from a cluster; None or empty if not read. `now` is the API's time."""

    now: datetime
    nodes: Sequence[model.Node] | None = None
    evidence: sources.Evidence = sources.NO_EVIDENCE
    simulated: frozenset[str] = frozenset()
    slices: Sequence[model.ResourceSlice] = ()
    pods: Sequence[model.Pod] | None = None
    events: Sequence[model.KubernetesEvent] | None = None
    namespaces: Mapping[str, Mapping[str, str]] | None = None
    autoscaler: ClusterAutoscaler | None = None
    karpenter: Karpenter | None = None
    fuse: FuseSupport | None = None
    own_pods: Sequence[objects.Pod] = ()
    own_claims: Sequence[scheduling.VolumeClaim] = ()
    plugins: plugin_facts.View | None = None
    unread: Sequence[Unread] = field(default_factory=tuple)
