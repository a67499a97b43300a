"""The console in a cluster, reached through a port-forward, and the forms sent to it."""

import contextlib
import http.client
import re
import subprocess
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.worlds import real_cluster

HEADER: Final = "X-Forwarded-User"
PROXY: Final = "127.0.0.1"
"""The address from which the pod receives the requests of a port-forward."""
_HIDDEN: Final = re.compile(r'name="(id|token)" value="(\w+)"')


@dataclass
class Browser:
    """A stand-in for a person's browser and the proxy before the console.

    `address` is that of the port-forward, `url` that of the console in the browser, and `person`
    the user whom the proxy names.
    """

    address: str
    url: str = ""
    person: str = ""
    cookie: str = ""

    def read(self, path: str) -> str:
        """Return a page."""
        status, text = self._request("GET", path)
        assert status == http.client.OK, text
        return text

    def send(self, path: str, **fields: str) -> tuple[int, str]:
        """Send a form with a page's hidden fields; return the status, and the Location or text."""
        hidden = dict(_HIDDEN.findall(self.read("/silence")))
        body = urllib.parse.urlencode(hidden | fields)
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        headers = {"Cookie": self.cookie, **({HEADER: self.person} if self.person else {})}
        if body is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            headers["Origin"] = self.url.rstrip("/")
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=30)) as link:
            link.request(method, path, body, headers)
            answer = link.getresponse()
            text = answer.read().decode()
            self.cookie = (answer.headers["Set-Cookie"] or self.cookie).partition(";")[0]
            return answer.status, answer.headers["Location"] or text


@contextlib.contextmanager
def forwarded(cluster: real_cluster.Cluster, folder: Path) -> Iterator[Browser]:
    """Wait for the console, forward a port to it as in docs/install.md, and yield a browser."""
    commands = real_cluster.block("install.md", "port-forward service/muster-console")
    waits, forwards = commands.replace("8630:80", ":80").splitlines()
    cluster.shell(waits, folder)
    with subprocess.Popen(
        forwards.split(), env=cluster.environment, stdout=subprocess.PIPE, text=True
    ) as forwarding:
        try:
            assert forwarding.stdout is not None
            line = forwarding.stdout.readline()
            yield Browser(line.removeprefix("Forwarding from ").split()[0])
        finally:
            forwarding.terminate()
