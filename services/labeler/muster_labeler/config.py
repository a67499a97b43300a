"""Pure. The labeler's settings: how far it may go, and where the Kubernetes API is."""

import enum
from collections.abc import Mapping
from typing import Annotated

import msgspec

from muster import sections
from muster_labeler import accelerators

Retry = Annotated[float, msgspec.Meta(ge=0.05, le=3600)]


class Mode(enum.StrEnum):
    """What the labeler does about a node whose labels are not as they should be."""

    OFF = "off"
    SUGGEST = "suggest"
    APPLY = "apply"


class Kubernetes(msgspec.Struct, frozen=True, kw_only=True):
    """Where the API is: this kubeconfig, or, without one, the cluster this process runs in.

    Never a kubeconfig found by chance: on a laptop that could be somebody's real cluster.
    """

    kubeconfig: str | None = None
    context: str | None = None
    timeout_s: sections.Period = 5.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All of them.

    `simulated` lets `apply` label nodes whose GPUs are simulated. `aliases` maps product strings to
    accelerator names that people have reviewed. `retry_s` is how long a node waits for another try
    after the API was away.
    """

    bus: sections.Bus = sections.Bus()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
    mode: Mode = Mode.SUGGEST
    kubernetes: Kubernetes = Kubernetes()
    simulated: bool = False
    aliases: Mapping[str, str] = {}
    retry_s: Retry = 10.0

    def __post_init__(self) -> None:
        """Refuse names that could not be label values, and a context without its file."""
        for product, name in self.aliases.items():
            if not accelerators.is_name(name):
                raise ValueError(
                    f"aliases: {product!r}: {name!r} is no accelerator name: lower case, at most "
                    "63 letters, digits, '-', '_', '.', no separator at an end"
                )
        if self.kubernetes.context is not None and self.kubernetes.kubeconfig is None:
            raise ValueError("kubernetes.context: names a context of no kubeconfig")
