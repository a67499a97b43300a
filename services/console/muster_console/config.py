"""Pure: the console's settings, with every default and bound."""

import ipaddress
import re
from typing import Annotated, Final

import msgspec

from muster.service import sections

_HOST: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9.]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]")

_GRAFANA: Final = re.compile(r"https?://(?![^/?#]*@)(?:\{node\}|[!#-;=?-z|~])+")

HealthUrl = Annotated[
    str, msgspec.Meta(pattern=r"^https?://[A-Za-z0-9._~\[\]:-]+(/[!-~]*)?$", max_length=1024)
]
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]


WebUrl = Annotated[str, msgspec.Meta(pattern=r"^https?://[!-~]+$", max_length=1024)]
_ADDRESS: Final = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[^\]]*\]|[^]\[:@/?#]+)(:(?P<port>[0-9]{0,5}))?([/?#][!-~]*)?"
)
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_PORT_MAX: Final = 65_535
_LOOPBACK: Final = re.compile(r"http://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?(/.*)?")


class TrustedHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A header in which a proxy in front of the console names the person who has signed in."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][-A-Za-z0-9]{0,63}$")] = "X-Forwarded-User"
    peers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=32)] = msgspec.field(
        name="from"
    )
    """The addresses or networks of the proxy; from other addresses, the header is ignored."""

    def __post_init__(self) -> None:
        """Reject a peer that is neither an IP address nor a network."""
        for peer in self.peers:
            try:
                ipaddress.ip_network(peer)
            except ValueError as error:
                raise ValueError(f"from: {error}") from None


class Oidc(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenID Connect issuer at which people sign in, and which of these people may act."""

    issuer: WebUrl
    client_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    client_secret_file: str = ""
    """A file with the client's secret; empty for a public client."""
    emails: Annotated[tuple[str, ...], msgspec.Meta(max_length=1_000)] = ()
    """Verified addresses of people who may act, as shell patterns: `*@example.com`."""
    groups: Annotated[tuple[str, ...], msgspec.Meta(max_length=1_000)] = ()
    """Groups whose members may act."""
    groups_claim: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] = "groups"

    def __post_init__(self) -> None:
        """Reject an issuer whose address is not encrypted, and settings that let nobody act."""
        check_encrypted("issuer", self.issuer)
        if not (self.emails or self.groups):
            raise ValueError(
                "emails, groups: list the people who may act, such as emails: ['*@example.com']"
            )


class Writing(msgspec.Struct, frozen=True, kw_only=True):
    """How people who may act in the console are identified; by default, nobody may act."""

    url: str = ""
    """The address of the console in browsers; needed for `header` and `oidc`."""
    local: bool = False
    """Whether the user who runs the console may act, from this machine only."""
    header: TrustedHeader | None = None
    oidc: Oidc | None = None

    @property
    def is_on(self) -> bool:
        """Whether anybody may act."""
        return self.local or self.header is not None or self.oidc is not None

    def __post_init__(self) -> None:
        """Reject more than one kind of identity, and a missing, invalid or unencrypted address."""
        if sum((self.local, self.header is not None, self.oidc is not None)) > 1:
            raise ValueError("local, header, oidc: set only one of them")
        if self.url or self.header is not None or self.oidc is not None:
            origin(self.url)
            check_encrypted("url", self.url)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of the console."""

    health: Annotated[tuple[HealthUrl, ...], msgspec.Meta(min_length=1, max_length=8)] = (
        "http://127.0.0.1:8080",
    )
    """The addresses of the health service's replicas; requests go to the leader."""
    hosts: Annotated[tuple[Host, ...], msgspec.Meta(max_length=32)] = ()
    """The names, without port, under which browsers may reach the console.

    Besides these, `localhost`, IP addresses and the host of `writing.url` are accepted. Any other
    name is refused, because a malicious page could point its own name at this address.
    """
    writing: Writing = Writing()
    """Acting in the console: off unless an identity is configured."""
    pages_max: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100
    """The maximum number of open pages that are kept up to date."""
    bus: sections.Bus = sections.Bus()
    http: sections.Http = sections.Http()
    """The address of the pages, and of the probes and metrics."""
    metrics: sections.Http | None = None
    """Another address for the probes and metrics, for clients that may not read the pages."""
    grafana_url: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """The address of a Grafana dashboard, in which `{node}` stands for one node or all nodes."""
    log: sections.Log = sections.Log()

    def __post_init__(self) -> None:
        """Reject invalid `hosts` or `grafana_url`, and `writing.local` if others can connect."""
        if self.writing.local and not _is_loopback(self.http.host):
            raise ValueError(
                "writing.local: allowed only if http.host is a loopback address, such as 127.0.0.1"
            )
        if self.grafana_url and not _GRAFANA.fullmatch(self.grafana_url):
            raise ValueError(
                f"grafana_url: {self.grafana_url!r} is not an address such as "
                "https://grafana.example.com/d/muster/muster?var-node={node}"
            )
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"hosts: {host!r} is not a host name; leave out a port")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def origin(url: str) -> str:
    """Return the origin of the console's address as browsers send it: without a default port.

    RFC 6454, 6.2. Raises ValueError if `url` is not the address of a page.
    """
    parts = _ADDRESS.fullmatch(url)
    if not parts or not _HOST.fullmatch(parts["host"]) or int(parts["port"] or 0) > _PORT_MAX:
        raise ValueError("url: must be the console's address, such as https://muster.example.com/")
    scheme, host = parts["scheme"], parts["host"].lower()
    port = int(parts["port"] or _DEFAULT_PORTS[scheme])
    return f"{scheme}://{host}" + ("" if port == _DEFAULT_PORTS[scheme] else f":{port}")


def check_encrypted(name: str, url: str) -> None:
    """Raise ValueError unless an address uses HTTPS or is a loopback address."""
    if not url.startswith("https://") and not _LOOPBACK.fullmatch(url):
        raise ValueError(f"{name}: must begin with https://, except on this machine")
