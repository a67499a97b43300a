"""Pure: the gate's settings, with every default and bound."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from muster.nats.auth import permissions
from muster.service import sections

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
File = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Which service account tokens are accepted: their audience, issuer and service accounts."""

    issuer: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """The issuer in the tokens; by default, the issuer that the API server reports."""
    audience: Text = "muster-nats"
    namespace: Text = "muster"
    account: Text = "muster-plugin"
    """The plugins' service account; its pods may use the names in `plugins`."""
    others: Mapping[Text, Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]] = msgspec.field(
        default_factory=lambda: {"muster-fuse": (permissions.FUSE_BROKER,)}
    )
    """Further service accounts, and the plugin names that the pods of each may use."""
    leeway_s: Annotated[float, msgspec.Meta(ge=0, le=300)] = 30.0
    """The allowed difference between the clocks of the API server and this machine."""
    lifetime_max_s: Annotated[float, msgspec.Meta(ge=10, le=86_400)] = 86_400.0
    """After this time, a client must present its token again, even if the token is still valid."""


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The source of the cluster's public keys, and how long the keys are used."""

    file: File | None = None
    """A JSON Web Key Set to use instead of the API server; requires `tokens.issuer`."""
    api: Annotated[str, msgspec.Meta(pattern=r"^(https?://[!-~]{1,1024})?$")] = ""
    """URL of the API server; by default, that of the cluster that the gate runs in."""
    cache: File | None = None
    """A file that caches the keys, so that the gate can start without the API server."""
    refresh_s: sections.Pause = 60.0
    age_max_s: Annotated[float, msgspec.Meta(ge=1, le=604_800)] = 86_400.0
    """How long the API server may be unavailable before clients are no longer admitted."""

    def __post_init__(self) -> None:
        """Reject a maximum age that the keys would exceed after a single failed fetch."""
        if self.age_max_s < 2 * self.refresh_s:
            raise ValueError("age_max_s: must be at least twice refresh_s")


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How often the plugins of one node may connect: a burst, then a rate per minute."""

    burst: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 20
    per_minute: Annotated[float, msgspec.Meta(gt=0, le=10_000)] = 12.0


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How much one node may send on all its connections together, and the penalty for more.

    The defaults are about a hundred times the traffic of a plugin with one heartbeat a second.
    """

    messages_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 100.0
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e12)] = 524_288.0
    burst_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 60.0
    """The reserve for messages that waited during an outage, in seconds of these rates."""
    connections: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 8
    """The maximum number of connections of a node; if it has more, the oldest are closed."""
    refuse_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] = 10.0
    """How long a node is refused after it has exceeded a rate."""
    read_s: sections.Pause = 1.0
    """The period at which the gate requests each connection's traffic from the servers.

    The gate does so four times as often while a node is refused, and for `burst_s` afterwards.
    """


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the gate."""

    signing: File = "/etc/muster-gate/gate.json"
    """The file with the keys that sign answers, written by `muster auth init`; reread periodically.
    """
    password: File | None = None
    """The file with the gate's password, if NATS uses passwords; the source of the signing key."""
    bus: sections.Bus = sections.Bus()
    tokens: Tokens = msgspec.field(default_factory=Tokens)
    plugins: tuple[str, ...] = (permissions.PLUGIN,)
    """The names that the plugins of a node may use; `device-plugin` is always allowed."""
    keys: Keys = Keys()
    pace: Pace = Pace()
    rates: Rates = Rates()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()

    def __post_init__(self) -> None:
        """Reject a key file without an issuer, and invalid names of plugins."""
        if self.keys.file is not None and not self.tokens.issuer:
            raise ValueError("tokens.issuer: must be set with keys.file")
        try:
            permissions.check_names({permissions.PLUGIN, *self.plugins})
        except ValueError as error:
            raise ValueError(f"plugins: {error}") from None
        for account, names in self.tokens.others.items():
            try:
                permissions.check_names(names)
            except ValueError as error:
                raise ValueError(f"tokens.others.{account}: {error}") from None
