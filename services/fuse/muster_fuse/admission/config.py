"""Pure: the webhook's settings, with every default and bound."""

from typing import Annotated

import msgspec

from muster import vocabulary
from muster.service import sections

Label = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class Kubernetes(msgspec.Struct, frozen=True, kw_only=True):
    """Where the API is, and what the webhook's objects are called there.

    Without a kubeconfig it is the cluster that this process runs in.
    """

    kubeconfig: str | None = None
    context: str | None = None
    timeout_s: sections.Period = 5.0
    namespace: Label = "muster"
    name: Label = "muster-fuse-webhook"
    """Of the Service, the Secret, and the MutatingWebhookConfiguration."""


class Certificates(msgspec.Struct, frozen=True, kw_only=True):
    """How long a certificate is valid; after two thirds of that the next is made."""

    lifetime_s: Annotated[float, msgspec.Meta(ge=10, le=31_536_000)] = 7_776_000.0
    settle_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 600.0
    """How long the next certificate waits until every API server trusts it."""
    check_s: sections.Pause = 60.0

    def __post_init__(self) -> None:
        """Reject a wait that the certificate in use would not outlive."""
        # it is prepared up to a check late, and used up to a check after it has settled
        if self.settle_s + 2 * self.check_s > self.lifetime_s / 4:
            raise ValueError(
                "settle_s: with twice check_s it must be at most a quarter of lifetime_s"
            )


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Where HTTPS is served to the API server; port 0 means a free port, which is logged."""

    host: vocabulary.Name = "127.0.0.1"
    port: sections.Port = 0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of the webhook."""

    listen: Listen = Listen()
    kubernetes: Kubernetes = Kubernetes()
    certificates: Certificates = Certificates()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()
