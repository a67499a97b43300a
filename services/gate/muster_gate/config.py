"""Pure: What can be set about the gate, with every default and bound."""

from typing import Annotated

import msgspec

from muster.service import sections

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
File = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens are believed: those of one service account, made for this purpose."""

    issuer: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """As the cluster writes it; empty is what the API server says of itself."""
    audience: Text = "muster-nats"
    namespace: Text = "muster"
    account: Text = "muster-plugin"
    leeway_s: Annotated[float, msgspec.Meta(ge=0, le=300)] = 30.0
    """How far the clocks of the API server and of this machine may be apart."""
    lifetime_max_s: Annotated[float, msgspec.Meta(ge=10, le=86_400)] = 86_400.0
    """After so long a client must show its token again, however long that is good for."""


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Where the public keys of the cluster come from, and how long they are believed."""

    file: File | None = None
    """A JSON Web Key Set, instead of the API server; `issuer` has to be said then."""
    api: Annotated[str, msgspec.Meta(pattern=r"^(https?://[!-~]{1,1024})?$")] = ""
    """Address of the API server; empty is the one of the cluster that this runs in."""
    cache: File | None = None
    """Where they are kept for the next start; it may come while the API server is away."""
    refresh_s: sections.Pause = 60.0
    age_max_s: Annotated[float, msgspec.Meta(ge=1, le=604_800)] = 86_400.0
    """How long an API server may be away before nobody is let in any more."""

    def __post_init__(self) -> None:
        """Refuse an age that a single failed fetch would use up."""
        if self.age_max_s < 2 * self.refresh_s:
            raise ValueError("age_max_s: less than two times refresh_s")


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How often the plugins of one node may connect: at once, and then in a minute."""

    burst: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 20
    per_minute: Annotated[float, msgspec.Meta(gt=0, le=10_000)] = 12.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set about the gate."""

    signing: File = "/etc/muster-gate/gate.json"
    """What answers are signed with, as `muster auth init` writes it; it is read again in time."""
    bus: sections.Bus = sections.Bus()
    tokens: Tokens = Tokens()
    keys: Keys = Keys()
    pace: Pace = Pace()
    http: sections.Http = sections.Http()
    log: sections.Log = sections.Log()

    def __post_init__(self) -> None:
        """Refuse a file of keys without an issuer: the file does not name one."""
        if self.keys.file is not None and not self.tokens.issuer:
            raise ValueError("tokens.issuer: has to be said when keys.file is")
