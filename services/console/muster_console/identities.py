"""Pure: identifies the sender of a request: a local user, or the person whom a proxy names."""

import enum
import ipaddress
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from muster import escaping
from muster_console import config

NAME_MAX: Final = 200
_ESTABLISHED: Final = "01"
_UID_FIELD: Final = 7


class Kind(enum.StrEnum):
    """How an identity was established."""

    LOCAL = "local"
    HEADER = "header"
    OIDC = "oidc"


class Identity(NamedTuple):
    """A person who may act."""

    name: str
    kind: Kind


class Unknown(Exception):
    """The visitor cannot be identified, or may not act; the message gives the reason."""


class Place(NamedTuple):
    """One end of a TCP connection."""

    address: str
    port: int


def by_header(
    headers: Sequence[tuple[str, str]], peer: str, rule: config.TrustedHeader
) -> Identity:
    """Return the person in the header.

    Raises Unknown if the peer is not a trusted proxy, or if the header is missing or empty, or has
    several values.
    """
    try:
        address = _address(peer)
    except ValueError:
        raise Unknown("the address of the request is not an IP address") from None
    if not any(address in ipaddress.ip_network(network) for network in rule.peers):
        raise Unknown("the request comes from none of the proxies in writing.header.from")
    named = [value.strip() for name, value in headers if name.lower() == rule.name.lower()]
    # a proxy that appends keeps the client's value; commas may join values (RFC 9110, 5.3)
    if len(named) > 1 or "," in "".join(named):
        raise Unknown(
            f"{rule.name} has several values: the proxy must replace this header, not append to it"
        )
    if not any(named):
        raise Unknown(f"the proxy names nobody in {rule.name}")
    return Identity(shown_name(named[0]), Kind.HEADER)


def socket_owner(table: str, client: Place, server: Place) -> int | None:
    """Return the user id of the client's process; None if the connection is not in the table.

    `table` is /proc/net/tcp or tcp6 (proc(5)): addresses are words of 32 bits in the machine's byte
    order. Only established connections count, because closed ones no longer have an owner.
    """
    wanted = (_address(client.address), client.port), (_address(server.address), server.port)
    # a cheap test first, because a busy machine has a hundred thousand lines
    for line in table.splitlines()[1:]:
        fields = line.split() if f":{client.port:04X} " in line else ()
        if len(fields) <= _UID_FIELD or fields[3] != _ESTABLISHED:
            continue
        if (_end(fields[1]), _end(fields[2])) == wanted:
            return int(fields[_UID_FIELD])
    return None


def shown_name(text: str) -> str:
    """Return a person's name with limited length, and without unprintable characters."""
    return escaping.plain(text)[:NAME_MAX]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an IP address; an IPv4-mapped IPv6 address becomes IPv4. Raises ValueError."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _end(field: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    digits, _, port = field.partition(":")
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = b"".join(struct.pack("=I", word) for word in words)
    return _address(str(ipaddress.ip_address(packed))), int(port, 16)
