"""Requests reach no metadata service in any notation, and other addresses only by settings."""

import ipaddress
from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_notifier.config.receiver_settings import Reach
from muster_notifier.receivers import addresses

V4: Final = ipaddress.IPv4Address
V6: Final = ipaddress.IPv6Address


def allowed(*texts: str) -> list[Reach]:
    return [reach for reach in Reach if addresses.refusal(texts, reach) is None]


ALL: Final = [Reach.PUBLIC, Reach.PRIVATE, Reach.LOOPBACK]
OWN: Final = [Reach.PRIVATE, Reach.LOOPBACK]
HERE: Final = [Reach.LOOPBACK]


@pytest.mark.parametrize(
    ("reaches", "texts"),
    [
        (ALL, "1.1.1.1 192.0.0.9 192.31.196.1 172.32.0.0 100.128.0.0 2606:4700::1111 2001:20::1"),
        (ALL, "2001:4:112::1 2620:4f:8000::1 2001:200::1 ::ffff:1.1.1.1 64:ff9b::1.1.1.1"),
        (OWN, "10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 100.64.0.1 198.18.0.1 fd12::1"),
        (OWN, "192.0.0.1 192.0.0.8 192.0.0.171 192.0.2.1 192.88.99.2 240.0.0.1 203.0.113.255"),
        (OWN, "100::1 100:0:0:1::1 2001:2::1 2001:10::1 2001:db8::1 3fff::1 5f00::1 2001:1::4"),
        (OWN, "::ffff:10.0.0.1 64:ff9b::10.0.0.1 64:ff9b:1::1.1.1.1 2002:a00:1::1"),
        (HERE, "127.0.0.1 127.255.255.255 ::1 ::ffff:127.0.0.1 2002:7f00:1::1"),
        (HERE, "64:ff9b::127.0.0.1 64:ff9b:1::127.0.0.1"),
        ([], "0.0.0.0 0.1.2.3 255.255.255.255 224.0.0.1 239.1.2.3 :: ff02::1 fec0::1 feff::1"),
        ([], "::127.0.0.1 ::ffff:0:127.0.0.1 4000::1 fe00::1 200::1"),
        ([], "169.254.169.254 169.254.1.2 fe80::1 fe80::a9fe:a9fe fe80::1%eth0 100.100.100.200"),
        ([], "168.63.129.16 192.0.0.192 fd00:ec2::254 fd00:ec2::23 fd20:ce::254 fd00:42::42"),
        ([], "fd00:c1::a9fe:a9fe fd00:a9fe:a9fe::1 fd00:100::100:200"),
    ],
)
def test_each_address_is_reached_by_these_settings_only(reaches: list[Reach], texts: str) -> None:
    assert {text: allowed(text) for text in texts.split()} == dict.fromkeys(texts.split(), reaches)


def addresses_of(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> st.SearchStrategy[str]:
    """Return a strategy for addresses in a network and around its ends."""
    first, last = int(network[0]), int(network[-1])
    top = 2**network.max_prefixlen - 1
    kind = type(network[0])
    edges = [n for n in (first - 1, first, first + 1, last - 1, last, last + 1) if 0 <= n <= top]
    numbers = st.one_of(st.sampled_from(edges), st.integers(first, last))
    return numbers.map(lambda number: str(kind(number)))


SPECIAL: Final = st.sampled_from([block for block, _ in addresses.SPECIAL]).flatmap(addresses_of)


def is_listed_as_reachable(text: str) -> bool:
    """Return whether IANA's registries list an address as reachable, by the longest prefix."""
    address = ipaddress.ip_address(text)
    entries = {block: is_global for block, is_global in addresses.SPECIAL if address in block}
    longest = max(entries, key=lambda block: block.prefixlen, default=None)
    return longest is None or entries[longest]


@given(text=SPECIAL)
def test_without_a_setting_nothing_is_reached_that_iana_does_not_list_as_reachable(
    text: str,
) -> None:
    address = ipaddress.ip_address(text)
    is_mapped = isinstance(address, V6) and address.ipv4_mapped is not None
    assert is_listed_as_reachable(text) or is_mapped or Reach.PUBLIC not in allowed(text)


def test_the_registries_are_whole() -> None:
    blocks = [block for block, _ in addresses.SPECIAL]
    assert len(set(blocks)) == len(blocks)
    # 192.0.0.170 and 192.0.0.171 share an entry
    assert Counter(block.version for block in blocks) == {4: 25 + 1, 6: 25}


FORBIDDEN: Final = st.one_of(
    st.sampled_from(["169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192"]),
    addresses_of(ipaddress.ip_network("169.254.0.0/16")),
    addresses_of(ipaddress.ip_network("127.0.0.0/8")),
    addresses_of(ipaddress.ip_network("10.0.0.0/8")),
    st.integers(0, 2**32 - 1).map(lambda number: str(V4(number))),
)


def after(prefix: str) -> Callable[[int], int]:
    return lambda inner: int(V6(prefix)) | inner


def nat64(length: int) -> Callable[[int], int]:
    """Return a function that embeds an IPv4 address after a prefix of this length (RFC 6052)."""

    def written(inner: int) -> int:
        bits = f"{int(V6('64:ff9b:1::')):0128b}"[:length] + f"{inner:032b}"
        return int((bits[:64] + "0" * 8 + bits[64:]).ljust(128, "0")[:128], 2)

    return written


FORMS: Final[dict[str, Callable[[int], int]]] = {
    "mapped": after("::ffff:0:0"),
    "NAT64": after("64:ff9b::"),
    "6to4": lambda inner: int(V6("2002::")) | inner << 80 | 1,
    "Teredo client": lambda inner: int(V6("2001:0:808:808::")) | inner ^ 0xFFFF_FFFF,
    "local NAT64": after("64:ff9b:1::"),
}
NEVER_ONLY: Final[dict[str, Callable[[int], int]]] = {
    "Teredo server": lambda inner: int(V6("2001::f7f7:f7f7")) | inner << 64,
    **{f"local NAT64 /{length}": nat64(length) for length in (48, 56, 64)},
}


@pytest.mark.parametrize("form", FORMS)
@given(text=FORBIDDEN)
def test_an_address_inside_another_gains_nothing(form: str, text: str) -> None:
    outer = str(V6(FORMS[form](int(V4(text)))))
    assert set(allowed(outer)) <= set(allowed(text)), outer


@pytest.mark.parametrize("form", [*FORMS, *NEVER_ONLY])
@given(text=addresses_of(ipaddress.ip_network("169.254.0.0/16")))
def test_no_notation_leads_to_link_local_addresses(form: str, text: str) -> None:
    inner = int(V4(text))
    if V4(text).is_link_local:
        outer = str(V6((FORMS | NEVER_ONLY)[form](inner)))
        assert allowed(outer) == [], outer


@given(prefix=st.integers(0, 2**96 - 1))
def test_no_prefix_of_a_translator_leads_to_a_metadata_service(prefix: int) -> None:
    for service in ("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16"):
        assert allowed(str(V6(prefix << 32 | int(V4(service))))) == []


@given(
    good=st.lists(st.sampled_from(["1.1.1.1", "2606:4700::1111"]), max_size=4),
    bad=SPECIAL,
    place=st.integers(0, 4),
)
def test_one_address_of_several_is_enough_to_refuse(good: list[str], bad: str, place: int) -> None:
    assert allowed(*good[:place], bad, *good[place:]) == allowed(bad)
