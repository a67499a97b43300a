"""Adapter: name servers: the addresses of one host."""

import functools
import ipaddress
import socket

from muster_notifier import aside


class Host:
    """One host and port; a name server that hangs holds up nobody else."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port
        self._lane = aside.Lane()

    async def addresses(self) -> list[str]:
        """Return the addresses, each once. Raises OSError."""
        try:
            return [str(ipaddress.ip_address(self._name))]
        except ValueError:
            pass
        ask = functools.partial(socket.getaddrinfo, self._name, self._port, type=socket.SOCK_STREAM)
        found = await self._lane.run(ask)
        return list(dict.fromkeys(str(one[4][0]) for one in found))
