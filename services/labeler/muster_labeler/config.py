"""Pure: the labeler's settings: its mode, its policy, and its access to the Kubernetes API."""

import enum
from collections.abc import Mapping
from typing import Annotated

import msgspec

from muster.service import sections
from muster_labeler.kubernetes import projection
from muster_labeler.naming import accelerators, node_labels

Retry = Annotated[float, msgspec.Meta(ge=0.05, le=3600)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1000)]
Lasting = Annotated[int, msgspec.Meta(ge=1, le=3600)]


class Mode(enum.StrEnum):
    """The labeler's action for a node with missing or wrong labels."""

    OFF = "off"
    SUGGEST = "suggest"
    APPLY = "apply"


class Kubernetes(msgspec.Struct, frozen=True, kw_only=True):
    """The API to use: that of a kubeconfig, or else that of the cluster that this process runs in.

    The user's default kubeconfig is never used: on a laptop, it may select a real cluster.
    `namespace` contains the Lease, and the inventory for the commands. `events` enables writing
    Kubernetes Events.
    """

    kubeconfig: str | None = None
    context: str | None = None
    timeout_s: sections.Period = 5.0
    namespace: str = projection.MUSTER_NAMESPACE
    events: bool = True


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of `apply`: the label sets, nodes, reasons and rate that it may use.

    With `partial` some GPU nodes are labelled even if others cannot be: SkyPilot then sees only the
    labelled nodes.
    """

    labels: tuple[node_labels.LabelSet, ...] = (node_labels.LabelSet.SKYPILOT,)
    nodes: Mapping[str, str] = {}
    reasons: tuple[accelerators.Reason, ...] = (
        accelerators.Reason.EXACT,
        accelerators.Reason.ALIAS,
    )
    partial: bool = False
    writes_per_s: Rate = 20.0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The Lease that elects the leading replica; it is renewed three times in `lasts_s`."""

    enabled: bool = True
    name: str = "muster-labeler"
    lasts_s: Lasting = 15


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of the labeler.

    `simulated` lets `apply` label nodes whose GPUs are simulated. `aliases` maps product strings to
    accelerator names that people have reviewed. `retry_s` is the delay before a failed write is
    retried. With `condition`, the condition `DevicePluginHealthy` is written.
    """

    bus: sections.Bus = sections.Bus()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
    mode: Mode = Mode.SUGGEST
    kubernetes: Kubernetes = Kubernetes()
    policy: Policy = Policy()
    lease: Lease = Lease()
    condition: bool = False
    simulated: bool = False
    aliases: Mapping[str, str] = {}
    retry_s: Retry = 10.0

    def __post_init__(self) -> None:
        """Reject aliases that are not accelerator names, and a context without a kubeconfig."""
        for product, name in self.aliases.items():
            if not accelerators.is_name(name):
                raise ValueError(
                    f"aliases: {name!r}, the name of {product!r}, is not an accelerator name; use "
                    "at most 63 lower-case letters, digits, '-', '_' and '.', and begin and end "
                    "with a letter or digit"
                )
        if self.kubernetes.context is not None and self.kubernetes.kubeconfig is None:
            raise ValueError("kubernetes.context requires kubernetes.kubeconfig; set both")
