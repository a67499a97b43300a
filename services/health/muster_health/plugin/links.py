"""Pure: What the bus says about one plugin's connections.

Such a word may be lost, and none is heard of a connection that was there before us. So it may raise
a suspicion and serve as evidence, and never decides alone.
"""

from dataclasses import dataclass
from typing import Final

_OPEN_MAX: Final = 8
_STALE: Final = ("stale", "authentication", "authorization", "slow consumer")
"""In the server's reasons for an end that the plugin itself did not make
(nats-server server/client.go, ClosedState)."""


_ID_CHARS: Final = 56
_SHORT_CHARS: Final = 8


def short(server: str) -> str:
    """Return a server as people can tell it from others: of its id, a key, the first characters."""
    return server[:_SHORT_CHARS] if len(server) == _ID_CHARS else server


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A plugin's last connection ended; `at` by our clock."""

    at: float
    reason: str
    server: str

    @property
    def by_server(self) -> bool:
        """Tell whether the server ended it: the process may still be there."""
        return any(word in self.reason.lower() for word in _STALE)


class Links:
    """The connections of one plugin, as far as we heard of them."""

    __slots__ = ("_open", "closed", "server")

    def __init__(self) -> None:
        self._open: tuple[tuple[str, int], ...] = ()
        self.closed: Closed | None = None
        self.server = ""

    @property
    def is_open(self) -> bool:
        """Tell whether we know of an open one."""
        return bool(self._open)

    def opened(self, server: str, client: int) -> None:
        """Take that the bus accepted one."""
        if (server, client) not in self._open:
            self._open = (*self._open, (server, client))[-_OPEN_MAX:]
        self.server, self.closed = server, None

    def ended(self, server: str, client: int, reason: str, now: float) -> bool:
        """Take that the bus lost one; return whether that leaves none that we know of."""
        self._open = tuple(one for one in self._open if one != (server, client))
        if self._open:
            return False
        self.closed = Closed(at=now, reason=reason, server=server)
        self.server = server
        return True

    def has_ended_since(self, at: float) -> bool:
        """Tell whether its last one ended after that."""
        return self.closed is not None and self.closed.at > at

    def forget(self) -> None:
        """Take that we were deaf for a while."""
        self._open, self.closed = (), None
