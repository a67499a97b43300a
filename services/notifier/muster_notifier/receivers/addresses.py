"""Pure: decides which addresses a request may go to.

Three kinds of addresses are never allowed: those at which clouds serve metadata and secrets, those
that do not identify one machine (such as multicast), and unassigned IPv6 addresses. Every other
address that IANA does not list as globally reachable needs the setting `reach`. An address that
contains an IPv4 address, for a translator or a tunnel, is allowed only if that IPv4 address is also
allowed.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from muster_notifier.config import receiver_settings

Reach: TypeAlias = receiver_settings.Reach
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

SPECIAL: Final = tuple(
    (ipaddress.ip_network(block), is_global)
    for block, is_global in (
        ("0.0.0.0/8", False),  # "this network"
        ("0.0.0.0/32", False),  # "this host on this network"
        ("10.0.0.0/8", False),  # private use
        ("100.64.0.0/10", False),  # shared address space
        ("127.0.0.0/8", False),  # loopback
        ("169.254.0.0/16", False),  # link local
        ("172.16.0.0/12", False),  # private use
        ("192.0.0.0/24", False),  # IETF protocol assignments
        ("192.0.0.0/29", False),  # IPv4 service continuity prefix
        ("192.0.0.8/32", False),  # IPv4 dummy address
        ("192.0.0.9/32", True),  # Port Control Protocol anycast
        ("192.0.0.10/32", True),  # TURN anycast
        ("192.0.0.170/32", False),  # NAT64/DNS64 discovery
        ("192.0.0.171/32", False),  # NAT64/DNS64 discovery
        ("192.0.2.0/24", False),  # documentation
        ("192.31.196.0/24", True),  # AS112-v4
        ("192.52.193.0/24", True),  # AMT
        ("192.88.99.0/24", False),  # deprecated (6to4 relay anycast)
        ("192.88.99.2/32", False),  # 6a44-relay anycast address
        ("192.168.0.0/16", False),  # private use
        ("192.175.48.0/24", True),  # direct delegation AS112 service
        ("198.18.0.0/15", False),  # benchmarking
        ("198.51.100.0/24", False),  # documentation
        ("203.0.113.0/24", False),  # documentation
        ("240.0.0.0/4", False),  # reserved
        ("255.255.255.255/32", False),  # limited broadcast
        ("::1/128", False),  # loopback address
        ("::/128", False),  # unspecified address
        ("::ffff:0:0/96", False),  # IPv4-mapped address
        ("64:ff9b::/96", True),  # IPv4-IPv6 translation
        ("64:ff9b:1::/48", False),  # IPv4-IPv6 translation
        ("100::/64", False),  # discard-only address block
        ("100:0:0:1::/64", False),  # dummy IPv6 prefix
        ("2001::/23", False),  # IETF protocol assignments
        ("2001::/32", False),  # Teredo: not applicable
        ("2001:1::1/128", True),  # Port Control Protocol anycast
        ("2001:1::2/128", True),  # TURN anycast
        ("2001:1::3/128", True),  # DNS-SD service registration protocol anycast
        ("2001:2::/48", False),  # benchmarking
        ("2001:3::/32", True),  # AMT
        ("2001:4:112::/48", True),  # AS112-v6
        ("2001:10::/28", False),  # deprecated (previously ORCHID)
        ("2001:20::/28", True),  # ORCHIDv2
        ("2001:30::/28", True),  # drone remote ID protocol entity tags
        ("2001:db8::/32", False),  # documentation
        ("2002::/16", False),  # 6to4: not applicable
        ("2620:4f:8000::/48", True),  # direct delegation AS112 service
        ("3fff::/20", False),  # documentation
        ("5f00::/16", False),  # segment routing (SRv6) SIDs
        ("fc00::/7", False),  # unique-local
        ("fe80::/10", False),  # link-local unicast
    )
)
"""IANA's special-purpose address blocks, each with whether it is globally reachable.

All entries of www.iana.org/assignments/iana-ipv4-special-registry and iana-ipv6-special-registry,
as of July 2026.
"""

METADATA: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16",  # nearly every cloud
            "169.254.169.254",  # AWS, Azure, Google, OpenStack and most others
            "169.254.170.2",  # AWS: the credentials of ECS' containers
            "169.254.170.23",  # AWS: the credentials of EKS' pods
            "169.254.42.42",  # Scaleway
            "169.254.0.23",  # Tencent
            "100.100.100.200",  # Alibaba
            "168.63.129.16",  # Azure
            "192.0.0.192",  # Oracle, classic
            "fe80::/10",  # OpenStack
            "fd00:ec2::/32",  # AWS: metadata is ::254, the credentials of EKS' pods are ::23
            "fd20:ce::254",  # Google
            "fd00:c1::a9fe:a9fe",  # Oracle
            "fd00:42::42",  # Scaleway
            "fd00:a9fe:a9fe::1",  # Akamai
            "fd00:100::100:200",  # Alibaba
        ),
    )
)
"""The addresses at which clouds serve metadata and secrets, from their documentation and
cloud-init.
"""

_NOT_A_MACHINE: Final = tuple(
    map(
        ipaddress.ip_network,
        # multicast has separate registries; site-local is deprecated (RFC 3879)
        ("0.0.0.0/8", "224.0.0.0/4", "255.255.255.255", "::", "ff00::/8", "fec0::/10"),
    )
)
_LOOPBACK: Final = tuple(map(ipaddress.ip_network, ("127.0.0.0/8", "::1")))
_MAPPED: Final = ipaddress.ip_network("::ffff:0:0/96")
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_NAT64_LOCAL: Final = ipaddress.ip_network("64:ff9b:1::/48")
_TEREDO: Final = ipaddress.ip_network("2001::/32")
_6TO4: Final = ipaddress.ip_network("2002::/16")
_UNICAST: Final = ipaddress.ip_network("2000::/3")
"""All IPv6 unicast addresses that IANA assigns, except the special ones."""
_SERVICES: Final = frozenset(
    network.network_address
    for network in METADATA
    if isinstance(network, ipaddress.IPv4Network) and network.num_addresses == 1
)
_32_BITS: Final = 0xFFFF_FFFF

_SECRETS: Final = "link-local or used by a cloud for metadata and secrets, and never allowed"
_NOBODY: Final = "not the address of one machine, and never allowed"
_RESERVED: Final = "reserved, and never allowed"
_HOW: Final = "beside the URL, such as `slack: {{reach: {0}, ...}}`, or pass --reach {0}"
_THIS_MACHINE: Final = f"this machine; to allow that, set `reach` {_HOW.format('loopback')}"
_PRIVATE: Final = f"private; to allow that, set `reach` {_HOW.format('private')}"
_PUBLIC: Final = ""

_ALLOWED: Final = {
    Reach.PUBLIC: (_PUBLIC,),
    Reach.PRIVATE: (_PUBLIC, _PRIVATE),
    Reach.LOOPBACK: (_PUBLIC, _PRIVATE, _THIS_MACHINE),
}


def refusal(addresses: Sequence[str], reach: Reach) -> str | None:
    """Return why a host must not be connected to; None if all its addresses are allowed."""
    for text in addresses:
        for problem in _problems(ipaddress.ip_address(text.partition("%")[0])):
            if problem not in _ALLOWED[reach]:
                return f"{text} is {problem}"
    return None


def _problems(address: _Address) -> Iterator[str]:
    if isinstance(address, ipaddress.IPv6Address):
        if address in _MAPPED or address in _NAT64:
            address = _part(address, 0)
        else:
            inner = _translated(address)
            # a translator (RFC 6052) or a tunnel (ISATAP, RFC 5214) may use any prefix
            if _part(address, 0) in _SERVICES or any(map(_has_secrets, inner)):
                yield _SECRETS
            yield from map(_problem, inner[:1])
    yield _problem(address)


def _problem(address: _Address) -> str:
    """Return why an address needs `reach` or is never allowed, ignoring addresses embedded in it.

    Empty if it is public.
    """
    if _has_secrets(address):
        return _SECRETS
    if any(address in network for network in _NOT_A_MACHINE):
        return _NOBODY
    if any(address in network for network in _LOOPBACK):
        return _THIS_MACHINE
    blocks = [(block.prefixlen, is_global) for block, is_global in SPECIAL if address in block]
    if blocks:
        # the most specific block applies
        return _PUBLIC if max(blocks)[1] else _PRIVATE
    is_assigned = isinstance(address, ipaddress.IPv4Address) or address in _UNICAST
    return _PUBLIC if is_assigned else _RESERVED


def _has_secrets(address: _Address) -> bool:
    return any(address in network for network in METADATA)


def _translated(address: ipaddress.IPv6Address) -> tuple[ipaddress.IPv4Address, ...]:
    """Return the IPv4 addresses that a translator or tunnel would extract, most common first."""
    if address in _TEREDO:
        # Teredo: the client's address is inverted, the server's is in the prefix (RFC 4380, 4)
        return _part(ipaddress.IPv6Address(int(address) ^ _32_BITS), 0), _part(address, 64)
    if address in _6TO4:
        return (_part(address, 80),)
    if address in _NAT64_LOCAL:
        # prefixes of 96, 64, 56 and 48 bits; bits 64 to 71 are skipped (RFC 6052 section 2.2)
        high, low = divmod(int(address), 1 << 64)
        rest = ipaddress.IPv6Address(high << 56 | low & (1 << 56) - 1)
        return _part(address, 0), _part(rest, 24), _part(rest, 32), _part(rest, 40)
    return ()


def _part(address: ipaddress.IPv6Address, shift: int) -> ipaddress.IPv4Address:
    """Return the 32 bits above the lowest `shift` bits of an address, as an IPv4 address."""
    return ipaddress.IPv4Address(int(address) >> shift & _32_BITS)
