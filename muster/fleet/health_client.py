"""Adapter for HTTP and DNS: reads health's `/state`; of several replicas, that of the leader."""

import http.client
import re
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from muster.fleet import health_state

_TIMEOUT_S: Final = 5.0
_STATE_BYTES_MAX: Final = 512 * 1024 * 1024
"""The size limit of a state; a fleet of 100,000 nodes needs only a fraction of it."""
_PAGE_BYTES_MAX: Final = 32 * 1024 * 1024
"""The size limit of one page of the state, or of one node's state."""
_READ_S: Final = 8.0
"""How long reading a page may take, even if data keeps arriving."""
_CHUNK_BYTES: Final = 256 * 1024
ADDRESSES_MAX: Final = 8
"""How many addresses of a name are tried."""


class UnreadableState(ValueError):
    """Health answered with a state that this version cannot read."""


class _Replica(NamedTuple):
    url: str
    host: str
    """The header Host of requests; if empty, the host in the URL."""


def check_address(address: str) -> str:
    """Check the URL of a health service; return it without `/state`. Raises ValueError."""
    url = address.rstrip("/").removesuffix("/state")
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or not re.fullmatch(r"[!-~]+", url):
        raise ValueError(
            f"{address!r} is not the address of a health service such as http://127.0.0.1:8080"
        )
    return url


def read_state(url: str, query: str = "", *, host: str = "") -> health_state.State:
    """Return the state of the health service at a URL; with a query, within a few seconds.

    `query` is what `/state` accepts: `node=NAME`, or `nodes=500&after=NAME`. `host` is the server's
    name if the URL has only its address. Raises ConnectionError or UnreadableState.
    """
    place = f"{url}/state?{query}" if query else f"{url}/state"
    bytes_max = _PAGE_BYTES_MAX if query else _STATE_BYTES_MAX
    body = read(place, bytes_max, host=host, limit_s=_READ_S if query else float("inf"))
    if len(body) == bytes_max:
        raise UnreadableState(f"{place} is larger than {bytes_max // 1024**2} MiB")
    try:
        return health_state.decode(body)
    except ValueError as error:
        raise UnreadableState(f"{url}/state cannot be read by this version: {error}") from None


def addresses_of(host: str, port: int) -> list[str]:
    """Return the addresses of a name. Raises OSError."""
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in answers))


class Replicas:
    """Health's replicas; requests go to the leader, which is remembered until it no longer leads.

    A name with several addresses, such as that of a headless Service, means one replica at each
    address. With https it means a single replica, because the certificate is valid only for the
    name.
    """

    def __init__(
        self, urls: Sequence[str], *, resolve: Callable[[str, int], list[str]] = addresses_of
    ) -> None:
        assert urls, "at least one address"
        self._urls = tuple(urls)
        self._resolve = resolve
        self._leader: _Replica | None = None

    def read(self, query: str) -> health_state.State:
        """Return the leader's state, or the state of any replica if none leads.

        Blocks for at most a few seconds per replica. Raises ConnectionError if none answers, or
        UnreadableState.
        """
        other: health_state.State | None = None
        problem: ConnectionError | None = None
        for replica in self._replicas():
            try:
                state = read_state(replica.url, query, host=replica.host)
            except ConnectionError as error:
                problem = problem or error
                continue
            if state.service.revision is not None:
                self._leader = replica
                return state
            other = other or state
        self._leader = None
        if other is None:
            assert problem is not None, "there is at least one address"
            raise problem
        return other

    def _replicas(self) -> Iterator[_Replica]:
        """Yield the last leader, then resolve the names and yield all other replicas."""
        if first := self._leader:
            yield first
        for url in self._urls:
            for replica in self._at(url):
                if replica != first:
                    yield replica

    def _at(self, url: str) -> list[_Replica]:
        parts = urllib.parse.urlsplit(url)
        assert parts.hostname, "an address has passed check_address, or the settings"
        try:
            resolves = parts.scheme == "http"
            addresses = self._resolve(parts.hostname, parts.port or 80) if resolves else []
        except OSError:
            addresses = []
        if len(addresses) < 2:  # noqa: PLR2004
            # the request reports why a name cannot be resolved
            return [_Replica(url, "")]
        port = f":{parts.port}" if parts.port else ""
        queried = addresses[:ADDRESSES_MAX]
        hosts = (f"[{address}]" if ":" in address else address for address in queried)
        return [_Replica(f"http://{host}{port}{parts.path}", parts.netloc) for host in hosts]


def read(
    url: str,
    bytes_max: int = _STATE_BYTES_MAX,
    *,
    host: str = "",
    limit_s: float = float("inf"),
) -> bytes:
    """Return up to `bytes_max` bytes of an answer. Raises ConnectionError, also after `limit_s`."""
    ends_at = time.monotonic() + limit_s
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Host": host} if host else {})  # noqa: S310
    try:
        with direct.open(request, timeout=_TIMEOUT_S) as answer:
            body = bytearray()
            while chunk := answer.read1(min(_CHUNK_BYTES, bytes_max - len(body))):
                body += chunk
                if time.monotonic() > ends_at:
                    raise ConnectionError(f"{url}: no complete answer within {limit_s:g} s")
            return bytes(body)
    except urllib.request.HTTPError as error:
        error.close()
        raise ConnectionError(f"{url}: HTTP {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"{url}: {getattr(reason, 'strerror', None) or reason}") from None
