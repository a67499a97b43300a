"""Pure: SSRF guard: which addresses a receiver's URL may lead to.

Link-local addresses (cloud metadata among them), multicast, reserved and unspecified ones are never
allowed. Private networks and this machine are allowed where the settings say so.
"""

import ipaddress
from collections.abc import Sequence
from typing import Final

from muster_notifier.config import receiver_settings

_METADATA: Final = frozenset(
    # of AWS by IPv6, Alibaba, Oracle and Azure: outside link-local addresses
    map(
        ipaddress.ip_address,
        ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"),
    )
)
_SHARED: Final = ipaddress.ip_network("100.64.0.0/10")
_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")


def refusal(addresses: Sequence[str], reach: receiver_settings.Reach) -> str | None:
    """Return why none of a host's addresses may be connected to, or None if all may."""
    for text in addresses:
        problem = _refusal(text, reach)
        if problem is not None:
            return f"{text} is {problem}"
    return None


def _refusal(text: str, reach: receiver_settings.Reach) -> str | None:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            address = inner
    if address.is_link_local or address in _METADATA:
        return "link-local, where clouds serve metadata and secrets: never allowed"
    if address.is_loopback:
        return (
            None
            if reach is receiver_settings.Reach.LOOPBACK
            else _unless("loopback", "this machine")
        )
    if address.is_multicast or address.is_unspecified:
        return "not the address of one machine: never allowed"
    if address.is_private or address in _SHARED:
        return _unless("private", "private") if reach is receiver_settings.Reach.PUBLIC else None
    return "reserved: never allowed" if address.is_reserved else None


def _unless(reach: str, what: str) -> str:
    return f"{what}: set `reach: {reach}` if this is intended"
