"""Pure: the webhook's settings, with their defaults and bounds."""

from typing import Annotated

import msgspec

from muster import vocabulary
from muster.service import sections

Label = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class Kubernetes(msgspec.Struct, frozen=True, kw_only=True):
    """The Kubernetes API, and the names of the webhook's objects.

    Without a kubeconfig, this is the API of the cluster that the process runs in.
    """

    kubeconfig: str | None = None
    context: str | None = None
    timeout_s: sections.Period = 5.0
    namespace: Label = "muster"
    name: Label = "muster-fuse-webhook"
    """The name of the Service, the Secret, and the MutatingWebhookConfiguration."""


class Certificates(msgspec.Struct, frozen=True, kw_only=True):
    """When certificates are replaced; the next one is issued after two thirds of `lifetime_s`."""

    lifetime_s: Annotated[float, msgspec.Meta(ge=10, le=31_536_000)] = 7_776_000.0
    settle_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 600.0
    """The delay before a new certificate is used, so that every API server trusts it by then."""
    check_s: sections.Pause = 60.0

    def __post_init__(self) -> None:
        """Reject a `settle_s` that is too long for the lifetime of a certificate."""
        # the next certificate may be issued one check late, and used one check late
        if self.settle_s + 2 * self.check_s > self.lifetime_s / 4:
            raise ValueError(
                "settle_s: settle_s + 2 * check_s must be at most a quarter of lifetime_s"
            )


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTPS address for the API server; port 0 means a free port, which is logged."""

    host: vocabulary.Name = "127.0.0.1"
    port: sections.Port = 0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the webhook."""

    listen: Listen = Listen()
    kubernetes: Kubernetes = Kubernetes()
    certificates: Certificates = Certificates()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
